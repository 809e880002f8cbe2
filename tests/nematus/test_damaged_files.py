"""Files from outside that are damaged, wrong or made to do harm: one sentence that names the file, and nothing else."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from nematus_commands import rewrite, save
from nematus_models import CONFIGS, reoption

from rmsnorm import files, nematus
from rmsnorm.nematus.convert import TARGETS, convert
from rmsnorm.nematus.names import variables
from rmsnorm.nematus.options import write
from rmsnorm.nematus.vocabulary import dictionaries, read_vocabulary
from rmsnorm.specification import errors

Change = Callable[[Path], Any]
NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
SEED = f"{date.today()}" if NIGHTLY else "3"


@contextmanager
def frugally() -> Iterator[None]:
    """In 256 MiB of memory."""
    tracemalloc.start()
    try:
        yield
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 2**28


def check_sentence(error: BaseException) -> str:
    """The message of an error, which is one sentence that says what was expected and that no terminal obeys."""
    message = str(error)
    assert isinstance(error, errors.InputError | FileNotFoundError), message
    assert "expected" in message or "no such variable" in message, message
    assert message.isprintable(), message
    return message


def refused(path: Path, wanted: str = "expected", load: Callable[[Path], Any] = nematus.load) -> None:
    """A file is refused in little memory, in a sentence with the wanted words."""
    with frugally(), pytest.raises((ValueError, TypeError, FileNotFoundError), match=wanted) as raised:
        load(path)
    check_sentence(raised.value)


def rezipped(path: Path, changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The archive with other members."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, part in {**parts, **changes}.items():
            archive.writestr(name, part)


def header(shape: str, dtype: str = "<f4", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + text


def arrays(**changes: Any) -> Change:
    return lambda path: rewrite(path.parent, **changes)


def options(**changes: Any) -> Change:
    return lambda path: reoption(path.parent, **{"dialect": None, **changes})


def content(data: bytes, ending: str = "") -> Change:
    """What is written in the place of the archive, or of its options."""
    return lambda path: Path(f"{path}{ending}").write_bytes(data)


def array(content: bytes, name: str = "encoder_W.npy", compression: int = zipfile.ZIP_STORED) -> Change:
    return lambda path: rezipped(path, {name: content}, compression)


def zipped(name: str) -> Change:
    """An archive of that file alone."""

    def write_archive(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, b"")

    return write_archive


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("encoder_W.npy", header("(6, 10)") + bytes(240))


def encrypted(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] = 1  # in the last entry of the directory
    path.write_bytes(content)


BOMB = header("(536870912,)") + bytes(2**26)  # few bytes that would be 64 MiB, and say that they are 2 GiB
# What is done to an archive or to its options, what is written in its place, and what is said of it.
KIND = "expected an npz archive"
HOSTILE: list[tuple[Change, str]] = [
    (array(header("(1000000000000, 1000)")), "npz is damaged .encoder_W of shape .* and 0 bytes"),
    (array(header("(2,)", version=b"\x07\x00")), r"npz is damaged .*header of version \(7, 0\)"),
    (array(header("(2,)" + " " * 70000, version=b"\x02\x00")), "model.npz is damaged"),
    (array(b""), "model.npz is damaged"),
    (array(header("(6, 10)", "<f2") + bytes(120)), "encoder_W in .* has dtype float16, .* or float64"),
    (array(header("(1,)") + bytes(4), "notes.npy"), r"npz holds notes \(1,\), and the config has no"),
    (array(BOMB, "notes.npy", zipfile.ZIP_DEFLATED), "model.npz is damaged .notes of shape"),
    (array(header("(1,)") + bytes(4), "w\x1b[2J\n.npy"), r"damaged .*w\\x1b\[2J\\n"),
    (twice, "model.npz is damaged .encoder_W is in it twice"),
    (encrypted, "model.npz is damaged"),
    (arrays(ff_state_b=None), r"lacks ff_state_b, expected .* as decoder/initial_.*constructor/b \(5,\)"),
    (arrays(encoder_W=np.full((6, 10), np.nan, "f4")), "encoder_W in .* holds 60 NaN or infinite values"),
    (arrays(encoder_W=np.array([{}], object)), "encoder_W in .* array of Python objects, .*never unpickled"),
    (content(b"[" * 100_000, ".json"), r"npz.json is not JSON \(nested too deep\)"),
    (content(b"[1]", ".json"), "npz.json is not an object"),
    (content(b"\x80\x02}q\x00."), f"a pickle, {KIND}; it is never read"),
    (zipped("archive/data.pkl"), f"a file of PyTorch, which is a pickle, {KIND}"),
    (zipped("notes.txt"), rf"a zip archive without \*.npy, {KIND}; name another file"),
    (content(b"a,b\n"), f"a text file, {KIND}; name another file"),
    (content(b""), f"an empty file, {KIND}; copy it again"),
    (content(b"\x1f\x8b\x08"), f"a gzip file, {KIND}; unpack it"),
    (options(enc_depth=10**9), r"the depth is \d{10}, expected 62 layers at most"),
    (options(factors=10**9), "factors is 1000000000, expected 1, as many as"),
    (options(dim_per_factor=[3, 3]), r"dim_per_factor is \(3, 3\), expected one size for each of \(9,\)"),
    (options(n_words_src="all"), "source_vocab_sizes is 'all', expected integers >= 1"),
    (options(dim=10**12), "has shape .*, expected .* by the config; is it the config of another model"),
    (options(dim=None), "state_size or dim is missing, expected in the options of a Nematus model"),
    (options(enc_depth=2), r"lacks encoder_2_U and \d+ more, expected by the config as encoder/backward-s"),
    (options(encoder="lstm"), "encoder is 'lstm', expected 'gru'; this part of Theano Nematus is not ported"),
    (options(use_dropout=True, model_version=None), "model_version is None, expected 0.1 or later"),
    (options(rmsnorm={"dim": 5}), "rmsnorm is {'dim': 5}, expected an object with some of search, eps"),
    # All that is refused is in one message.
    (options(dim=-1, encoder="lstm", dim_word=0), "^Config: encoder is .*; and embedding_size .*; and state_size is"),
]


@pytest.mark.parametrize(("change", "wanted"), HOSTILE, ids=[row[1][-30:] for row in HOSTILE])
def test_what_is_wrong_is_refused_in_a_sentence(tmp_path: Path, change: Change, wanted: str) -> None:
    save(tmp_path)
    change(tmp_path / "model.npz")
    refused(tmp_path / "model.npz", wanted)


def test_zeros_that_expand_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose arrays are all there, and compress as no weights do; what any file may expand to is set low."""
    config = CONFIGS["rms"].replace(source_vocab_sizes=(2**16,))
    (tmp_path / "model.npz.json").write_text(json.dumps(write(config, theano=True)))
    zeros = {str(row.theano): np.zeros(row.shape, "f4") for row in variables(config)}
    np.savez_compressed(tmp_path / "model.npz", **zeros)
    assert nematus.load(tmp_path).config.source_vocab_sizes == (2**16,)
    monkeypatch.setattr(files, "FREE", 2**16)
    refused(tmp_path / "model.npz", "bytes in memory.*save it uncompressed")


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    for name in ("model.npz", "model.npz.json"):
        save(tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        refused(tmp_path / "model.npz")
        refused(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("/dev/zero")
        refused(tmp_path / "model.npz")
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "words.json")
    refused(tmp_path / "words.json", "no regular file", load=lambda file: read_vocabulary(file, 8, 1))


def test_dictionaries_elsewhere_are_not_read(tmp_path: Path) -> None:
    """Of a path that leaves the folder of the model, the last part counts."""
    secret, folder = tmp_path / "secret.json", tmp_path / "model"
    secret.write_text('{"<EOS>": 0}')
    save(folder)
    for name in (str(secret), "../secret.json", "x/../../secret.json"):
        reoption(folder, dictionaries=[name, name])
        assert dictionaries(nematus.load(folder).config) == [folder / "secret.json"] * 2
    result = convert(nematus.load(folder), tmp_path / "out", "numpy")
    assert "secret.json is missing: copy it beside the result" in result.warnings[0]
    assert not (tmp_path / "out" / "secret.json").exists()


def other_dataset(file: Any, **options: Any) -> None:
    """The first array of the weights as another dataset of its shape."""
    name, shape = next((name, dataset.shape) for name, dataset in file["vars"].items())
    del file["vars"][name]
    file["vars"].create_dataset(name, shape, "f4", **options)


def virtual(file: Any, other: Path) -> None:
    h5py, (name, dataset) = pytest.importorskip("h5py"), next(iter(file["vars"].items()))
    layout = h5py.VirtualLayout(dataset.shape, "f4")
    layout[...] = h5py.VirtualSource(str(other), "vars/secret", dataset.shape)
    del file["vars"][name]
    file["vars"].create_virtual_dataset(name, layout)


def linked(group: Any, name: str, target: str, other: Path) -> None:
    del group[name]
    group[name] = pytest.importorskip("h5py").ExternalLink(str(other), target)


# What is done to the weights in a file of Keras, whose path is given with that of another file; and what is said of it.
ELSEWHERE = "model.keras is damaged .* is kept outside of it"
CHUNKS = {"chunks": (2**12, 2**12), "maxshape": (None, None), "compression": 1}
WEIGHTS: list[tuple[Callable[[Any, Path], Any], str]] = [
    (lambda file, other: other_dataset(file, external=[(str(other), 0, 2**64 - 1)]), ELSEWHERE),
    (lambda file, other: linked(file["vars"], next(iter(file["vars"])), "/vars/secret", other), ELSEWHERE),
    (lambda file, other: linked(file, "vars", "/vars", other), ELSEWHERE),
    (virtual, ELSEWHERE),
    (lambda file, other: other_dataset(file, **CHUNKS), "model.keras is damaged .*chunks that are larger"),
    (lambda file, other: file["vars"].create_group("encoder.embedding"), "keras is damaged .*a Group of HDF5"),
    (lambda file, other: file["vars"].create_dataset("other", (2**30,), "f4", chunks=(2**20,)), "holds other"),
]
MEMBERS = [
    ("model.weights.h5", bytes(2**29), "model.keras is damaged .*bytes in memory"),
    ("config.json", b'{"config": {"config": ' + b"[" * 100_000, "model.keras is damaged"),
    ("config.json", b'{"config": {}}', r"damaged \('config'\), expected a model of rmsnorm in a file of Keras"),
    ("config.json", b'{"class_name": "Sequential"}', "is a file of Keras with the model 'Sequential', expected a"),
]


def test_what_is_wrong_in_a_file_of_keras_is_said(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    save(tmp_path, to="keras")
    path, other = tmp_path / "model.keras", tmp_path / "other.h5"
    whole, stored = path.read_bytes(), zipfile.ZipFile(path).read("model.weights.h5")
    with h5py.File(other, "w") as file:
        file.create_group("vars")["secret"] = np.ones(4, "f4")
    members = [*MEMBERS]
    for change, reason in WEIGHTS:
        weights = io.BytesIO(stored)
        with h5py.File(weights, "a") as file:
            change(file, other)
        members.append(("model.weights.h5", weights.getvalue(), reason))
    for name, data, reason in members:
        path.write_bytes(whole)
        rezipped(path, {name: data}, zipfile.ZIP_DEFLATED)
        refused(path, reason)


TOKENS = (b"-1", b"0", b"1e400", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"9" * 30, b'"\\u001b[2J"', b"[" * 2000)


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """Cut off, with a part taken out, with another length, with another value of a text, or with bits flipped."""
    start, end = (int(place) for place in sorted(random.integers(0, len(content) + 1, 2)))
    values = list(re.finditer(rb'-?\d+|true|false|null|"[^"]*"', content))
    flipped = bytearray(content or b"\0")
    for place in random.integers(0, len(flipped), random.integers(1, 9)):
        flipped[place] ^= 1 << random.integers(8)
    length = (2 ** int(random.integers(64)) - int(random.integers(2))).to_bytes(8, "little")
    value, token = values[random.integers(len(values))] if values else None, TOKENS[random.integers(len(TOKENS))]
    return (
        content[:end],
        content[:start] + content[end:],
        content[:start] + length + content[start + 8 :],
        content[: value.start()] + token + content[value.end() :] if value else content[:start],
        bytes(flipped),
    )[random.integers(5)]


def damage(file: Path, random: np.random.Generator) -> None:
    """The file, or a member of an archive whose checksum is right again."""
    if zipfile.is_zipfile(file) and random.random() < 0.5:
        with zipfile.ZipFile(file) as archive:
            name = archive.namelist()[random.integers(len(archive.namelist()))]
            content = archive.read(name)
        rezipped(file, {name: damaged(content, random)})
    else:
        file.write_bytes(damaged(file.read_bytes(), random))


# How many files are damaged, and of which parts the halves are called damaged.
FORMS = {
    "theano": (60, "an npz archive", ["model.npz"]),
    "torch": (100, "a safetensors file", ["model.safetensors"]),
    "keras": (40, "a model of rmsnorm in a file of Keras", ["model.keras"]),
    "tf": (60, "a whole checkpoint", ["model.npz.index", "model.npz.data-00000-of-00001"]),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of files that were given up
@pytest.mark.parametrize("form", FORMS)
def test_random_damage(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of each part; then one file after another at random: a sentence, or a model of the same shapes.

    In little memory, and nothing is unpickled.
    """
    times, wanted, parts = FORMS[form]
    times *= 200 if NIGHTLY else 1
    config, _ = save(tmp_path, to=form)
    path, random, read = tmp_path / TARGETS[form].file, np.random.default_rng(zlib.crc32(f"{form} {SEED}".encode())), 0
    for unpickler in ("load", "Unpickler"):
        monkeypatch.setattr(pickle, unpickler, lambda *_: pytest.fail("it is unpickled"))
    whole = {file: file.read_bytes() for file in sorted(tmp_path.iterdir())}
    for part in parts:
        file = tmp_path / part
        file.write_bytes(whole[file][: len(whole[file]) // 2])
        refused(path, rf"{path.name} is damaged \(.*expected {wanted}")
        file.write_bytes(whole[file])
    for i in range(times):
        file = [*whole][i % len(whole)]
        damage(file, random)
        with frugally():
            try:
                result = nematus.load(path)
            except (ValueError, TypeError, FileNotFoundError) as error:
                check_sentence(error)
            else:
                read += 1
                shapes = {name: value.shape for name, value in result.parameters.items()}
                assert shapes == {row.name: row.shape for row in variables(config)}
        file.write_bytes(whole[file])
    assert read < times / 2
