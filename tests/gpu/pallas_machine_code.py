"""The Pallas kernels as machine code for a GPU that is not at hand; test_pallas.py starts this in its own process."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import triton
from jax import numpy as jnp
from triton.backends.compiler import GPUTarget

from rmsnorm.flax_impl import rms_norm

CUDA = "__gpu$xla.gpu.triton"


def gradient(x: Any, scale: Any) -> Any:
    y, pull = jax.vjp(rms_norm, x, scale)
    return y, pull(jnp.ones_like(y))


def triton_kernels(program: Any) -> Iterator[tuple[str, int, str]]:
    """Name, warps and text of the kernels in a lowered program."""
    from jax._src.pallas.triton.lowering import _new_ir_context
    from jaxlib.mlir import ir

    def calls(operation: Any) -> Iterator[Any]:
        for region in operation.regions:
            for block in region:
                for own in block:
                    if own.name == "stablehlo.custom_call" and CUDA in str(own.attributes["call_target_name"]):
                        yield ir.DictAttr(own.attributes["mhlo.backend_config"])
                    yield from calls(own.operation)

    for config in calls(program.compiler_ir().operation):
        name, warps = ir.StringAttr(config["name"]).value, ir.IntegerAttr(config["num_warps"]).value
        code = ir.StringAttr(config["ir"]).value_bytes
        with _new_ir_context():
            yield name, warps, ir.Module.parse(code).operation.get_asm()


def test_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for 4096 elements in bfloat16: no register spilled, accesses of 16 bytes, and the pairs as meant."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as XLA has it
    arrays = jnp.ones((2048, 4096), jnp.bfloat16), jnp.ones(4096, jnp.bfloat16)
    program = jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",))
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    pairs = {}
    for name, warps, text in triton_kernels(program):
        (tmp_path / "kernel.ttir").write_text(text, encoding="utf-8")
        options = {"num_warps": warps, "num_stages": 1}
        kernel = triton.compile(str(tmp_path / "kernel.ttir"), target=GPUTarget("cuda", 90, 32), options=options)
        (tmp_path / "kernel.cubin").write_bytes(kernel.asm["cubin"])
        command = [tools / "cuobjdump", "-res-usage", tmp_path / "kernel.cubin"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.findall(r"STACK:(\d+)", usage) == ["0"], (name, usage)
        ptx = kernel.asm["ptx"]
        assert "ld.global.v4" in ptx or name == "rms_norm_add_up"
        pairs[name] = [len(re.findall(rf"{word}\.rn\.f32", ptx)) for word in ("mul", "fma")]
    # Of 16 elements a thread forward: h g, and that by 1 / rho, with their errors. Backward, of 8: also h by the step.
    assert pairs["rms_norm_forward"][0] == 32
    assert pairs["rms_norm_backward"][0] == 24
    assert all(mul <= fma for mul, fma in (pairs["rms_norm_forward"], pairs["rms_norm_backward"]))
