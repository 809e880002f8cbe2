"""What PyTorch makes of the functions and the layer: compiled and traced programs."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rmsnorm import numpy_impl as golden
from rmsnorm.specification import dtypes

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch_arrays import are_alike, randn, to_numpy, to_torch  # noqa: E402
from torch_layers import randomised, ulp_bound  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler
def test_compile_the_function_itself() -> None:
    """Options that are arguments become symbols with dynamic=True; one graph serves every batch."""
    counter = CompileCounter()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=counter)
    x = torch.randn((4, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for a in (x, x[:3], x.float(), torch.cat([x, x], 1).float()):
        assert torch.equal(compiled(a), rms_norm(a))
    assert counter.frame_count == 2  # one for each dtype
    x = x.float()
    for options in ({"axis": 0}, {"variant": "llama", "eps": 1e-3}, {"partial": 0.6}, {"partial": Fraction(1, 3)}):
        assert torch.equal(compiled(x, **options), rms_norm(x, **options))
    assert all(map(torch.equal, *(f(x, return_inverse_rms=True) for f in (compiled, rms_norm))))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("variant", "dtype", "backend"),
    [  # each rounding, each place of eps
        ("llama", "bfloat16", "inductor"), ("zhang_torch", "float16", "aot_eager"), ("torch", "float16", "aot_eager"),
        ("x_transformers", "float32", "aot_eager"), ("t5", "float32", "aot_eager"),
    ],
)  # fmt: skip
def test_a_compiled_layer(variant: str, dtype: str, backend: str) -> None:
    """One graph for every batch and length. The values are those of the golden, the gradients those of eager calls."""
    frames: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        frames.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    rng = np.random.default_rng(0)
    n = 48
    layer = randomised(RMSNorm(n, variant=variant, partial=0.6, bias=True, dtype=getattr(torch, dtype)))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counted)
    first = 0
    for batch in ((4, 16), (3, 11), (7, 9)):
        x, residual = (rng.standard_normal((*batch, n)).astype(dtype) for _ in range(2))
        mask = rng.random((*batch, n)) > 0.3
        mask[1] = False
        parameters = [to_numpy(parameter) for parameter in layer.parameters()]
        want = golden.rms_norm(x, *parameters, variant=variant, mask=mask, residual=residual, partial=0.6)
        results = []
        for each in (compiled, layer):
            leaves = [to_torch(value).requires_grad_() for value in (x, residual)]
            y, h = each(leaves[0], mask=to_torch(mask), residual=leaves[1])
            results.append([y, h, *torch.autograd.grad(y.square().sum() + h.sum(), [*leaves, *layer.parameters()])])
        got, eager = results
        for g, w in zip(got, [*map(to_torch, want), *eager[2:]], strict=True):
            assert are_alike(g, w)
        first = first or len(frames)
    assert len(frames) == first


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
