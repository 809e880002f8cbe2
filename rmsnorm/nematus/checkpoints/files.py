"""Where the files of a Nematus model are, and how they are replaced: all at once or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple

from rmsnorm.nematus.config import Config, write

Form = Literal["tensorflow", "theano", "safetensors", "keras", "flax"]

_FORMS: Final[tuple[tuple[str, Form], ...]] = (
    (".npz", "theano"),
    (".safetensors", "safetensors"),
    (".keras", "keras"),
    (".weights.h5", "keras"),
)


class Place(NamedTuple):
    """A model: a file, the directory of an Orbax checkpoint, or the prefix of a TensorFlow checkpoint."""

    path: Path
    form: Form


def locate(path: str | os.PathLike[str]) -> Place:
    """The model in a directory, or with that prefix or name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: there are several, and no ``checkpoint`` file says which.
    """
    given = Path(path)
    if _is_orbax(given):
        return Place(given, "flax")
    if given.is_dir():
        return _in_directory(given)
    names = [given, Path(re.sub(r"\.(index|data-\d+-of-\d+|meta|json)$", "", str(given)))]
    for name in names:
        if Path(f"{name}.index").is_file():
            return Place(name, "tensorflow")
    for name in reversed(names):
        if name.is_file():
            return Place(name, next((form for suffix, form in _FORMS if name.name.endswith(suffix)), "theano"))
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
            return Place(directory / Path(named[1]).name, "tensorflow")
    found = [Place(each.with_suffix(""), "tensorflow") for each in sorted(directory.glob("*.index"))]
    files = [Place(each, form) for suffix, form in _FORMS for each in sorted(directory.glob(f"*{suffix}"))]
    files += [Place(each, "flax") for each in sorted(directory.iterdir()) if _is_orbax(each)]
    found = found or [each for each in files if _has_options(each.path)]
    if not found and (directory / "config.json").is_file():
        found = [each for each in files if each.path.name.startswith("model.")]
    if not found:
        raise FileNotFoundError(
            f"nematus.load: {directory} holds no model, expected a checkpoint (*.index), an archive (*.npz) or "
            "another form with its options (*.json); name the file itself"
        )
    if len(found) > 1:
        names = ", ".join(each.path.name for each in found)
        raise ValueError(f"nematus.load: {directory} holds {len(found)} models, expected one; name one of {names}")
    return found[0]


def _is_orbax(path: Path) -> bool:
    return (path / "_CHECKPOINT_METADATA").is_file()


def _has_options(path: Path) -> bool:
    return path.suffix == ".keras" or Path(f"{path}.json").is_file()


def read_options(model: Path, given: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The options of a model: in the file given, or in ``<model>.json`` or ``config.json``.

    Checkpoints from the midst of training, as ``model.npz-1000`` or ``model.iter1000.npz``, share those of model.npz.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or not an object.
    """
    final = re.sub(r"\.iter\d+(?=\.npz$)|-\d+$|(?<=\.npz)\..*$", "", model.name)
    usual = [Path(f"{model}.json"), model.with_name(f"{final}.json"), model.with_name("config.json")]
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
