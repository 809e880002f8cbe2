"""Models in Keras's own files: ``.keras``, which contains the options, and ``.weights.h5``.

The weights have the names of Nematus master with dots for slashes. Reading them needs no TensorFlow.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from rmsnorm import errors
from rmsnorm.files import check_expansion, reading, replacing
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.checkpoints.files import OP
from rmsnorm.nematus.config import Config, write
from rmsnorm.nematus.names import check

SUFFIX: Final = ".keras"
WEIGHTS: Final = ".weights.h5"
_WANTED: Final = "a model of rmsnorm in a file of Keras"
_CHUNK: Final = 2**20  # numbers: HDF5 reads whole chunks, which compressed take hardly any room in a file


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
    weights: Any = path
    with reading(OP, path, _WANTED):
        if path.suffix == SUFFIX:
            weights = io.BytesIO(_member(path, "model" + WEIGHTS))
        with h5py.File(weights, "r") as file:
            datasets = _datasets(h5py, file)
            shapes = {name: dataset.shape for name, dataset in datasets.items()}

    def array(name: str) -> Any:
        with reading(OP, path, _WANTED), h5py.File(weights, "r") as file:
            return _datasets(h5py, file)[name][()]

    return shapes, array


def _datasets(h5py: Any, file: Any) -> dict[str, Any]:
    """The arrays by name. None may be a link or be kept in another file, which the file from outside would choose."""

    def own(group: Any, name: str, kind: Any) -> Any:
        part = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
        if part is None or (isinstance(part, h5py.Dataset) and (part.external or part.is_virtual)):
            raise ValueError(f"{name} is kept outside of it")
        if not isinstance(part, kind):
            raise ValueError(f"{name} is a {type(part).__name__} of HDF5, not a {kind.__name__}")
        if kind is h5py.Dataset and math.prod(part.chunks or ()) > max(part.size, _CHUNK):
            raise ValueError(f"{name} is stored in chunks that are larger than it: {part.chunks}")
        return part

    variables = own(file, "vars", h5py.Group)
    return {name.replace(".", "/"): own(variables, name, h5py.Dataset) for name in variables}


def read_options(path: Path) -> dict[str, Any]:
    """The options of Nematus for the model in a ``.keras`` file.

    Raises:
        ValueError: the file is damaged, or contains another kind of model.
    """
    with reading(OP, path, _WANTED):
        return write(Config(**json.loads(_member(path, "config.json"))["config"]["config"]))


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
    with zipfile.ZipFile(path) as archive:
        check_expansion(archive.getinfo(name).file_size, path.stat().st_size)
        return archive.read(name)
