"""Where the files of a Nematus model are, and how they are replaced: all at once or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rmsnorm.porting.config import Config, write


class Place(NamedTuple):
    """A model: the prefix of a TensorFlow checkpoint, a Theano archive, or a safetensors file."""

    path: Path
    is_checkpoint: bool


def locate(path: str | os.PathLike[str]) -> Place:
    """The model in a directory, or with that prefix or name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there are several, and no ``checkpoint`` file says which.
    """
    given = Path(path)
    if given.is_dir():
        return _in_directory(given)
    names = [given, Path(re.sub(r"\.(index|data-\d+-of-\d+|meta|json)$", "", str(given)))]
    for name in names:
        if Path(f"{name}.index").is_file():
            return Place(name, True)
    for name in reversed(names):
        if name.is_file():
            return Place(name, False)
    raise FileNotFoundError(
        f"nematus.load: {given} is neither a directory, nor a file, nor the prefix of a checkpoint, "
        "expected one of these; look for model.npz or model.npz.index"
    )


def _in_directory(directory: Path) -> Place:
    state = directory / "checkpoint"
    if state.is_file():
        named = re.search(r'^model_checkpoint_path: "(.*)"$', state.read_text(), re.MULTILINE)
        # It may have been written elsewhere: the name counts, not the directory.
        if named and (directory / f"{Path(named[1]).name}.index").is_file():
            return Place(directory / Path(named[1]).name, True)
    found = [Place(each.with_suffix(""), True) for each in sorted(directory.glob("*.index"))]
    files = sorted((*directory.glob("*.npz"), *directory.glob("*.safetensors")))
    found = found or [Place(each, False) for each in files if _has_options(each)]
    if not found:
        raise FileNotFoundError(
            f"nematus.load: {directory} holds no model, expected a checkpoint (*.index) or an archive (*.npz, "
            "*.safetensors) with its options (*.json); name the file itself"
        )
    if len(found) > 1:
        names = ", ".join(each.path.name for each in found)
        raise ValueError(f"nematus.load: {directory} holds {len(found)} models, expected one; name one of {names}")
    return found[0]


def _has_options(path: Path) -> bool:
    return Path(f"{path}.json").is_file()


def read_options(model: Path, given: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The options of a model: in the file given, in ``<model>.json``, or in ``config.json`` beside it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or not an object.
    """
    unnumbered = re.sub(r"-\d+$", "", str(model))  # a checkpoint of an update: model.npz-1000
    usual = [Path(f"{model}.json"), Path(f"{unnumbered}.json"), model.parent / "config.json"]
    places = usual if given is None else [Path(given)]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"nematus.load: the options of {model} are missing, expected in {places[0]}; pass config= with the file"
        )
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"nematus.load: {path} is not JSON ({error}), expected the options of a Nematus model"
        ) from error
    if not isinstance(options, dict):
        raise ValueError(
            f"nematus.load: {path} is not an object, expected the options of a Nematus model; pass config="
        )
    return options


def write_options(model: Path, config: Config, *, theano: bool = False) -> None:
    """Put the options beside the model, which holds no averages of its own."""
    path = Path(f"{model}.json")
    config = config.replace(exponential_smoothing=0.0)
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(write(config, theano=theano), indent=2, sort_keys=True), encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path in a new directory beside ``path``; all files put there with its name move over when all went well.

    Raises:
        FileNotFoundError: the directory of path does not exist.
    """
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        temporary = Path(directory) / path.name
        yield temporary
        for each in sorted(Path(directory).iterdir()):
            os.replace(each, path.parent / each.name)
