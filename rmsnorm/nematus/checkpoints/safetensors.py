"""Models in a safetensors file, which NumPy and every framework can read, with Nematus's options beside it.

The names are those of Nematus master with dots for slashes, as in the state dict of the models in PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save

from rmsnorm import errors, tensors
from rmsnorm.files import replacing
from rmsnorm.nematus.cells import dotted, slashed
from rmsnorm.nematus.checkpoints.files import OP, write_options
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check

SUFFIX: Final = ".safetensors"


def read(path: Path) -> tensors.Tensors:
    """The arrays by the names of Nematus master: see ``tensors.safetensors``."""
    shapes, tensor = tensors.safetensors(OP, path)
    names = {slashed(name): name for name in shapes}
    return {name: shapes[own] for name, own in names.items()}, lambda name: tensor(names[name])


def save_safetensors(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as a safetensors file, with its options in ``<path>.json``.

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
    path = Path(path)
    if path.suffix != SUFFIX:
        raise errors.out_of_domain("save_safetensors", "path", str(path), f"a name that ends in {SUFFIX}", "add it")
    rows = check("save_safetensors", config, parameters)
    arrays = {dotted(row.name): np.ascontiguousarray(parameters[row.name]) for row in rows}
    with replacing(path) as temporary:
        temporary.write_bytes(save(arrays))
    write_options(path, config)
