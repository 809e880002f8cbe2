"""The archives that the authors' Theano programs write: named arrays in an ``.npz`` file, and options beside it."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from experiments.pickles import read_pickle
from rmsnorm.files import check_expansion, check_regular, read_json, reading, replacing, tensors, write_text
from rmsnorm.nematus.files import finite
from rmsnorm.nematus.names import Variable, is_of_training, match
from rmsnorm.specification import errors

WANTED: Final = "the options of the model"
_CLASSES: Final = {"collections.OrderedDict": OrderedDict}


class Archive(NamedTuple):
    """An archive before its arrays are read.

    Attributes:
        options: of the model.
        words: ids of the words, which the order embeddings keep beside their options; else empty.
        shapes: of the arrays of the model, by name; those of the trainer are left out.
        array: reads an array.
    """

    path: Path
    options: dict[str, Any]
    words: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    array: Callable[[str], Any]


def read(op: str, path: str | os.PathLike[str], options: str | os.PathLike[str] | Mapping[str, Any] | None) -> Archive:
    """An archive and its options: these, or those in this file, or in a usual file beside the archive.

    Usual are <archive>.json, <archive>.pkl, the same without .npz, and options.json. A pickle may contain plain values.

    Raises:
        FileNotFoundError: there is no archive, or there are no options.
        ValueError: a file is damaged, or contains objects.
    """
    path = Path(path)
    check_regular(op, path, "an archive (*.npz)")
    contents = dict(options) if isinstance(options, Mapping) else _options(op, path, options)
    words = contents.get("worddict", {})
    contents = contents.get("options", contents)
    if not isinstance(contents, dict) or not isinstance(words, dict):
        raise errors.wrong_type(op, "options", contents, WANTED, "pass options=")
    shapes, array = tensors.npz(op, path, is_of_training)
    shapes = {name: shape for name, shape in shapes.items() if not is_of_training(name)}
    return Archive(path, contents, words, shapes, array)


def _options(op: str, archive: Path, file: str | os.PathLike[str] | None) -> dict[str, Any]:
    stem = archive.with_suffix("") if archive.suffix == ".npz" else archive
    usual = [Path(f"{name}{suffix}") for name in (archive, stem) for suffix in (".json", ".pkl")]
    usual.append(archive.with_name("options.json"))
    path = Path(file) if file is not None else next((name for name in usual if name.exists()), usual[0])
    options = read_pickle(op, path, WANTED, _CLASSES) if path.suffix == ".pkl" else read_json(op, path, WANTED)
    if not isinstance(options, dict):
        raise ValueError(f"{op}: {path} is no object, expected {WANTED}; pass options=")
    return options


def arrays(op: str, archive: Archive, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """All arrays of the model, which must have exactly these names and shapes, and finite numbers.

    Raises:
        TypeError: an array is not floating-point.
        ValueError: they are others.
    """
    check(op, str(archive.path), wanted, archive.shapes)
    with reading(op, archive.path, "a model of the size of its file"):
        check_expansion(4 * sum(map(math.prod, wanted.values())), archive.path.stat().st_size)
    return {name: finite(op, archive.path, name, archive.array(name)) for name in archive.shapes}


def check(op: str, source: str, wanted: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless names and shapes are as wanted."""
    match(op, source, {name: Variable(name, shape, name, name, name) for name, shape in wanted.items()}, shapes)


def write(
    op: str,
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    parameters: Mapping[str, Any],
    wanted: Mapping[str, tuple[int, ...]],
) -> None:
    """Write arrays unchanged and, in <path>.json, the options; each file is whole or not there.

    Raises:
        ValueError: these are not the parameters of the options.
    """
    values = {name: np.asarray(value) for name, value in parameters.items()}
    check(op, "the model", wanted, {name: value.shape for name, value in values.items()})
    path = Path(path)
    with replacing(path) as temporary, temporary.open("wb") as file:
        tensors.write_npz(file, values)
    write_text(Path(f"{path}.json"), json.dumps(dict(options), indent=2, sort_keys=True))


def written_layer(layer: str, prefix: str, names: Iterable[str]) -> str:
    """The layer that has these arrays: one with gains and no offsets is RMSNorm's, also if it is called LayerNorm's.

    The released model of the paper calls rlngru lngru.

    >>> written_layer("lngru", "encoder", ["encoder_s1"])
    'rlngru'
    """
    names = set(names)
    is_renamed = layer.startswith("ln") and f"{prefix}_s1" in names and f"{prefix}_b1" not in names
    return f"r{layer}" if is_renamed else layer
