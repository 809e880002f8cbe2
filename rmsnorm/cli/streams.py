"""Lines of text for ``rmsnorm port``, from and to files and pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from rich.console import Console
from rich.text import Text

from rmsnorm.specification import errors

STDIN: Final = Path("-")


def unknown_counted(lines: Iterable[str], sources: Sequence[Any]) -> Iterator[str]:
    """The same lines. A warning says which is the first with unknown words, and one at the end how many there are."""
    from rmsnorm.nematus.vocabulary import count_unknown

    lines_with = unknown = words = number = 0
    for number, line in enumerate(lines, start=1):
        of_line, count = count_unknown(line, sources)
        lines_with, unknown, words = lines_with + bool(of_line), unknown + of_line, words + count
        if of_line and lines_with == 1:
            _warn(f"{of_line} of {count} words of line {number} are unknown; are lines split (BPE) as for training?")
        yield line
    if lines_with > 1:
        _warn(f"{unknown} of {words} words in {lines_with} of {number} lines are unknown")


def _warn(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"warning: {message}", style="yellow"))


def write(lines: Iterable[str], file: BinaryIO) -> None:
    """In UTF-8 as Nematus, whatever the terminal has; who reads from a pipe sees each line at once."""
    for line in lines:
        file.write(f"{line}\n".encode())
        file.flush()


def lines_of(command: str, path: Path) -> Iterable[str]:
    """The lines of a file; those of standard input, or of a pipe, are read when they are needed.

    Only line feeds end a line: other line breaks of Unicode may be part of a sentence.
    """
    if path == STDIN:
        return _decoded(command, "standard input", sys.stdin.buffer)
    file = path.open("rb")
    lines = _decoded(command, str(path), file)
    return list(lines) if path.is_file() else lines


def _decoded(command: str, name: str, file: BinaryIO) -> Iterator[str]:
    with file:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n")  # a mark is no word
            except UnicodeDecodeError as error:
                raise errors.out_of_domain(
                    command, f"byte {error.start + 1} of line {number} of {name}", error.object[error.start], "UTF-8",
                    "convert the file",
                ) from None  # fmt: skip
