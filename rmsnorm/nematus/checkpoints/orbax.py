"""Models in a checkpoint of Orbax, which Flax reads, with Nematus's options beside it.

The checkpoint contains the state of the model in Flax as nested dictionaries; their keys are the parts of Nematus's
names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.files import check_expansion, reading, replacing
from rmsnorm.nematus.checkpoints.files import OP, Location, write_options
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check

_VALUE: Final = "/value"  # ends the paths of an nnx.State, not those of its pure dictionary
_WANTED: Final = "a whole checkpoint of Orbax"


def read(path: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Shapes of the arrays by name, and a function that reads one array.

    Raises:
        ModuleNotFoundError: Flax is not installed.
        ValueError: the checkpoint is damaged.
    """
    orbax, trees = _flax("orbax.checkpoint"), _flax("flax.traverse_util")
    with reading(OP, path, _WANTED), orbax.PyTreeCheckpointer() as checkpointer:
        tree = trees.flatten_dict(checkpointer.metadata(path.absolute()).item_metadata.tree)
        names = {"/".join(keys).removesuffix(_VALUE): keys for keys in tree}
        shapes = {name: tuple(tree[keys].shape) for name, keys in names.items()}

    @cache
    def arrays() -> Any:
        with orbax.PyTreeCheckpointer() as checkpointer:
            as_numpy = {keys: orbax.RestoreArgs(restore_type=np.ndarray) for keys in tree}
            restored = checkpointer.restore(path.absolute(), restore_args=trees.unflatten_dict(as_numpy))
        return trees.flatten_dict(restored)

    def array(name: str) -> Any:
        with reading(OP, path, _WANTED):
            check_expansion(4 * sum(map(math.prod, shapes.values())), Location(path, "flax").size)
            return arrays()[names[name]]

    return shapes, array


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
    orbax, trees, path = _flax("orbax.checkpoint"), _flax("flax.traverse_util"), Path(path)
    rows = check("save_flax", config, parameters)
    if path.exists():
        raise FileExistsError(f"save_flax: {path} exists, expected a new directory; name another")
    tree = trees.unflatten_dict({tuple(row.name.split("/")): np.asarray(parameters[row.name]) for row in rows})
    with replacing(path) as temporary, orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(temporary.absolute(), tree)
    write_options(path, config)


def _flax(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise errors.missing_framework("Flax", "flax") from error
