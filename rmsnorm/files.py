"""Files: those from outside are read within limits, ours are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from rmsnorm import errors

LARGEST_TEXT: Final = 2**28  # bytes of a JSON file; the largest dictionaries of Nematus have some megabytes
EXPANSION: Final = 16  # how many times the size of its file a model may have in memory; weights hardly compress
FREE: Final = 2**28  # bytes that any file may expand to


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
    if not path.is_file():
        raise errors.InputValueError(f"{op}: {path} is no regular file, expected {wanted}; copy it to one")


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
    except ModuleNotFoundError:
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
    path = Path(os.path.realpath(path))  # the file that a link names, not the link
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            yield path
            return
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
