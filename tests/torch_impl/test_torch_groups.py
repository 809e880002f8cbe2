"""Norms in groups and with a gate: eager calls by the kernels, traced ones by the recipe."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import are_alike, hold, randn, to_numpy  # noqa: E402

from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.specification.variants import Variant  # noqa: E402
from rmsnorm.torch_impl import RMSNorm, kernels, rms_norm  # noqa: E402

pytest.importorskip("rmsnorm.cpu._native", reason="they compare the recipe with the kernels")
pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from inside the compiler
]

GROUPS = {"axis": -1, "feature_axis": (-2, -1)}
BF16, F32 = torch.bfloat16, torch.float32
# Float32, on numbers of the size of 1, second derivatives: some 100 operations and sums over 6 elements, on either side
NEAR = 2.0**-24 * 2 * (100 + 6) * 2**4


def variant(function: str = "silu", position: str = "after") -> Any:
    return Variant.get("llama").replace(gate_function=function, gate_position=position)


def problem(dtype: Any = F32, rows: int = 3) -> tuple[list[Any], Any]:
    """x, gain and gate in two groups of 6, and dy."""
    shapes = ((rows, 2, 6), (2, 6), (rows, 2, 6), (rows, 2, 6))
    *tensors, dy = (randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return [t.requires_grad_() for t in tensors], dy


@pytest.mark.parametrize(("function", "position"), list(itertools.product(("silu", "sigmoid"), ("after", "before"))))
def test_every_derivative_is_that_of_plain_operations(function: str, position: str, monkeypatch: Any) -> None:
    """First and second derivatives, tangents and batches, of groups with a gate."""
    tensors, dy = problem()

    def call(*tensors: Any) -> Any:
        x, scale, gate = tensors
        return rms_norm(x, scale, gate=gate, variant=variant(function, position), **GROUPS)

    def derivatives() -> list[Any]:
        y = call(*tensors)
        first = torch.autograd.grad(y, tensors, dy.requires_grad_(), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (dy, *tensors))
        with torch.autograd.forward_ad.dual_level():
            dual = [torch.autograd.forward_ad.make_dual(t.detach(), t.detach() / 2) for t in tensors]
            tangent = torch.autograd.forward_ad.unpack_dual(call(*dual)).tangent
        batch = torch.vmap(call, (1, None, 1))(*(t[:, None] if t.ndim == 3 else t for t in tensors))
        moved = torch.func.jvp(lambda *primals: torch.func.grad(lambda x: call(x, *primals[1:]).sum())(primals[0]),
                               tuple(t.detach() for t in tensors), tuple(t.detach() / 2 for t in tensors))  # fmt: skip
        return [y, *first, *second, tangent, batch, *moved]

    results = derivatives()
    monkeypatch.setattr(kernels, "kept_of", lambda *_: None)
    wanted = derivatives()
    assert len(results) == len(wanted) == 12
    for result, want in zip(results, wanted, strict=True):
        assert result.shape == want.shape
        assert (result - want).abs().max() <= NEAR * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.slow
def test_compiled_programs(dtype: Any) -> None:
    """With gradients, also for unknown sizes, rows with gaps and no rows."""
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    options = {"variant": variant(), **GROUPS}
    for count in (3, 5, 0):
        (x, scale, gate), dy = problem(dtype, count)
        for each in (None, gate):
            y, leaves = compiled(x, scale, gate=each, **options), [x, scale, *([] if each is None else [each])]
            gradients = zip(("dx", "dscale", "dgate"), torch.autograd.grad(y, leaves, dy), strict=False)
            hold({"y": y, **dict(gradients)}, x, scale, gate=each, dy=dy, **options)
    x = randn(3, 2, 12, dtype=dtype)[..., ::2]
    hold({"y": compiled(x, **options)}, x, **options)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_gain_for_each_head_before_the_positions(dtype: Any) -> None:
    """The axes of the gain are not the last ones: the kernels compute it on another view, and y is contiguous."""
    x, dy = (randn(2, 3, 5, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    scale, gate = randn(3, 8, dtype=dtype, seed=2), randn(2, 3, 5, 8, dtype=dtype, seed=3)
    for tensors in ([x, scale], [x, scale, gate]):
        results = []
        for last in (False, True):
            leaves = [t.clone().requires_grad_() for t in tensors]
            moved = [t.transpose(1, 2) if last and t.ndim == 4 else t for t in leaves]
            options = {"variant": variant(), "axis": -1, "feature_axis": (-2, -1) if last else (1, -1)}
            y = rms_norm(*moved[:2], gate=dict(enumerate(moved)).get(2), **options)
            assert y.is_contiguous()
            y = y.transpose(1, 2) if last else y
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
        assert all(map(are_alike, *results))


@pytest.mark.parametrize("axes", [(1, -1), (-2, -1)])
def test_what_the_kernels_cannot_read_takes_plain_operations(axes: Any) -> None:
    """Tangents, and numbers that are stored with the other sign."""
    shapes = {(1, -1): (2, 3, 5, 8), (-2, -1): (2, 5, 3, 8)}
    x, scale = randn(*shapes[axes]), randn(3, 8, seed=1)
    options = {"axis": -1, "feature_axis": axes, "variant": variant()}
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x / 2)
        tangent = torch.autograd.forward_ad.unpack_dual(rms_norm(dual, scale, **options)).tangent
    wanted = golden.rms_norm_jvp((to_numpy(x), to_numpy(scale)), (to_numpy(x) / 2, None), **options)
    assert (tangent - torch.from_numpy(wanted)).abs().max() <= NEAR
    hold({"y": rms_norm(torch._neg_view(x), scale, **options)}, -x, scale, **options)


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_layer_with_a_gate(dtype: Any, position: str) -> None:
    """With gradients, without, again, and for rows and gates with gaps."""
    layer = RMSNorm(48, variant=variant(position=position), dtype=dtype, bias=True)
    torch.nn.init.normal_(layer.bias)
    for count, gaps in ((5, 1), (5, 1), (5, 2), (7, 1), (7, 1)):
        x, gate, dy = (randn(count, 48 * gaps, dtype=dtype, seed=seed)[:, ::gaps] for seed in range(3))
        leaves = [x.detach().requires_grad_(), layer.weight, layer.bias, gate.detach().requires_grad_()]
        y = layer(leaves[0], gate=leaves[3])
        gradients = zip(("dx", "dscale", "dbias", "dgate"), torch.autograd.grad(y, leaves, dy), strict=True)
        hold({"y": y, **dict(gradients)}, x, *leaves[1:3], gate=gate, dy=dy, variant=layer.variant)
        with torch.no_grad():
            assert torch.equal(layer(x, gate=gate), y)


def test_an_axis_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="rms_norm: feature_axis is"):
        rms_norm(randn(3, 2, 6), axis=-1, feature_axis=np.array([-2, -1]))


@pytest.mark.parametrize("axis", [(2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_gain_for_each_channel(axis: Any, layout: Any) -> None:
    """Images: y and the gradients, eager and in a program, lie as x does."""
    x, dy = (randn(3, 4, 5, 8, seed=seed).to(memory_format=layout) for seed in (0, 1))
    leaves = [x.requires_grad_(), *(randn(4, seed=seed).requires_grad_() for seed in (2, 3))]
    options = {"variant": "lasagne", "axis": axis, "feature_axis": 1}

    def step(*tensors: Any) -> Any:
        y = rms_norm(*tensors, **options)
        return y, *torch.autograd.grad(y, tensors, dy)

    for results in (step(*leaves), make_fx(step)(*leaves)(*leaves)):
        assert results[0].is_contiguous(memory_format=layout)
        hold(dict(zip(("y", "dx", "dscale", "dbias"), results, strict=True)), *leaves, dy=dy, **options)
