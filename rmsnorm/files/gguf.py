"""The tensors of a GGUF file, the format of llama.cpp, by name.

Source: docs/gguf.md of ggml-org/ggml. After four letters, a version and two counts come pairs of a key and a value,
then for each tensor its name, its sizes with the last axis first, its format and its place, and then the numbers.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final

import ml_dtypes
import numpy as np

from rmsnorm.files import GGUF, check_kind, reading
from rmsnorm.specification import errors

_VERSIONS: Final = (2, 3)  # version 1 had counts of 32 bits
_AXES: Final = 8  # ggml has 4
_NAME: Final = 2**16  # bytes of a key or of a tensor's name, which has 64 at most in ggml
_ALIGNMENT: Final = "general.alignment"
_STRING, _ARRAY = 8, 9  # types of a value
_NUMBERS: Final = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_FORMATS: Final = {
    0: np.dtype("<f4"), 1: np.dtype("<f2"), 28: np.dtype("<f8"), 30: np.dtype(ml_dtypes.bfloat16),
    24: np.dtype("i1"), 25: np.dtype("<i2"), 26: np.dtype("<i4"), 27: np.dtype("<i8"),
}  # fmt: skip
_QUANTISED: Final = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
}  # fmt: skip


def gguf(op: str, path: Path) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Of floating-point numbers and integers; a quantised tensor has a shape, and reading it is refused.

    Raises:
        ValueError: the file is incomplete, has another version or byte order, or names a tensor twice.
    """
    with reading(op, path, GGUF):
        check_kind(op, path, GGUF, GGUF)
        with path.open("rb") as file:
            entries, start = _Header(file, path.stat().st_size).tensors()

    def tensor(name: str) -> Any:
        shape, number, offset = entries[name]
        dtype = _FORMATS.get(number)
        if dtype is None:
            raise errors.InputValueError(
                f"{op}: {name} in {path} is quantised ({_QUANTISED.get(number, f'the type {number} of ggml')}), "
                "expected F32, F16, BF16 or F64; "
                "take a file that keeps it in F32, as llama.cpp's own converter does for norms"
            )
        with reading(op, path, GGUF):
            count = math.prod(shape)
            flat = np.fromfile(path, dtype, count, offset=start + offset)
            if flat.size != count:
                raise ValueError(f"{name} has {flat.size} numbers of {count}")
            return flat.reshape(shape)

    return {name: shape for name, (shape, _, _) in entries.items()}, tensor


class _Header:
    """Reads a header; whatever it says of sizes must fit into the file before anything is read or made."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def tensors(self) -> tuple[dict[str, tuple[tuple[int, ...], int, int]], int]:
        """Shape, format and offset by name, and where offset 0 is."""
        self._bytes(4)
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} in the byte order of x86, expected 2 or 3")
        count, pairs = self._number("Q"), self._number("Q")
        alignment = 32
        for _ in range(self._fitting(pairs, 13)):
            key, kind = self._string(_NAME), self._number("I")
            value = self._value(kind)
            if key == _ALIGNMENT:
                if not isinstance(value, int) or not 0 < value <= self._size:
                    raise ValueError(f"{_ALIGNMENT} is {value!r:.40}")
                alignment = value
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self._fitting(count, 24)):
            name, rank = self._string(_NAME), self._number("I")
            if name in entries or rank > _AXES:
                raise ValueError(f"{name!r:.80} is in it twice, or has {rank} axes")
            shape = tuple(self._number("Q") for _ in range(rank))[::-1]
            entries[name] = shape, self._number("I"), self._number("Q")
        return entries, -(-self._file.tell() // alignment) * alignment

    def _fitting(self, count: int, size: int) -> int:
        """So many parts of at least this size each, which the rest of the file must have."""
        rest = self._size - self._file.tell()
        if count * size > rest:
            raise ValueError(f"{count} parts of {size} bytes or more are announced, where {rest} bytes are left")
        return count

    def _bytes(self, count: int) -> bytes:
        return self._file.read(self._fitting(count, 1))

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _string(self, longest: int) -> str:
        length = self._number("Q")
        if length > longest:
            raise ValueError(f"a name of {length} bytes, expected at most {longest}")
        return self._bytes(length).decode("utf-8")

    def _value(self, kind: int) -> Any:
        """A number; of what else there is, such as the words of a tokenizer, nothing is kept."""
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            self._file.seek(self._fitting(self._number("Q"), 1), 1)
        elif kind == _ARRAY:
            kind, count = self._number("I"), self._number("Q")
            if kind in _NUMBERS:
                size = struct.calcsize(f"<{_NUMBERS[kind]}")
                self._file.seek(size * self._fitting(count, size), 1)
            elif kind == _STRING:
                for _ in range(self._fitting(count, 8)):
                    self._value(kind)
            else:
                raise ValueError(f"an array of values of type {kind}, expected numbers or strings")
        else:
            raise ValueError(f"a value of type {kind}, expected 0 to 12")
        return None
