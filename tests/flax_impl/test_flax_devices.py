"""Arrays over eight virtual devices, in one process that asks all: see flax_devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from programs import printed

pytest.importorskip("jax")
pytest.importorskip("flax")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asked", ["a named axis in float64", pytest.param("all", marks=pytest.mark.slow)])
def test_eight_devices(asked: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    program = Path(__file__).with_name("flax_devices.py")
    said = printed("-W", "error", program, asked, timeout=500, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert said.split() == ["done"]
