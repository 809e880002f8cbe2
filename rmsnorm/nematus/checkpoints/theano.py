"""Theano archives: named arrays in an ``.npz`` file for Theano Nematus. Nothing is ever unpickled."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm import errors, tensors
from rmsnorm.files import replacing
from rmsnorm.nematus.checkpoints.files import OP, write_options
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check, is_of_training, variables


def read(path: Path) -> tensors.Tensors:
    """The arrays of a model and numbers of its trainer: see ``tensors.npz``."""
    return tensors.npz(OP, path, is_of_training)


def save_theano(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as an archive for Theano Nematus, with its options in ``<path>.json``.

    The arrays are written unchanged, under their Theano names. Theano Nematus adds the biases of deep decoders in other
    places than TensorFlow Nematus, and has no output activation except tanh: if it would compute other numbers than the
    model, a warning says so. ``rmsnorm.nematus.load`` reads the same model back, with its dialect.

    Args:
        path: of the archive; an existing file is replaced when the new one is complete.
        config, parameters: as ``rmsnorm.nematus.load`` returns them.

    Raises:
        ValueError: Theano Nematus has no such variable, or the parameters are not those of the config.
    """
    if config.dialect == "zero":
        raise errors.out_of_domain("save_theano", "dialect", "zero", "one of Nematus", "save a TensorFlow checkpoint")
    arrays: dict[str, Any] = {}
    for row in check("save_theano", config, parameters):
        if row.theano is None:
            raise errors.InputValueError(
                f"save_theano: Theano Nematus has no variable like {row.name}; save a TensorFlow checkpoint"
            )
        arrays[row.theano] = np.asarray(parameters[row.name])
    dtype = arrays["ff_state_b"].dtype
    for row in variables(config.replace(dialect="theano")):  # TensorFlow has no biases of encoder transitions
        if row.theano is not None:
            arrays.setdefault(row.theano, np.zeros(row.shape, dtype))
    arrays["decoder_c_tt"] = np.zeros(1, dtype)
    for reason, differs in (
        ("it adds the biases of decoder/high elsewhere", config.dialect != "theano" and config.rnn_dec_depth > 1),
        ("its output activation is tanh", config.output_hidden_activation != "tanh"),
    ):
        if differs:
            warnings.warn(f"save_theano: Theano Nematus will compute other numbers: {reason}", stacklevel=2)
    path = Path(path)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    write_options(path, config, theano=True)
