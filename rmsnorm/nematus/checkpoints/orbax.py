"""Models in a checkpoint of Orbax, which Flax reads, with Nematus's options beside it.

The checkpoint contains the state of the model in Flax as nested dictionaries; their keys are the parts of Nematus's
names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm import tensors
from rmsnorm.files import replacing
from rmsnorm.nematus.checkpoints.files import OP, Location, write_options
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check


def read(path: Path) -> tensors.Tensors:
    """The arrays by the names of Nematus master: see ``tensors.orbax``."""
    return tensors.orbax(OP, path, Location(path, "flax").size)


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
    write_options(path, config)
