"""What PyTorch makes of the functions: meta tensors, compiled and exported programs, its own test samples."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch_arrays import randn, to_torch  # noqa: E402
from torch_checks import check_values  # noqa: E402
from torch_layers import randomised, torch_rms_norm, ulp_bound  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_compile_the_function_itself() -> None:
    """Options that are arguments become symbols with dynamic=True; one graph serves every batch."""
    counter = CompileCounter()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=counter)
    x = torch.randn((4, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for a in (x, x[:3], x.float(), torch.cat([x, x], 1).float()):
        assert torch.equal(compiled(a), rms_norm(a))
    assert (
        counter.frame_count == 2
    )  # one for each dtype; float64, whose sum is a tree of pairs, is bound to its row size
    x = x.float()
    assert torch.equal(compiled(x, axis=0), rms_norm(x, axis=0))
    assert torch.equal(compiled(x, variant="llama", eps=1e-3), rms_norm(x, variant="llama", eps=1e-3))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("variant", "dtype", "backend"),
    [("llama", "bfloat16", "inductor"), ("zhang_torch", "float64", "aot_eager"), ("torch", "float16", "aot_eager")],
)
def test_compile(variant: str, dtype: str, backend: str) -> None:
    """Compiled, the values are those of the golden, 16-bit ones too, and the gradients those of the composite."""

    def function(x: Any, scale: Any, mask: Any, residual: Any) -> Any:
        return rms_norm(x, scale, variant=variant, mask=mask, residual=residual, partial=0.6, return_inverse_rms=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=dtype != "float64", backend=backend)
    rng = np.random.default_rng(0)
    n = 6 if dtype == "float64" else 48  # its sum of squares is a tree of pairs, slow to compile
    for rows in (33,) if dtype == "float64" else (64, 33):
        x, residual = (rng.standard_normal((rows, n)).astype(dtype) for _ in range(2))
        scale, mask = rng.standard_normal(n).astype(dtype), rng.random((rows, n)) > 0.3
        mask[1] = False
        want = golden.rms_norm(
            x, scale, variant=variant, mask=mask, residual=residual, partial=0.6, return_inverse_rms=True
        )
        leaves = [to_torch(value).requires_grad_() for value in (x, scale, residual)]
        got = compiled(*leaves[:2], to_torch(mask), leaves[2])
        for g, w in zip(got, want, strict=True):
            check_values(g, w, share=0.999 if g.shape == w.shape == x.shape else 0)  # 1 / rho in float64: two ulps
        gradients = torch.autograd.grad(got[0].square().sum() + got[1].sum(), leaves)
        eager = function(*leaves[:2], to_torch(mask), leaves[2])
        expected = torch.autograd.grad(eager[0].square().sum() + eager[1].sum(), leaves)
        for g, w in zip(gradients, expected, strict=True):
            # both round once at the end, but dx is rounded before dh is added in one and may be after in the other
            bound = 4 * dtypes.unit_roundoff(dtype) if dtype != "float64" else 2.0**-46
            assert (g - w).abs().max() <= bound * w.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_samples_of_pytorch(dtype: str) -> None:
    """PyTorch's own OpInfo samples of rms_norm against its own reference; derivatives are in test_torch_samples.py.

    Not applicable: eps < 0 (out of the domain here), complex dtypes (rejected here; there x^2 stands for |x|^2), and
    the reference's default eps for 16 bits, machine eps of the input dtype, where the operator takes that of f32.
    """
    pytest.importorskip("expecttest")
    from torch.testing._internal import common_methods_invocations as invocations

    torch.manual_seed(0)
    info = next(op for op in invocations.op_db if op.name == "nn.functional.rms_norm")
    run = 0
    for sample in info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=True):
        eps = sample.kwargs.get("eps")
        if eps is not None and eps < 0:
            with pytest.raises(ValueError, match=r"eps is -0\.5, expected a finite number >= 0"):
                torch_rms_norm(sample.input, *sample.args, **sample.kwargs)
            continue
        got = torch_rms_norm(sample.input, *sample.args, **sample.kwargs)
        if eps is None:
            eps = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
        x, *weight = (t.detach().double().numpy() for t in (sample.input, *sample.args[1:]))
        want = invocations.reference_rms_norm(x, sample.args[0], *weight, eps=eps)
        # the reference rounds a dozen times in float64, the result once
        u = 2 * dtypes.unit_roundoff(dtype) if dtype != "float64" else 12 * 2.0**-53
        np.testing.assert_allclose(got.detach().double().numpy(), want, rtol=u, atol=0)
        built_in = torch.nn.functional.rms_norm(sample.input, *sample.args, **sample.kwargs)
        assert (got.dtype, got.shape) == (built_in.dtype, built_in.shape)
        assert got.stride() == built_in.stride() or not got.numel()
        run += 1
    assert run == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("variant", ["gemma", "llama", "zhang_torch", "x_transformers"])
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_a_trace_has_operations_of_pytorch_alone(variant: str, dtype: str) -> None:
    """In every dtype, for any number of rows, through a file, and its gradients; in float32 arithmetic, or float64."""
    dtype = getattr(torch, dtype)
    layer = randomised(RMSNorm(8, variant=variant, bias=True, dtype=dtype))
    traced = torch.jit.trace(layer, (randn(4, 8, dtype=dtype),))
    assert not any("rmsnorm::" in str(node) for node in traced.inlined_graph.nodes())
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    x, results = randn(7, 8, dtype=dtype, seed=1), []
    for each in (layer, traced, torch.jit.load(buffer)):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.float().square().sum().backward()
        results.append((y, leaf.grad))
    for got in results[1:]:
        for one, other in zip(got, results[0], strict=True):  # dx is the difference of terms of the size of its largest
            assert (one.double() - other.double()).abs().max() <= ulp_bound(40, dtype) * other.double().abs().max()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_is_not_scripted() -> None:
    with pytest.raises(TypeError, match=r"use torch\.compile, torch\.export, or torch\.jit\.trace"):
        torch.jit.script(torch.nn.Sequential(RMSNorm(8)))


def test_a_shape_error_is_that_of_the_built_in_too() -> None:
    for layer in (RMSNorm(8), torch.nn.RMSNorm(8)):
        with pytest.raises(RuntimeError):
            layer(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match="mask has shape"):
        rms_norm(torch.ones(2, 6), mask=torch.ones(5, dtype=torch.bool))
