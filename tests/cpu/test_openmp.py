"""Where nothing says which OpenMP a process has loaded, the threads of this package compute."""

from __future__ import annotations

import ctypes
import io
import sys
from typing import Any

import pytest

from rmsnorm.cpu import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what /proc says")
MAPS = "7f00-7f01 r-xp 00000000 08:01 7 /lib/libgomp.so.1 (deleted)\n"


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError("no such file")


@pytest.mark.parametrize("absent", ["/proc", "the file", "the function"])
def test_without_proc_or_the_file_of_libgomp_no_call_fails(
    absent: str, monkeypatch: pytest.MonkeyPatch, forget
) -> None:
    forget(openmp._gomp_parallel)
    files = {"/proc/self/stat": "1 (python) R 1 1 1 0 -1 0 0", "/proc/self/maps": MAPS}
    monkeypatch.delenv("RMSNORM_OPENMP", raising=False)
    monkeypatch.setattr(
        openmp, "open", _refuse if absent == "/proc" else lambda name: io.StringIO(files[name]), raising=False
    )
    monkeypatch.setattr(ctypes, "CDLL", _refuse if absent == "the file" else lambda *_, **__: object())
    assert openmp.gomp_parallel() == 0
