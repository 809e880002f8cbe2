"""Files from outside that are damaged or made to do harm: one sentence that names the file, and nothing else."""

from __future__ import annotations

import io
import json
import os
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from nematus_models import config_of, random_parameters, reoption
from safetensors.numpy import save_file

from rmsnorm import errors, files, nematus
from rmsnorm.nematus.vocabulary import dictionaries, read_vocabulary

NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
SAVE = {".npz": nematus.save_theano, ".safetensors": nematus.save_safetensors, ".keras": nematus.save_keras}
CONFIG = config_of("rms")
PARAMETERS = random_parameters(CONFIG, "float32")


def saved(folder: Path, suffix: str = ".npz") -> Path:
    if suffix == ".keras":
        pytest.importorskip("tensorflow")
    path = folder / f"model{suffix}"
    SAVE[suffix](path, CONFIG, PARAMETERS)
    return path


def check_sentence(error: BaseException) -> str:
    """The message of an error, which is one sentence that says what was expected."""
    message = str(error)
    assert isinstance(error, errors.InputError | FileNotFoundError), message
    assert "expected" in message or "no such variable" in message, message
    assert len(message.splitlines()) == 1, message
    return message


def refused(path: Path, *names: str, load: Callable[[Path], Any] = nematus.load) -> str:
    """The sentence with which a file is refused, in a second and little memory."""
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as raised:
        load(path)
    seconds, (_, most) = time.monotonic() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    message = check_sentence(raised.value)
    assert all(name in message for name in names), message
    assert seconds < 20, seconds  # hours, before
    assert most < 2**28, most
    return message


