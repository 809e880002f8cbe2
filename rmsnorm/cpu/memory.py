"""New memory on huge pages, where the system leaves that to the program: page faults would cost more than the work."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

LEAST: Final = 2**22  # bytes
PAGE: Final = 2**12  # bytes
MADV_HUGEPAGE: Final = 14  # linux/mman.h
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def advise(address: int, size: int) -> None:
    """Asks the system for huge pages for so many bytes from an address, if these are at least LEAST.

    Nothing changes if the system has none.
    """
    if size >= LEAST and _madvise is not None:
        start = -(-address // PAGE) * PAGE
        _madvise(ctypes.c_void_p(start), ctypes.c_size_t((address + size - start) // PAGE * PAGE), MADV_HUGEPAGE)
