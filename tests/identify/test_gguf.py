"""The header of GGUF, written here by hand: right ones are read, others are refused in a sentence."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rmsnorm.identify import identify_checkpoint
from rmsnorm.specification import errors

F32, F16, Q8_0, F64, BF16 = 0, 1, 8, 28, 30
RNG = np.random.default_rng(0)
GAIN = RNG.normal(1, 0.1, 33).astype(np.float32)  # 132 bytes, so that the next one begins after a gap


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


WORDS = struct.pack("<IQ", 8, 3) + text(b"a") + text("ü".encode()) + text(b"")
PAIRS = [
    pair(b"general.architecture", 8, text(b"llama")),
    pair(b"general.alignment", 4, struct.pack("<I", 64)),
    pair(b"tokenizer.ggml.tokens", 9, WORDS),
    pair(b"tokenizer.ggml.scores", 9, struct.pack("<IQ2f", 6, 2, 1.0, 2.0)),
    pair(b"ok", 7, b"\x01"),
    pair(b"small", 12, struct.pack("<d", 0.5)),
]


def written(
    path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], int]], pairs: list[bytes] = PAIRS, start: bytes = b"GGUF"
) -> Path:
    entries, data = b"", b""
    for name, (values, kind) in tensors.items():
        data += b"\0" * (-len(data) % 64)
        entries += entry(name.encode(), values.shape[::-1], kind, len(data))
        data += values.tobytes()
    header = start + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + entries
    path.write_bytes(header + b"\0" * (-len(header) % 64) + data)
    return path


def test_gains_of_every_float_are_read(tmp_path: Path) -> None:
    shifted = GAIN - 1
    tensors = {
        "blk.0.attn_norm.weight": (GAIN, F32),
        "blk.0.attn_q.weight": (np.zeros(68, np.int8), Q8_0),  # quantised, and no gain
        "blk.1.attn_norm.weight": (GAIN.astype(np.float16), F16),
        "blk.2.attn_norm.weight": (GAIN.astype(ml_dtypes.bfloat16), BF16),
        "output_norm.weight": (shifted.astype(np.float64), F64),
        "encoder.norm.gamma": (GAIN.reshape(33, 1, 1, 1), F32),
    }
    found = identify_checkpoint(written(tmp_path / "a.gguf", tensors))
    kinds = {kind.name: kind for kind in found.kinds}
    assert {name: (kind.count, kind.fits) for name, kind in kinds.items()} == {
        "blk.*.attn_norm.weight": (3, "w"),
        "output_norm.weight": (1, "1 + w"),
        "encoder.norm.gamma": (1, "w"),
    }
    assert kinds["encoder.norm.gamma"].mean == pytest.approx(GAIN.astype(np.float64).mean(), rel=1e-15)
    assert kinds["output_norm.weight"].least == shifted.min()
    (tmp_path / "parts").mkdir()
    for index, part in enumerate(("blk.0.attn_norm.weight", "blk.1.attn_norm.weight")):
        written(tmp_path / "parts" / f"model-0000{index + 1}-of-00002.gguf", {part: tensors[part]})
    assert [kind.count for kind in identify_checkpoint(tmp_path / "parts").kinds] == [2]


def test_a_quantised_gain_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", {"blk.0.attn_norm.weight": (np.zeros(34, np.int8), Q8_0)})
    with pytest.raises(
        ValueError, match=r"attn_norm.weight in .*a\.gguf is quantised \(Q8_0\), expected F32, F16, BF16"
    ):
        identify_checkpoint(path)


NORM = {"norm.weight": (GAIN, F32)}
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "big-endian": (lambda path: path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "version 50331648 in the"),
    "version 1": (lambda path: path.write_bytes(b"GGUF" + struct.pack("<III", 1, 0, 0)), "version 1 in the byte order"),
    "counts": (lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63)), "parts of 13 bytes or"),
    "tensors": (lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0)), "parts of 24 bytes or"),
    "nested": (lambda path: written(path, NORM, [pair(b"a", 9, struct.pack("<IQIQ", 9, 1, 9, 1))]), "an array of"),
    "array": (lambda path: written(path, NORM, [pair(b"a", 9, struct.pack("<IQ", 12, 2**62))]), "parts of 8 bytes or"),
    "words": (lambda path: written(path, NORM, [pair(b"a", 9, struct.pack("<IQ", 8, 2**62))]), "parts of 8 bytes or"),
    "text": (lambda path: written(path, NORM, [pair(b"a", 8, struct.pack("<Q", 2**62))]), "parts of 1 bytes or"),
    "type": (lambda path: written(path, NORM, [pair(b"a", 99, b"")]), "a value of type 99"),
    "alignment": (
        lambda path: written(path, NORM, [pair(b"general.alignment", 4, bytes(4))]), "general.alignment is 0"),
    "name": (lambda path: written(path, {"n" * 70_000: (GAIN, F32)}), "a name of 70000 bytes"),
    "cut": (lambda path: path.write_bytes(written(path, NORM).read_bytes()[:-1]), "norm.weight has 32 numbers of 33"),
    "shape": (
        lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry(b"norm.weight", (2**24,), F32, 0)),
        "norm.weight has 0 numbers of 16777216"),
    "far": (
        lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry(b"norm.weight", (8,), F32, 2**63)),
        "a.gguf is damaged"),
    "axes": (
        lambda path: path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry(b"a", (1,) * 9, F32, 0)),
        "has 9 axes"),
    "another": (lambda path: path.write_bytes(b"PK\x03\x04"), "is a zip archive, expected a GGUF file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_header_says_must_fit_into_the_file(kind: str, tmp_path: Path) -> None:
    write, words = HOSTILE[kind]
    write(tmp_path / "a.gguf")
    tracemalloc.start()
    with pytest.raises(errors.InputValueError, match=words):
        identify_checkpoint(tmp_path / "a.gguf")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**28
