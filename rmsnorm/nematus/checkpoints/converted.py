"""Models in the files of other frameworks, with Nematus's options: safetensors, Keras's files, checkpoints of Orbax.

A safetensors file, which NumPy and every framework can read, has the state dict of the model in PyTorch: Nematus
master's names with dots for slashes. So has a file of Keras, ``.keras``, which contains the options, or
``.weights.h5``; reading it needs no TensorFlow. A checkpoint of Orbax contains the state of the model in Flax as nested
dictionaries, whose keys are the parts of the names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save

from rmsnorm.files import reading, replacing, tensors
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.cells import dotted, slashed
from rmsnorm.nematus.checkpoints.files import OP, Location, write_options
from rmsnorm.nematus.config import Config, write
from rmsnorm.nematus.names import check
from rmsnorm.nematus.vocabulary import copied
from rmsnorm.specification import errors

KERAS: Final = ".keras"
_CLASSES: Final = ("rmsnorm>RNNSearch", "rmsnorm>Transformer")
_WANTED: Final = "a model of rmsnorm in a file of Keras"


def read_safetensors(path: Path) -> tensors.Tensors:
    """The arrays by the names of Nematus master: see ``tensors.safetensors``."""
    return renamed(tensors.safetensors(OP, path), slashed)


def read_keras(path: Path) -> tensors.Tensors:
    """The arrays by the names of Nematus master: see ``tensors.keras``."""
    return renamed(tensors.keras(OP, path, "vars", _WANTED), lambda name: name.replace(".", "/"))


def renamed(read: tensors.Tensors, new: Callable[[str], str]) -> tensors.Tensors:
    """The same arrays by new names."""
    shapes, tensor = read
    names = {new(name): name for name in shapes}
    return {name: shapes[own] for name, own in names.items()}, lambda name: tensor(names[name])


def read_flax(path: Path) -> tensors.Tensors:
    """The arrays by the names of Nematus master: see ``tensors.orbax``."""
    return tensors.orbax(OP, path, Location(path, "flax").size)


def read_options(path: Path) -> dict[str, Any]:
    """The options of Nematus for the model in a ``.keras`` file."""
    with reading(OP, path, _WANTED):
        model = json.loads(tensors.member(OP, path, "config.json", _WANTED))
        kind = model.get("registered_name") or model.get("class_name")
        if kind is not None and kind not in _CLASSES:
            fix = "name the model.keras that rmsnorm port wrote"
            raise errors.another_kind(OP, path, f"a file of Keras with the model {kind!r:.80}", _WANTED, fix)
        return write(Config(**model["config"]["config"]))


def save_safetensors(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as a safetensors file, with its options in ``<path>.json`` and its dictionaries beside it.

    Args:
        path: ends in .safetensors; an existing file is replaced when the new one is complete.
        config, parameters: as ``rmsnorm.nematus.load`` returns them; it reads them back.

    Raises:
        ValueError: the parameters are not those of the config, or the path has another suffix.

    Example:
        >>> import tempfile
        >>> from rmsnorm import nematus
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3, norm="rms")
        >>> parameters = {row.name: np.ones(row.shape) for row in variables(config)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_safetensors(f"{directory}/model.safetensors", config, parameters)
        ...     nematus.load(directory).config == config
        True
    """
    path = _with_suffix("save_safetensors", path, ".safetensors")
    rows = check("save_safetensors", config, parameters)
    arrays = {dotted(row.name): np.ascontiguousarray(parameters[row.name]) for row in rows}
    with replacing(path) as temporary:
        temporary.write_bytes(save(arrays))
    write_options(path, copied(config, path.parent))


def save_keras(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as Keras does; ``keras.saving.load_model`` reads it after ``import rmsnorm.nematus.tf``.

    Args:
        path: ends in .keras; an existing file is replaced when the new one is complete.
        config, parameters: as ``rmsnorm.nematus.load`` returns them; it reads them back.

    Raises:
        ModuleNotFoundError: TensorFlow or Keras is not installed.
        ValueError: the parameters are not those of the config, or the path has another suffix.
    """
    path = _with_suffix("save_keras", path, KERAS)
    check("save_keras", config, parameters)
    config = copied(config, path.parent)
    model = model_class("tf", config)(config.replace(exponential_smoothing=0.0), parameters)
    with replacing(path) as temporary:
        model.save(temporary)


def save_flax(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as a checkpoint of Orbax, with its options in ``<path>.json``.

    Args:
        path: of a new directory.
        config, parameters: as ``rmsnorm.nematus.load`` returns them; it reads them back.

    Raises:
        FileExistsError: the path exists.
        ModuleNotFoundError: Flax is not installed.
        ValueError: the parameters are not those of the config.
    """
    orbax, trees, path = tensors.flax("orbax.checkpoint"), tensors.flax("flax.traverse_util"), Path(path)
    rows = check("save_flax", config, parameters)
    if path.exists():
        raise FileExistsError(f"save_flax: {path} exists, expected a new directory; name another")
    tree = trees.unflatten_dict({tuple(row.name.split("/")): np.asarray(parameters[row.name]) for row in rows})
    with replacing(path) as temporary, orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(temporary.absolute(), tree)
    write_options(path, copied(config, path.parent))


def _with_suffix(op: str, path: str | os.PathLike[str], suffix: str) -> Path:
    path = Path(path)
    if path.suffix != suffix:
        raise errors.out_of_domain(op, "path", str(path), f"a name that ends in {suffix}", "add it")
    return path
