"""The programs that JAX makes for a GPU that is not there, with the Triton kernels. test_triton.py runs this.

Where jaxlib has no plugin for CUDA, a stand-in notes what a call of a kernel is made of.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("triton")

from jax import export  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm.flax_impl import gpu, private, rms_norm, rms_norm_vjp  # noqa: E402

CALL = re.compile(r"custom_call @triton_kernel_call_ffi\((.*?)\) .* : \((.*?)\) -> \(?(.*?)\)?$", re.MULTILINE)
BITS = {"array": "u64", "i32": "u32", "i64": "u64", "fp64": "f64"}


class Kernel(SimpleNamespace):
    def __init__(self, name: str, warps: int, ctas: int, shared: int, ptx: str, ttir: str, capability: int) -> None:
        super().__init__(name=name, warps=warps, shared=shared, ptx=ptx, capability=capability)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The calls of kernels that are made: kernel, grid and the kinds of parameters."""
    noted: list[Any] = []

    class Call:
        def __init__(self, kernel: Kernel, x: int, y: int, z: int, parameters: list[str]) -> None:
            noted.append((kernel, (x, y, z), parameters))

        def to_proto(self, name: str, metadata: bytes) -> bytes:
            assert metadata == b""
            return f"{name} {len(noted)}".encode()

    calls = SimpleNamespace(
        TritonKernel=Kernel, TritonKernelCall=Call, create_array_parameter=lambda zeroed, divisor: "array",
        create_scalar_parameter=lambda value, kind: kind,
    )  # fmt: skip
    monkeypatch.setattr(private, "triton_calls", lambda: calls)
    monkeypatch.setattr(gpu, "capability", lambda: 90)
    jax.clear_caches()
    yield noted
    jax.clear_caches()


def program(function: Any, *arrays: Any, platform: str = "cuda") -> str:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def calls(function: Any, *arrays: Any) -> list[tuple[str, str]]:
    """The types of the operands and of the results of each call."""
    return [(operands, results) for _, operands, results in CALL.findall(program(function, *arrays))]


def loss(x: Any, scale: Any, **options: Any) -> Any:
    return rms_norm(x, scale, **options).astype(jnp.float32).sum()


X, SCALE = jnp.ones((33, 768), jnp.bfloat16), jnp.ones(768, jnp.bfloat16)
ROWS, GAIN, INVERSE, SUMS = "tensor<33x768xbf16>", "tensor<768xbf16>", "tensor<33x1xf64>", "tensor<33x768xf64>"
FORWARD = (f"{ROWS}, {GAIN}", f"{ROWS}, {INVERSE}")
BACKWARD = [(f"{ROWS}, {ROWS}, {GAIN}, {INVERSE}", f"{ROWS}, {SUMS}"), (SUMS, GAIN)]


def test_forward_and_gradients_are_calls() -> None:
    assert calls(rms_norm, X, SCALE) == [FORWARD]
    assert calls(jax.grad(loss, (0, 1)), X, SCALE) == [FORWARD, *BACKWARD]
    assert calls(functools.partial(rms_norm_vjp), X, X, SCALE) == BACKWARD  # 1 / rho by operations


def test_more_rows_and_forward_mode() -> None:
    rows, inverse = "tensor<5x33x768xbf16>", "tensor<5x33x1xf64>"
    assert calls(jax.vmap(rms_norm, (0, None)), jnp.ones((5, *X.shape), X.dtype), SCALE) == [
        (f"{rows}, {GAIN}", f"{rows}, {inverse}")
    ]
    assert calls(lambda x: jax.jvp(lambda x: rms_norm(x, SCALE), (x,), (x,)), X) == [FORWARD]
    assert calls(jax.grad(lambda x: jax.grad(loss)(x, SCALE).astype(jnp.float32).sum()), X)[0] == FORWARD


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((16, 80), {}),
        ((16, 1), {}),
        ((1, 80), {"mask": jnp.arange(80) % 3 > 0}),
        ((16, 80), {"mask": jnp.arange(16)[:, None] % 3 > 0, "variant": "gemma"}),
        ((16, 2, 32), {"feature_axis": (1, 2)}),
        ((16, 80), {"partial": 0.5, "variant": "llama"}),
    ],
    ids=str,
)
def test_a_kernel_gets_the_parameters_that_its_code_takes(made: Any, dtype: str, shape: Any, options: Any) -> None:
    x, scale = jnp.ones(shape, dtype), jnp.ones(shape[1:], dtype)
    types = calls(jax.grad(functools.partial(loss, **options), (0, 1)), x, scale)
    assert len(types) == len(made) == 3
    for (kernel, grid, parameters), both in zip(made, types, strict=True):
        entry = re.search(rf"\.entry {kernel.name}\((.*?)\)", kernel.ptx, re.DOTALL)
        assert entry is not None
        taken = re.findall(r"\.param \.(\w+)", entry[1])
        # behind them are two for memory of Triton's own, which jaxlib passes and these kernels do not use
        assert taken == [*(BITS[kind] for kind in parameters), "u64", "u64"]
        assert parameters.count("array") == sum(text.count("tensor<") for text in both)
        assert (kernel.capability, grid[2]) == (90, 1)


def test_what_kernels_do_not_compute_is_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(functools.partial(rms_norm, axis=0), X, SCALE[:33]) == []
    assert calls(lambda x: rms_norm(x, gate=x), X) == []
    with private.enable_x64(True):
        assert calls(rms_norm, X, jnp.ones(768, jnp.float64)) == []
    assert "triton" not in export.export(jax.jit(rms_norm), platforms=("cuda",))(X, SCALE).mlir_module()
    assert "triton" not in program(rms_norm, X, SCALE, platform="rocm")
    monkeypatch.setattr(gpu, "capability", lambda: None)
    jax.clear_caches()
    assert calls(rms_norm, X, SCALE) == []
    monkeypatch.setattr(gpu, "capability", lambda: 75)
    jax.clear_caches()
    with pytest.warns(UserWarning, match="the compute capability of the GPU is 7.5, and the kernels need 8.0"):
        assert calls(rms_norm, X, SCALE) == []
