"""Models in Keras's own files: ``.keras``, which contains the options, and ``.weights.h5``.

The weights have the names of Nematus master with dots for slashes. Reading them needs no TensorFlow.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rmsnorm import errors
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.checkpoints.files import replacing
from rmsnorm.nematus.config import Config, write
from rmsnorm.nematus.names import check

SUFFIX: Final = ".keras"
WEIGHTS: Final = ".weights.h5"


def read(path: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Shapes of the arrays by name, and a function that reads one array.

    Raises:
        ModuleNotFoundError: h5py, which is installed with Keras, is not installed.
        ValueError: the file is damaged, or contains no model of this package.
    """
    try:
        h5py: Any = import_module("h5py")
    except ImportError as error:
        raise errors.missing_framework("Keras", "tf") from error
    try:
        weights = io.BytesIO(_member(path, "model" + WEIGHTS)) if path.suffix == SUFFIX else path
        with h5py.File(weights, "r") as file:
            arrays = {name.replace(".", "/"): array[()] for name, array in file["vars"].items()}
    except (KeyError, OSError, RuntimeError, TypeError) as error:
        raise _damaged(path, error) from error
    return {name: array.shape for name, array in arrays.items()}, arrays.__getitem__


def read_options(path: Path) -> dict[str, Any]:
    """The options of Nematus for the model in a ``.keras`` file.

    Raises:
        ValueError: the file is damaged, or contains another kind of model.
    """
    try:
        return write(Config(**json.loads(_member(path, "config.json"))["config"]["config"]))
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error


def save_keras(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as Keras does; ``keras.saving.load_model`` reads it after ``import rmsnorm.nematus.tf``.

    Args:
        path: ends in .keras; an existing file is replaced when the new one is complete.
        config, parameters: as ``rmsnorm.nematus.load`` returns them; it reads them back.

    Raises:
        ModuleNotFoundError: TensorFlow or Keras is not installed.
        ValueError: the parameters are not those of the config, or the path has another suffix.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise errors.out_of_domain("save_keras", "path", str(path), f"a name that ends in {SUFFIX}", "add it")
    check("save_keras", config, parameters)
    model = model_class("tf", config)(config.replace(exponential_smoothing=0.0), parameters)
    with replacing(path) as temporary:
        model.save(temporary)


def _member(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise OSError(error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"nematus.load: {path} is damaged ({error}), expected a model of rmsnorm in a file of Keras; copy it again"
    )
