"""Models in Keras's own files: ``.keras``, which contains the options, and ``.weights.h5``.

The weights have the names of Nematus master with dots for slashes. Reading them needs no TensorFlow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rmsnorm import errors, tensors
from rmsnorm.files import reading, replacing
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.checkpoints.files import OP
from rmsnorm.nematus.config import Config, write
from rmsnorm.nematus.names import check

SUFFIX: Final = ".keras"
_WANTED: Final = "a model of rmsnorm in a file of Keras"


def read(path: Path) -> tensors.Tensors:
    """The arrays by the names of Nematus master: see ``tensors.keras``."""
    shapes, tensor = tensors.keras(OP, path, "vars", _WANTED)
    names = {name.replace(".", "/"): name for name in shapes}
    return {name: shapes[own] for name, own in names.items()}, lambda name: tensor(names[name])


def read_options(path: Path) -> dict[str, Any]:
    """The options of Nematus for the model in a ``.keras`` file.

    Raises:
        ValueError: the file is damaged, or contains another kind of model.
    """
    with reading(OP, path, _WANTED):
        return write(Config(**json.loads(tensors.member(path, "config.json"))["config"]["config"]))


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
