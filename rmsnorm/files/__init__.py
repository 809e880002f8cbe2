"""Files: those from outside are read within limits, ours are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rmsnorm.specification import errors

LARGEST_TEXT: Final = 2**28  # bytes of a JSON file; the largest dictionaries of Nematus have some megabytes
EXPANSION: Final = 16  # how many times the size of its file a model may have in memory; weights hardly compress
FREE: Final = 2**28  # bytes that any file may expand to
ZIP: Final = "a zip archive"
SAFETENSORS: Final = "a safetensors file"
HDF5: Final = "an HDF5 file"
GGUF: Final = "a GGUF file"
INDEX: Final = "the index of a TensorFlow checkpoint"
JSON: Final = "a JSON file"
TEXT: Final = "a text file"
EMPTY: Final = "an empty file"
_FIRST: Final = 4096  # bytes that tell what a file is
_INDEX_END: Final = bytes.fromhex("57fb808b247547db")
_FIELD_1: Final = 8  # a number follows, the version of ONNX
_GZIP, PICKLE = "a gzip file", "a pickle"
_STARTS: Final = {
    b"PK\x03\x04": ZIP, b"PK\x05\x06": ZIP, b"\x89HDF\r\n\x1a\n": HDF5, b"GGUF": GGUF,
    b"\x1f\x8b": _GZIP,
    b"\x93NUMPY": "a single array of NumPy",
    **dict.fromkeys((bytes([0x80, protocol]) for protocol in range(2, 6)), PICKLE),
}  # fmt: skip
_FIXES: Final = {_GZIP: "unpack it", PICKLE: "it is never read, so save it in this form", EMPTY: "copy it again"}


def read_json(op: str, path: str | os.PathLike[str], wanted: str) -> Any:
    """The value in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file, too large, or not JSON.
    """
    data = _read_bytes(op, Path(path), wanted)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise errors.InputValueError(f"{op}: {path} is not JSON ({reason}), expected {wanted}") from None


def read_text(op: str, path: str | os.PathLike[str], wanted: str) -> str:
    """The text in a file, in UTF-8.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no regular file, too large, or not UTF-8.
    """
    data = _read_bytes(op, Path(path), wanted)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.InputValueError(
            f"{op}: {path} is not UTF-8 ({error.reason}), expected {wanted}; convert it"
        ) from None


def _read_bytes(op: str, path: Path, wanted: str) -> bytes:
    check_regular(op, path, wanted)
    check_kind(op, path, wanted, JSON, TEXT, EMPTY)
    size = path.stat().st_size
    if size > LARGEST_TEXT:
        raise errors.InputValueError(f"{op}: {path} has {size} bytes, expected {wanted} of {LARGEST_TEXT} at most")
    with path.open("rb") as file:
        return file.read(size)  # no more, if it grows meanwhile


def check_regular(op: str, path: Path, wanted: str) -> None:
    """Refuses what has no end or waits for a writer: a pipe, a device.

    Raises:
        FileNotFoundError: there is nothing of that name.
        ValueError: it is no regular file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{op}: {path} is missing, expected {wanted}; name another")
    if path.is_dir():
        raise errors.another_kind(op, path, "a folder", wanted, "name a file in it")
    if not path.is_file():
        raise errors.InputValueError(f"{op}: {path} is no regular file, expected {wanted}; copy it to one")


def check_kind(op: str, path: Path, wanted: str, *kinds: str) -> None:
    """Refuses a file whose content is of another kind than these: what it is, and which file beside it may be meant.

    Raises:
        ValueError: it is of another kind. What is of no known kind may be a damaged one of these.
    """
    kind = kind_of(path)
    if kind is None or kind in kinds:
        return
    above = [str(path)[: -len("".join(path.suffixes[-n:]))] for n in range(1, len(path.suffixes) + 1)]
    near = [Path(f"{name}{end}") for name in (path, *above) for end in ("", ".index", ".json")]
    meant = next((file.name for file in near if file.is_file() and kind_of(file) in kinds), None)
    fix = _FIXES.get(kind, "name another file") if meant is None else f"did you mean {meant}, which is beside it?"
    raise errors.another_kind(op, path, kind, wanted, fix)


def kind_of(path: Path) -> str | None:
    """What a regular file is, by its first bytes and its last ones; None if these tell nothing."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_FIRST)
        file.seek(max(0, size - len(_INDEX_END)))
        last = file.read(len(_INDEX_END))
    if not first:
        return EMPTY
    if last == _INDEX_END:
        return INDEX
    if first[8:9] == b"{" and int.from_bytes(first[:8], "little") < size:
        return SAFETENSORS
    if path.suffix == ".onnx" and first[0] == _FIELD_1:
        return "an ONNX file"
    start = next((start for start in _STARTS if first.startswith(start)), None)
    if start is not None:
        return _STARTS[start]
    text = first.decode("utf-8", errors="ignore")
    is_text = len(text.encode()) > len(first) - 4 and all(letter.isprintable() or letter.isspace() for letter in text)
    return (JSON if text.lstrip()[:1] in ("{", "[") else TEXT) if is_text else None


def check_expansion(expanded: int, stored: int) -> None:
    """Refuses what is small in a file and large in memory, before anything is allocated.

    Raises:
        ValueError: so many bytes are not what a file of that size may expand to.
    """
    most = max(FREE, EXPANSION * stored)
    if expanded > most:
        raise errors.InputValueError(
            f"{expanded} bytes in memory, of a file of {stored} at most {most}: save it uncompressed"
        )


@contextmanager
def reading(op: str, path: Path, wanted: str) -> Iterator[None]:
    """Turns whatever a reader raises about a file from outside into one sentence that names the file.

    Raises:
        ValueError: an error occurred.
    """
    try:
        yield
    except (ModuleNotFoundError, errors.AnotherKind):
        raise
    except Exception as error:  # of many types: a file from outside can make its reader raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise errors.damaged(op, path, reason, wanted) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in a temporary directory beside ``path``; its files replace those at ``path`` if no error occurs.

    The file at the path itself is the last one.

    What is no regular file, such as a pipe or /dev/stdout, cannot be replaced, and is written to.

    Raises:
        FileNotFoundError: the directory of path does not exist.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path
            return
        path = Path(os.path.realpath(path))  # the file that a link names, not the link
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
            temporary = Path(directory) / path.name
            yield temporary
            for file in sorted(Path(directory).iterdir(), key=lambda file: (file == temporary, file)):
                os.replace(file, path.parent / file.name)
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)  # not the one in the temporary directory
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all. What UTF-8 cannot have, as of a file's name, is escaped."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
