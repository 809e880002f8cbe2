"""``rmsnorm.explain`` names the kernel that runs, or says why none does; what it says is what decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from wrong_equations import CASES

import rmsnorm
from rmsnorm import cpu, engines
from rmsnorm.numpy_impl import fast
from rmsnorm.parity.cases import Case, make
from rmsnorm.targets.bridges import bridge

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")
if cpu.is_available():
    from rmsnorm.cpu.launch import level

FOR = f" (compiled for {level()})" if cpu.is_available() else ""
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "tf": "TensorFlow", "flax": "JAX"}
FRAMEWORKS = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in TITLES if name != "numpy"]


@needs_kernels
def test_what_it_says_is_what_decides() -> None:
    """Beside kernels the reason is that of the call alone, and None for others."""
    seen = set()
    formats = Case("two formats", (4, 8), options={"out_dtype": "bfloat16"}, dtypes=("float16",))
    for case in (*CASES.values(), Case("empty", (0, 16)), formats):
        for dtype in case.dtypes:
            rows = make(case, "standard", dtype).call.in_rows
            reason = engines.why_not(rows)
            assert reason == engines.refusal(rows, None), (case.name, dtype)
            seen.add(reason)
    assert seen == {
        None, "x has no elements", "the normalised axes are not the last ones", "the call has a mask",
        "an array is float64", "x and y have different formats of 16 bits",
    }  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("framework", ["numpy", *FRAMEWORKS])
def test_it_names_what_runs(framework: str) -> None:
    if framework != "numpy":
        pytest.importorskip({"torch": "torch", "tf": "tensorflow", "flax": "jax"}[framework])
    send = (lambda array: array) if framework == "numpy" else bridge(framework).send
    x, kernel = send(np.ones((4, 6), "float32")), f"kernel forward-float32-float32{FOR}"
    gated = f"kernel forward-float32-float32, and operations for the gate{FOR}"
    otherwise = "the golden, as " if framework == "numpy" else "the recipe, as "
    for length, options, said in (
        (6, {}, kernel),
        (6, {"variant": "llama"}, kernel),
        (6, {"mask": send(np.ones((4, 6), bool))}, f"{otherwise}the call has a mask"),
        (6, {"gate": x}, f"{otherwise}it has a gate" if framework == "numpy" else gated),
        (4, {"axis": 0}, f"{otherwise}the normalised axes are not the last ones"),
    ):
        wanted = f"{TITLES[framework]}: {said}"
        assert rmsnorm.explain(x, send(np.ones(length, "float32")), **options) == wanted


def test_without_kernels_it_says_so(monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    monkeypatch.setenv("RMSNORM_CPU_KERNELS", "0")
    forget(cpu.is_switched_off, fast._say_what_is_missing, engines._prepared)
    x = np.ones((4, 6), "float32")
    assert rmsnorm.explain(x) == "NumPy: the golden, as RMSNORM_CPU_KERNELS=0 switches the kernels off"


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(TypeError, match=r"explain: x is \[1\.0\].*, expected an array of a framework"):
        rmsnorm.explain([1.0])
    with pytest.raises(ValueError, match="scale has shape"):
        rmsnorm.explain(np.ones((2, 3)), np.ones(2))


@needs_kernels
@pytest.mark.torch
def test_of_a_tensor_that_no_kernel_reads_it_says_why() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(4, 6)
    negative = torch.complex(x, x).conj().imag
    assert rmsnorm.explain(negative).endswith("as the numbers of a tensor are not in memory as they are")
    assert rmsnorm.explain(x.to("meta")).endswith("as there are no kernels for its device")
    assert rmsnorm.explain(x[:0]).endswith("as x has no elements")
    said: list[str] = []
    torch.func.grad(lambda x: (said.append(rmsnorm.explain(x)), x.sum())[1])(x)
    assert said[0].endswith("as a compiler, torch.func, forward mode or a mode sees the operations")


@needs_kernels
@pytest.mark.torch
def test_of_a_layer_and_of_a_model_it_names_every_kernel() -> None:
    """Also of a call that the layer keeps, of a compiled one, and of a function without a norm of ours."""
    torch = pytest.importorskip("torch")
    from rmsnorm.torch_impl import RMSNorm

    layer, x = RMSNorm(64), torch.ones(4, 64)
    for _ in range(2):
        assert rmsnorm.explain(layer, x) == "PyTorch: kernel forward-float32-float32" + FOR
        assert rmsnorm.explain(layer, x, gate=x) == "PyTorch: kernel forward-float32-float32" + FOR

    def step(x):
        leaf = x.clone().requires_grad_()
        layer(leaf).sum().backward()
        return leaf.grad

    assert rmsnorm.explain(step, x) == "PyTorch: kernel forward-float32-float32 and backward-float32-float32" + FOR
    said = rmsnorm.explain(torch.nn.Sequential(layer, torch.nn.Linear(64, 64), layer), x)
    assert said == "PyTorch: kernel forward-float32-float32 (2 times)" + FOR
    assert "no kernel of rmsnorm was called" in rmsnorm.explain(torch.nn.Linear(64, 64), x)


@needs_kernels
@pytest.mark.flax
def test_of_a_program_of_jax_it_names_every_kernel() -> None:
    jnp = pytest.importorskip("jax.numpy")
    from rmsnorm.flax_impl import rms_norm

    def function(x: Any, y: Any) -> Any:
        return rms_norm(x).astype(y.dtype) + rms_norm(y)

    x = jnp.ones((4, 64))
    said = rmsnorm.explain(function, x, x.astype(jnp.bfloat16))
    assert said == "JAX: kernel forward-float32-float32 and forward-bfloat16-bfloat16" + FOR
