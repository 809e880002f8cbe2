"""``rmsnorm.explain`` names the kernel that runs, or says why none does; what it says is what decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from wrong_equations import CASES

import rmsnorm
from rmsnorm import cpu, engines
from rmsnorm.cli import app
from rmsnorm.numpy_impl import fast
from rmsnorm.parity.cases import Case, make
from rmsnorm.targets.bridges import bridge

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")
FRAMEWORKS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("tf", marks=pytest.mark.tf),
    pytest.param("flax", marks=pytest.mark.flax),
]
if cpu.is_available():
    from rmsnorm.cpu.launch import level

LEVEL = level() if cpu.is_available() else ""
FOR = f" (compiled for {LEVEL})"
TITLES = {"numpy": "NumPy", "torch": "PyTorch", "tf": "TensorFlow", "flax": "JAX"}


@needs_kernels
def test_what_it_says_is_what_decides() -> None:
    """Beside kernels the reason is that of the call alone, and None for others."""
    seen = set()
    empty = Case("empty", (0, 16))
    formats = Case("two formats", (4, 8), options={"out_dtype": "bfloat16"}, dtypes=("float16",))
    for case in (*CASES.values(), empty, formats):
        for dtype in case.dtypes:
            rows = make(case, "standard", dtype).call.in_rows
            reason = engines.why_not(rows)
            assert reason == engines.refusal(rows, None), (case.name, dtype)
            seen.add(reason)
    assert seen == {
        None,
        "x has no elements",
        "the normalised axes are not the last ones",
        "the call has a mask",
        "an array is float64",
        "x and y have different formats of 16 bits",
    }


@needs_kernels
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_names_what_runs(framework: str) -> None:
    if framework != "numpy":
        pytest.importorskip({"torch": "torch", "tf": "tensorflow", "flax": "jax"}[framework])
    send = (lambda array: array) if framework == "numpy" else bridge(framework).send
    x, gain, mask = np.ones((4, 6), "float32"), np.ones(6, "float32"), np.ones((4, 6), bool)

    def said(**options: Any) -> str:
        arrays = {name: send(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
        text: str = rmsnorm.explain(send(x), send(gain), **arrays)
        title, _, rest = text.partition(": ")
        assert title == TITLES[framework]
        otherwise = "the golden, as " if framework == "numpy" else "the recipe, as "
        assert rest.startswith(otherwise) or rest.endswith(FOR)
        return rest.removesuffix(FOR).removeprefix(otherwise)

    assert said() == "kernel forward-float32-float32"
    assert said(variant="llama") == "kernel forward-float32-float32"
    assert said(mask=mask) == "the call has a mask"
    if framework == "numpy":
        assert said(gate=x) == "it has a gate"
    else:
        assert said(gate=x) == "kernel forward-float32-float32, and operations for the gate"
    gain = np.ones(4, "float32")
    assert said(axis=0) == "the normalised axes are not the last ones"


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


@needs_kernels
@pytest.mark.parametrize(("options", "status", "text"), [
    (["numpy", "--with", "residual"], 0, "NumPy: kernel forward-float32-float32"),
    (["flax", "--shape", "4x6", "--axis", "0"], 1, "the normalised axes are not the last ones"),
    (["numpy", "--with", "mask"], 1, "the call has a mask"),
    (["numpy", "--axis", "2"], 2, "axis is 2"),
    (["numpy", "--with", "weights"], 2, "with is 'weights'"),
])  # fmt: skip
def test_the_command(options: list[str], status: int, text: str) -> None:
    result = CliRunner().invoke(app, ["explain", *options])
    assert result.exit_code == status
    assert text in result.output + result.stderr
