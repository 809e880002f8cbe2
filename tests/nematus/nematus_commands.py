"""The commands ``rmsnorm port``, called as the tests need them, and models with dictionaries in the files of a form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm
from nematus_models import CONFIGS, random_parameters

from rmsnorm.nematus.config import Config
from rmsnorm.nematus.convert import TARGETS

WORDS = (["w3", "w4"], [], ["w5", "w3", "what"])


def run(*arguments: Any, status: int = 0, typed: bytes | None = None) -> str:
    """What ``rmsnorm port`` with these arguments prints, and what it prints as an error where that is expected."""
    result = rmsnorm("port", *arguments, typed=typed, COLUMNS="1000")
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def with_dictionaries(folder: Path, config: Config) -> Config:
    """Writes dictionaries with the words w0, w1, ... for the ids. Returns the config whose options name them."""
    sizes = (*config.source_vocab_sizes, config.target_vocab_size)
    for number, size in enumerate(sizes):
        (folder / f"{number}.json").write_text(json.dumps({f"w{index}": index for index in range(size)}))
    return config.replace(options={**config.options, "dictionaries": [f"{i}.json" for i in range(len(sizes))]})


def save(
    folder: Path, kind: Config | str = "rms", to: str = "theano", file: str = "", **changes: Any
) -> tuple[Config, dict[str, Any]]:
    """A model of that kind, with other values of its config, in the files of a form, in a folder that is made."""
    skip_without(to)
    folder.mkdir(exist_ok=True)
    config = (CONFIGS[kind] if isinstance(kind, str) else kind).replace(**changes)
    parameters = random_parameters(config, "float32")
    TARGETS[to].save(folder / (file or TARGETS[to].file), config, parameters)
    return config, parameters


def saved(folder: Path, kind: str = "rms", **changes: Any) -> tuple[Config, dict[str, Any]]:
    """model.npz of Theano, with dictionaries, and a file to translate."""
    folder.mkdir(exist_ok=True)
    config = with_dictionaries(folder, CONFIGS[kind].replace(**changes))
    lines = [" ".join("|".join([word] * len(config.source_vocab_sizes)) for word in words) for words in WORDS]
    (folder / "source").write_text("".join(f"{text}\n" for text in lines))
    return save(folder, config)


def rewrite(folder: Path, **changes: Any) -> None:
    """The archive in a folder with other arrays; None takes one out."""
    with np.load(folder / "model.npz", allow_pickle=True) as archive:
        arrays = {**archive, **changes}
    np.savez(folder / "model.npz", **{name: array for name, array in arrays.items() if array is not None})


def checkpoint(prefix: Path, tensors: dict[str, Any], options: dict[str, Any], name: str = "model.npz.json") -> None:
    """One of TensorFlow, of any tensors, with the options in a file of that name beside it."""
    arrays = list(map(np.asarray, tensors.values()))
    save = pytest.importorskip("tensorflow").raw_ops.SaveV2
    save(prefix=str(prefix), tensor_names=list(tensors), shape_and_slices=[""] * len(arrays), tensors=arrays)
    (prefix.parent / name).write_text(json.dumps(options))


def skip_without(form: str) -> None:
    """Skips the test where the framework of that form is not installed."""
    pytest.importorskip(
        {"torch": "torch", "keras": "tensorflow", "flax": "flax", "tf": "tensorflow"}.get(form, "numpy")
    )
