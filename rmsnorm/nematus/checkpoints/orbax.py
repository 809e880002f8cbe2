"""Models in a checkpoint of Orbax, which Flax reads, with Nematus's options beside it.

The checkpoint contains the state of the model in Flax as nested dictionaries; their keys are the parts of Nematus's
names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm import errors
from rmsnorm.nematus.checkpoints.files import replacing, write_options
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check


def read(path: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Shapes of the arrays by name, and a function that reads one array.

    Raises:
        ModuleNotFoundError: Flax is not installed.
        ValueError: the checkpoint is damaged.
    """
    orbax, trees = _flax("orbax.checkpoint"), _flax("flax.traverse_util")
    try:
        with orbax.PyTreeCheckpointer() as checkpointer:
            names = trees.flatten_dict(checkpointer.metadata(path.absolute()).item_metadata.tree)
            as_numpy = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in names}
            tree = checkpointer.restore(path.absolute(), restore_args=trees.unflatten_dict(as_numpy))
        # The paths of an nnx.State end in "value", those of its pure dictionary do not.
        arrays = {name.removesuffix("/value"): array for name, array in trees.flatten_dict(tree, sep="/").items()}
    except Exception as error:  # of many types, because the parts of a checkpoint have different readers
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"nematus.load: {path} is damaged ({first}), expected a whole checkpoint of Orbax; copy it again"
        ) from error
    return {name: array.shape for name, array in arrays.items()}, arrays.__getitem__


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
