"""Pickles of plain values: only operations that make numbers, texts and containers, and named classes."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rmsnorm.files import LARGEST_TEXT, check_regular, reading

# Of the protocols 0 to 2, which Python 2 wrote.
_OPCODES: Final = """
    PROTO STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINBYTES BINBYTES EMPTY_LIST LIST APPEND APPENDS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT
    LONG_BINPUT GLOBAL REDUCE BUILD
"""


def read_pickle(
    op: str, path: str | os.PathLike[str], wanted: str, classes: Mapping[str, Any], encoding: str = "utf-8"
) -> Any:
    """The value in a pickle that Python 2 or 3 wrote with a protocol up to 2.

    Args:
        classes: what it may call, by module and name as in the pickle; other names are refused.
        encoding: of the texts of Python 2.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no pickle, is damaged, or names something else.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "options.pkl")
        ...     _ = path.write_bytes(pickle.dumps({"dim": 3}, protocol=2))
        ...     read_pickle("load", path, "options", {})
        {'dim': 3}
    """
    path = Path(path)
    check_regular(op, path, wanted)
    with reading(op, path, wanted):
        if path.stat().st_size > LARGEST_TEXT:
            raise ValueError(f"it has {path.stat().st_size} bytes, more than {LARGEST_TEXT}")
        return load_pickle(path.read_bytes(), classes, encoding)


def load_pickle(data: bytes, classes: Mapping[str, Any], encoding: str = "utf-8") -> Any:
    """The value in a pickle: see read_pickle.

    Raises:
        ValueError, or what a damaged pickle makes Python raise.
    """
    return _Unpickler(io.BytesIO(data), classes, encoding).load()


class _Operations(dict[int, Callable[..., None]]):
    def __missing__(self, code: int) -> Callable[..., None]:
        raise ValueError(f"the operation {bytes([code])!r}, which plain values of protocol 2 do not need")


# The one in Python: that in C makes a table as large as the largest entry of the memo that a file names.
class _Unpickler(pickle._Unpickler):
    dispatch = _Operations(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _OPCODES.split())}
    )

    def __init__(self, file: io.BytesIO, classes: Mapping[str, Any], encoding: str) -> None:
        super().__init__(file, encoding=encoding, errors="replace")
        self.classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.classes:
            raise ValueError(f"it names {module}.{name}, which is not loaded")
        return self.classes[f"{module}.{name}"]
