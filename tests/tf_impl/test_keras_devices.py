"""The layer on several devices, in a process for each backend that has them: tf.distribute and keras.distribution."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.slow
def test_devices(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    script = Path(__file__).with_name("keras_devices.py")
    devices = "--xla_force_host_platform_device_count=8" if backend == "jax" else ""
    environment = {**os.environ, "KERAS_BACKEND": backend, "XLA_FLAGS": devices, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", str(script), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == f"{backend}: done"
