"""Theano archives: named arrays in an ``.npz`` file for Theano Nematus. Nothing is ever unpickled."""

from __future__ import annotations

import math
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm import errors
from rmsnorm.files import reading, replacing
from rmsnorm.nematus.checkpoints.files import OP, write_options
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check, is_of_training, variables

__all__ = ["read", "save_theano"]

_SUFFIX: Final = ".npy"
_WANTED: Final = "an npz archive"


def read(path: Path, op: str = OP) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Shapes of the arrays by name, and a function that reads one array.

    Arrays of Python objects, which only unpickling could read, are left out if they belong to the trainer.

    Raises:
        ValueError: the file is no archive, is incomplete, or has such an array as a part of the model.
    """
    with reading(op, path, _WANTED):
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("its end is missing")
        arrays: dict[str, _Header] = {}
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.filename.endswith(_SUFFIX):
                    name = member.filename.removesuffix(_SUFFIX)
                    if name in arrays:
                        raise zipfile.BadZipFile(f"{name} is in it twice")
                    with archive.open(member) as file:
                        arrays[name] = _header(name, file, member.file_size)
    for name, header in arrays.items():
        if header.dtype.hasobject and not is_of_training(name):
            raise errors.InputValueError(
                f"{op}: {name} in {path} is an array of Python objects, expected numbers; "
                "it is never unpickled: save it as numbers, or leave it out"
            )

    def array(name: str) -> Any:
        with reading(op, path, _WANTED), zipfile.ZipFile(path) as archive, archive.open(name + _SUFFIX) as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return {name: header.shape for name, header in arrays.items() if not header.dtype.hasobject}, array


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _header(name: str, file: Any, size: int) -> _Header:
    """What the start of an array says of it, which must be what follows."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise errors.InputValueError(f"{name} has a header of version {version}")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    wanted, rest = math.prod(shape) * dtype.itemsize, size - file.tell()
    if not dtype.hasobject and (min(shape, default=0) < 0 or wanted != rest):
        raise errors.InputValueError(f"{name} of shape {shape} and {rest} bytes, expected {wanted}")
    return _Header(shape, dtype)


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
