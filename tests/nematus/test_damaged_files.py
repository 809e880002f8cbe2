"""Good files of every form in which bytes are flipped, cut, repeated or replaced, at random: a sentence or a result."""

from __future__ import annotations

import json
import pickle
import re
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from nematus_commands import save
from nematus_models import check_sentence, refuses, rezipped
from safetensors.numpy import save_file

from rmsnorm import nematus
from rmsnorm.identify import identify_checkpoint
from rmsnorm.identify.config import identify_config
from rmsnorm.nematus.convert import TARGETS
from rmsnorm.nematus.vocabulary import read_vocabulary

NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
SEED = f"{date.today()}" if NIGHTLY else "3"


TOKENS = (b"-1", b"0", b"1e400", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"9" * 30, b'"\\u001b[2J"', b"[" * 2000)


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """Cut off, written over, with a part taken out or repeated, another length, another value of a text; or flipped."""
    start, end = (int(place) for place in sorted(random.integers(0, len(content) + 1, 2)))
    few, kind = min(end, start + 16), random.integers(7)
    if kind == 5 and (values := list(re.finditer(rb'-?\d+|true|false|null|"[^"]*"', content))):
        value = values[random.integers(len(values))]
        return content[: value.start()] + TOKENS[random.integers(len(TOKENS))] + content[value.end() :]
    if kind < 5:
        length = (2 ** int(random.integers(64)) - int(random.integers(2))).to_bytes(8, "little")
        return (
            content[:end], content[:start] + random.bytes(few - start) + content[few:], content[:start] + content[end:],
            content[:end] + content[start:], content[:start] + length + content[start + 8 :],
        )[kind]  # fmt: skip
    flipped = bytearray(content or b"\0")
    for place in random.integers(0, len(flipped), random.integers(1, 9)):
        flipped[place] ^= 1 << random.integers(8)
    return bytes(flipped)


def damage(file: Path, random: np.random.Generator) -> None:
    """The file, or a member of an archive whose checksum is right again."""
    if zipfile.is_zipfile(file) and random.random() < 0.5:
        with zipfile.ZipFile(file) as archive:
            name = archive.namelist()[random.integers(len(archive.namelist()))]
            content = archive.read(name)
        rezipped(file, {name: damaged(content, random)})
    else:
        file.write_bytes(damaged(file.read_bytes(), random))


def model(form: str) -> tuple[Callable[[Path], Path], Callable[[Path], Any]]:
    """Makes a model of Nematus in a folder, and reads its names and shapes."""

    def make(folder: Path) -> Path:
        save(folder, to=form)
        return folder / TARGETS[form].file

    return make, lambda path: {name: value.shape for name, value in nematus.load(path).parameters.items()}


def written(name: str, write: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / name)
        return folder / name

    return make


GAINS = {"layers.0.input_norm.weight": np.ones(8, "f4"), "layers.1.input_norm.weight": np.full(8, 0.5, "f4")}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "num_hidden_layers": 2, "text_config": {"model_type": "gemma"}}
WORDS = {"<EOS>": 0, "UNK": 1, **{f"w{i}": i for i in range(2, 8)}}
# How many files of a form are damaged, how one is made and read; where halves are called damaged, as what, which parts.
FORMS: dict[str, tuple[int, tuple[Callable[[Path], Path], Callable[[Path], Any]], str, list[str]]] = {
    # Flax is the first one, whose reads go on when a test is over.
    "flax": (15, model("flax"), "a whole checkpoint",
             [f"model.orbax/{part}" for part in ("manifest.ocdbt", "_METADATA", "d/*")]),
    "theano": (200, model("theano"), "an npz archive", ["model.npz"]),
    "torch": (200, model("torch"), "a safetensors file", ["model.safetensors"]),
    "keras": (100, model("keras"), "a model of rmsnorm in a file of Keras", ["model.keras"]),
    "tf": (100, model("tf"), "a whole checkpoint", ["model.npz.index", "model.npz.data-*"]),
    "safetensors": (200, (written("a.safetensors", lambda path: save_file(GAINS, path)), identify_checkpoint), "", []),
    "npz": (200, (written("a.npz", lambda path: np.savez(path, **GAINS)), identify_checkpoint), "", []),
    "config": (300, (written("config.json", lambda path: path.write_text(json.dumps(LLAMA))), identify_config), "", []),
    "words": (200, (written("words.json", lambda path: path.write_text(json.dumps(WORDS))),
                    lambda path: read_vocabulary(path, 8, 1)), "", []),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of files that were given up
@pytest.mark.parametrize("form", FORMS)
def test_damage(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    """Half of each part; then one file after another at random: a sentence, or a result; of a model, the same shapes.

    In 20 seconds and 256 MiB, and nothing is unpickled.
    """
    times, (make, load), wanted, parts = FORMS[form]
    times *= 100 if NIGHTLY else 1
    path, random, read = make(tmp_path), np.random.default_rng(zlib.crc32(f"{form} {SEED}".encode())), 0
    monkeypatch.setattr(pickle, "load", lambda *_: pytest.fail("it is unpickled"))
    monkeypatch.setattr(pickle, "Unpickler", lambda *_: pytest.fail("it is unpickled"))
    whole = {file: file.read_bytes() for file in sorted(tmp_path.rglob("*")) if file.is_file()}
    right = load(path)
    for part in parts:
        halved = [*tmp_path.glob(part)]
        assert halved
        for file in halved:
            file.write_bytes(whole[file][: len(whole[file]) // 2])
        refuses(rf"{path.name} is damaged \(.*expected {wanted}", path)  # tracemalloc cannot end beside Orbax's threads
        for file in halved:
            file.write_bytes(whole[file])
    for i in range(times):
        file = [*whole][i % len(whole)]
        damage(file, random)
        tracemalloc.start()
        began = time.monotonic()
        try:
            result = load(path)
        except (ValueError, TypeError, FileNotFoundError) as error:
            check_sentence(error)
        else:
            read += 1
            assert result == right or not parts
        finally:
            most = tracemalloc.get_traced_memory()[1]
            if form != "flax":
                tracemalloc.stop()
        assert time.monotonic() - began < 20
        assert most < 2**28
        file.write_bytes(whole[file])
    record_property("comparisons", times)
    assert read < times / 2 or form == "flax"  # some of whose files are never read
