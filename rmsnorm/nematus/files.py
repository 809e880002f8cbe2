"""Finds the files of a Nematus model, and reads and writes its options."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from rmsnorm.files import check_regular, read_json, write_text
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.options import write
from rmsnorm.specification import errors

OP: Final = "nematus.load"
ZERO_OPTIONS: Final = "param.json"  # beside a checkpoint of zero

Form = Literal["tensorflow", "theano", "safetensors", "keras"]

_FORMS: Final[Mapping[str, Form]] = {
    ".npz": "theano", ".safetensors": "safetensors", ".keras": "keras", ".weights.h5": "keras"
}  # fmt: skip


class Location(NamedTuple):
    """The path of a model: a file, or the prefix of a TensorFlow checkpoint."""

    path: Path
    form: Form

    @property
    def name(self) -> str:
        """What names it among others."""
        return f"{self.path.name}{'.index' * (self.form == 'tensorflow')}"

    @property
    def size(self) -> int:
        """Bytes of its files; ValueError if one is no regular file."""
        files = [self.path]
        if self.form == "tensorflow":
            parts = self.path.parent.glob(f"{glob.escape(self.path.name)}.data-*")
            files = [Path(f"{self.path}.index"), *parts]
        for file in files:
            check_regular(OP, file, "a part of the model")
        return sum(file.stat().st_size for file in files)


def locate(path: str | os.PathLike[str]) -> Location:
    """The only model in a directory, or that which its ``checkpoint`` file names, or that with this prefix or name."""
    path = Path(path)
    if path.is_dir():
        return _in_directory(path)
    if path.is_file() and Path(f"{path}.index").is_file():
        raise errors.InputValueError(
            f"nematus.load: {path} is a file and the prefix of a TensorFlow checkpoint, expected the name of one "
            f"model; name {path.name}.index, or move the file into another directory"
        )
    names = [path, Path(re.sub(r"\.(index|data-\d+-of-\d+|meta|json)$", "", str(path)))]
    for name in names:
        if Path(f"{name}.index").is_file():
            return Location(name, "tensorflow")
    for name in reversed(names):
        if name.is_file():
            return Location(name, next((form for end, form in _FORMS.items() if name.name.endswith(end)), "theano"))
    raise FileNotFoundError(
        f"nematus.load: {path} is neither a directory, nor a file, nor the prefix of a checkpoint, "
        "expected one of these; look for model.npz or model.npz.index"
    )


def _in_directory(directory: Path) -> Location:
    state = directory / "checkpoint"
    if state.is_file():
        with state.open(encoding="utf-8", errors="replace") as file:
            entry = re.search(r'^model_checkpoint_path: "(.*)"$', file.read(2**20), re.MULTILINE)
        name = Path(entry[1]).name if entry else ""  # no more: it may have been written in another directory
        if entry and (directory / f"{name}.index").is_file():
            return Location(directory / name, "tensorflow")
    models = [Location(path.with_suffix(""), "tensorflow") for path in sorted(directory.glob("*.index"))]
    paths = [(path, form) for suffix, form in _FORMS.items() for path in sorted(directory.glob(f"*{suffix}"))]
    files = [Location(path, form) for path, form in paths if path.is_file()]
    models += [at for at in files if at.path.suffix == ".keras" or Path(f"{at.path}.json").is_file()]  # with options
    if not models and (directory / "config.json").is_file():
        models = [location for location in files if location.path.name.startswith("model.")]
    if not models:
        raise FileNotFoundError(
            f"nematus.load: {directory} holds no model, expected a checkpoint (*.index), an archive (*.npz) or "
            "another form with its options (*.json); name the file itself"
        )
    if len(models) > 1:
        names = ", ".join(model.name for model in models)
        raise errors.InputValueError(
            f"nematus.load: {directory} holds {len(models)} models, expected one; name one of {names}"
        )
    return models[0]


def read_options(model: Path, file: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The options of a model, from this file, or by default from ``<model>.json``, ``param.json`` or ``config.json``.

    Checkpoints that were written during training, as ``model.npz-1000`` or ``model.iter1000.npz``, have the options of
    model.npz.
    """
    final = re.sub(r"\.iter\d+(?=\.npz$)|-\d+$|(?<=\.npz)\..*$", "", model.name)
    usual = [Path(f"{model}.json"), *map(model.with_name, (f"{final}.json", ZERO_OPTIONS, "config.json"))]
    candidates = usual if file is None else [Path(file)]
    path, fix = next((path for path in candidates if path.exists()), None), "config=, in the commands --config"
    if path is None:
        raise FileNotFoundError(
            f"nematus.load: the options of {model} are missing, expected in {candidates[0]}; name their file: {fix}"
        )
    options = read_json(OP, path, "the options of a Nematus model")
    if not isinstance(options, dict):
        raise errors.InputValueError(
            f"nematus.load: {path} is not an object, expected the options of a Nematus model; name another file: {fix}"
        )
    return options


def write_options(model: Path, config: Config, *, theano: bool = False, name: str | None = None) -> None:
    """Write the options beside the model, without exponential smoothing: the file has no averages."""
    path = Path(f"{model}.json") if name is None else model.with_name(name)
    options = write(config.replace(exponential_smoothing=0.0), theano=theano)
    indent = None if config.rules.is_zero else 2  # zero reads the first line
    write_text(path, json.dumps(options, indent=indent, sort_keys=True))


def finite(op: str, path: Path, name: str, array: Any) -> Any:
    """The array, if it holds finite floating-point numbers; else TypeError for its dtype, or ValueError."""
    if array.dtype.name not in ("float32", "float64"):
        raise errors.wrong_dtype(op, f"{name} in {path}", array.dtype.name, ["float32", "float64"])
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise errors.InputValueError(
            f"{op}: {name} in {path} holds {bad} NaN or infinite values of {array.size}, expected finite "
            "weights; take a checkpoint from before training went wrong"
        )
    return array