def header(shape: str, dtype: str = "<f4", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    size = len(text).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    return b"\x93NUMPY" + version + size + text


def rezipped(path: Path, changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """The archive with other members."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, part in {**parts, **changes}.items():
            archive.writestr(name, part)


ARRAYS = {
    "larger than it is": header("(1000000000000, 1000)"),
    "beyond all integers": header(f"({10**30},)"),
    "a negative size": header("(-4, 4)"),
    "another version": header("(2,)", version=b"\x07\x00"),
    "no array": b"no array",
    "empty": b"",
    "a long header": header("(2,)" + " " * 70000, version=b"\x02\x00"),
    "text": header("(2,)", "<U4") + bytes(32),
    "longer floats": header("(6, 10)", "<f16") + bytes(960),
    "half floats": header("(6, 10)", "<f2") + bytes(120),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_that_is_not_what_it_says(tmp_path: Path, kind: str) -> None:
    path = saved(tmp_path)
    rezipped(path, {"encoder_W.npy": ARRAYS[kind]})
    refused(path, "model.npz")


def test_what_else_is_in_an_archive(tmp_path: Path) -> None:
    """Other members are not read, whatever they are; an array that is there twice is no array."""
    path = saved(tmp_path)
    rezipped(path, {"readme.txt": b"text"})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("notes.npy", header("(536870912,)") + bytes(2**26))  # which says that it has 2 GiB
    refused(path, "notes of shape")
    rezipped(path, {"notes.npy": header("(1,)") + bytes(4)})
    refused(path, "notes", "no such variable")
    path = saved(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("encoder_W.npy", header("(6, 10)") + bytes(240))
    refused(path, "encoder_W is in it twice")


@pytest.mark.parametrize("change", [(8, b"\x63"), (6, b"\x01")], ids=["unknown compression", "encrypted"])
def test_members_that_cannot_be_read(tmp_path: Path, change: tuple[int, bytes]) -> None:
    path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    place = content.rindex(b"PK\x01\x02") + 2 + change[0]  # of the last entry of the directory
    content[place : place + 1] = change[1]
    path.write_bytes(content)
    refused(path, "model.npz is damaged")


def test_zeros_that_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose arrays are all there, and compress as no weights do; what any file may expand to is set low."""
    config = CONFIG.replace(source_vocab_sizes=(2**16,))
    arrays = {str(row.theano): np.zeros(row.shape, "f4") for row in nematus.names.variables(config)}
    (tmp_path / "model.npz.json").write_text(json.dumps(nematus.config.write(config, theano=True)))
    np.savez_compressed(tmp_path / "model.npz", **arrays)
    assert nematus.load(tmp_path).config.source_vocab_sizes == (2**16,)
    monkeypatch.setattr(files, "FREE", 2**16)
    refused(tmp_path / "model.npz", "bytes in memory", "save it uncompressed")


def test_headers_of_arrays_that_are_not_there(tmp_path: Path) -> None:
    """A model of 4 GiB by its options and its headers."""
    config = CONFIG.replace(source_vocab_sizes=(2**26,), embedding_size=16, dim_per_factor=(16,))
    path = saved(tmp_path)
    (tmp_path / "model.npz.json").write_text(json.dumps(nematus.config.write(config, theano=True)))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for row in nematus.names.variables(config):
            archive.writestr(f"{row.theano}.npy", header(str(row.shape)) + bytes(0))
    refused(path, "model.npz is damaged")


def test_pipes_and_devices(tmp_path: Path) -> None:
    path = saved(tmp_path)
    for file in (path, tmp_path / "model.npz.json"):
        whole = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        refused(path)
        refused(tmp_path)
        file.unlink()
        file.symlink_to("/dev/zero")
        refused(path)
        file.unlink()
        file.write_bytes(whole)
    os.mkfifo(tmp_path / "words.json")
    refused(tmp_path / "words.json", "no regular file", load=lambda file: read_vocabulary(file, 8, 1))


OPTIONS: list[dict[str, Any]] = [
    {"enc_depth": 10**9},
    {"dec_base_recurrence_transition_depth": 10**9},
    {"factors": 10**9},
    {"factors": "many"},
    {"dim_per_factor": 5},
    {"dim_per_factor": {}},
    {"n_words_src": "all"},
    {"dim": 10**12},
    {"dim": [5]},
    {"use_dropout": "perhaps", "dec_deep_context": "no"},
    {"softmax_mixture_size": 10**9},
    {"dialect": ["theano"]},
    {"dictionaries": 5},
    {"dictionaries": ["", 1]},
]


@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_options_that_ask_for_too_much(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = saved(tmp_path)
    reoption(tmp_path, **changes)
    refused(path, load=lambda file: dictionaries(nematus.load(file)))


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"", b"[1]", b'{"dim": NaN}', b"9" * 10_000])
def test_json_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = saved(tmp_path)
    (tmp_path / "model.npz.json").write_bytes(content)
    refused(path)
    (tmp_path / "words.json").write_bytes(content)
    refused(tmp_path / "words.json", "words.json", load=lambda file: read_vocabulary(file, 8, 1))


def test_dictionaries_elsewhere_are_not_read(tmp_path: Path) -> None:
    """Of a path that leaves the folder of the model, the last part counts."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"<EOS>": 0}')
    (tmp_path / "model").mkdir()
    path = saved(tmp_path / "model")
    for name in (str(secret), "../secret.json", "x/../../secret.json"):
        reoption(path.parent, dictionaries=[name, name])
        assert dictionaries(nematus.load(path)) == [path.parent / "secret.json"] * 2
    (path.parent / "secret.json").write_text("root:x:0:0")
    from rmsnorm.nematus.convert import convert

    with pytest.raises(ValueError, match=r"secret.json is not JSON"):
        convert(nematus.load(path), tmp_path / "out", "numpy")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "secret.json"]
    (path.parent / "secret.json").unlink()
    result = convert(nematus.load(path), tmp_path / "out", "numpy")
    assert "secret.json is missing: copy it beside the result" in result.warnings[0]


def test_names_that_a_terminal_would_obey(tmp_path: Path) -> None:
    path = saved(tmp_path, ".safetensors")
    save_file({"decoder\x1b[2J\n": np.zeros(2, "f4")}, path)
    assert refused(path, "model.safetensors is damaged", r"\x1b[2J\n").isprintable()


def other_dataset(file: Any, **options: Any) -> None:
    """The first array of the weights as another dataset of its shape."""
    name, dataset = next(iter(file["vars"].items()))
    shape = dataset.shape
    del file["vars"][name]
    file["vars"].create_dataset(name, options.pop("shape", shape), "f4", **options)


def linked(file: Any, group: Any, name: str, target: str, other: Path) -> None:
    del group[name]
    group[name] = pytest.importorskip("h5py").ExternalLink(str(other), target)


def virtual(file: Any, other: Path) -> None:
    h5py, (name, dataset) = pytest.importorskip("h5py"), next(iter(file["vars"].items()))
    layout = h5py.VirtualLayout(dataset.shape, "f4")
    layout[...] = h5py.VirtualSource(str(other), "vars/secret", dataset.shape)
    del file["vars"][name]
    file["vars"].create_virtual_dataset(name, layout)


# What is done to the weights in a file of Keras, whose path is given with that of another file; and what is said of it.
ELSEWHERE = "is kept outside of it"
CHUNKS = {"chunks": (2**12, 2**12), "maxshape": (None, None), "compression": 1}
WEIGHTS: list[tuple[Callable[[Any, Path], Any], str]] = [
    (lambda file, other: other_dataset(file, external=[(str(other), 0, 2**64 - 1)]), ELSEWHERE),
    (lambda file, other: linked(file, file["vars"], next(iter(file["vars"])), "/vars/secret", other), ELSEWHERE),
    (lambda file, other: linked(file, file, "vars", "/vars", other), ELSEWHERE),
    (virtual, ELSEWHERE),
    (lambda file, other: other_dataset(file, **CHUNKS), "chunks that are larger"),
    (lambda file, other: file["vars"].create_group("encoder.embedding"), "a Group of HDF5"),
    (lambda file, other: file["vars"].create_dataset("encoder.embedding", (2**30,), "f4", chunks=(2**20,)), ""),
]


def test_weights_of_keras_that_are_elsewhere(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = saved(tmp_path, ".keras")
    whole, other = path.read_bytes(), tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file.create_group("vars")["secret"] = np.ones(4, "f4")
    for change, reason in WEIGHTS:
        path.write_bytes(whole)
        with zipfile.ZipFile(path) as archive:
            weights = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(weights, "a") as file:
            change(file, other)
        rezipped(path, {"model.weights.h5": weights.getvalue()})
        refused(path, *(["model.keras is damaged", reason] if reason else ["encoder/embedding"]))
    path.write_bytes(whole)
    rezipped(path, {"model.weights.h5": bytes(2**29)}, zipfile.ZIP_DEFLATED)
    refused(path, "model.keras is damaged", "bytes in memory")
    path.write_bytes(whole)
    rezipped(path, {"config.json": b'{"config": {"config": ' + b"[" * 100_000})
    refused(path, "model.keras is damaged")


def damage(content: bytes, random: np.random.Generator) -> bytes:
    kind = random.integers(4)
    start, end = sorted(random.integers(0, len(content) + 1, 2))
    if kind == 0:
        return content[:end]
    if kind == 1:
        return content[:start] + random.bytes(min(16, end - start)) + content[start + min(16, end - start) :]
    if kind == 2:
        return content[:start] + content[end:]
    flipped = bytearray(content)
    for place in random.integers(0, len(content), random.integers(1, 9)):
        flipped[place] ^= 1 << random.integers(8)
    return bytes(flipped)


def is_read_or_refused(path: Path) -> bool:
    """Whether a damaged model is read, with the shapes that it had; else it is refused in one sentence."""
    try:
        model = nematus.load(path)
    except (ValueError, TypeError) as error:
        check_sentence(error)
        return False
    shapes = {row: array.shape for row, array in model.parameters.items()}
    assert shapes == {row: array.shape for row, array in PARAMETERS.items()}
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of files that were given up
@pytest.mark.parametrize(
    ("package", "save", "suffix", "times"),
    [
        ("orbax.checkpoint", nematus.save_flax, ".npz", 15),  # first: its reads go on when a test is over
        ("numpy", nematus.save_theano, ".npz", 300),
        ("safetensors", nematus.save_safetensors, ".safetensors", 300),
        ("tensorflow", nematus.save_keras, ".keras", 150),
        ("tensorflow", nematus.save_tensorflow, ".npz", 100),
    ],
)
@pytest.mark.sample(5)
def test_random_damage(tmp_path: Path, package: str, save: Any, suffix: str, times: int) -> None:
    """Of one of its files after another: a sentence, or a model of the same names and shapes.

    Values have no checksum in every form.
    """
    pytest.importorskip(package)
    path, random, loaded = tmp_path / f"model{suffix}", np.random.default_rng(0), 0
    save(path, CONFIG, PARAMETERS)
    parts = sorted(file for file in tmp_path.rglob("*") if file.is_file())
    times *= 100 if NIGHTLY else 1
    for i in range(times):
        part = parts[i % len(parts)]
        whole = part.read_bytes()
        part.write_bytes(damage(whole, random))
        loaded += is_read_or_refused(path)
        part.write_bytes(whole)
    assert loaded < times / 2 or save is nematus.save_flax  # some of whose files are never read
