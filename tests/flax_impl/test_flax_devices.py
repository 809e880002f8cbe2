"""Arrays over eight virtual devices, in one process that asks all: see flax_devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import printed

pytest.importorskip("jax")
pytest.importorskip("flax")


def test_eight_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    program = Path(__file__).with_name("flax_devices.py")
    said = printed("-W", "error", program, timeout=200, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert said.split() == ["done"]
