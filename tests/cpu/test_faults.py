"""One layer among threads, interrupted, and out of memory: its result is right, or a clear error, and never a hang.

Each framework runs in its own process, which may run out of memory. The kernels alone are in test_cpu_*.py.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import printed

from rmsnorm.specification.frameworks import FRAMEWORKS

FAULTS = ("threads", "interrupt", "memory")
PROGRAM = Path(__file__).with_name("faults.py")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux'")
@pytest.mark.parametrize("name", list(FRAMEWORKS))
def test_fault(name):
    backend = FRAMEWORKS[name]
    if find_spec(backend.package) is None:
        pytest.skip(f"{backend.package} is not installed; pip install '.[{backend.extra}]'")
    said = printed("-W", "ignore", PROGRAM, name, *FAULTS, timeout=240)
    assert said.splitlines()[-3:] == [f"{name} {fault}: right" for fault in FAULTS]
