"""One layer among threads, interrupted, and out of memory: its result is right, or a clear error, and never a hang.

Each framework runs in its own process, which may run out of memory. The kernels alone are in test_cpu_*.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rmsnorm.frameworks import FRAMEWORKS

FAULTS = ("threads", "interrupt", "memory")
PROGRAM = Path(__file__).with_name("faults.py")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of memory is Linux'")
@pytest.mark.parametrize("name", list(FRAMEWORKS))
@pytest.mark.sample(1)
def test_fault(name):
    backend = FRAMEWORKS[name]
    if find_spec(backend.package) is None:
        pytest.skip(f"{backend.package} is not installed; pip install '.[{backend.extra}]'")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, name, *FAULTS],
        capture_output=True, text=True, timeout=240, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.splitlines()[-3:] == [f"{name} {fault}: right" for fault in FAULTS]
