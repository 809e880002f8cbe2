"""Norms in groups and with a gate: eager calls by the kernels, traced ones by the operators."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import randn, to_numpy  # noqa: E402

from rmsnorm import cpu  # noqa: E402
from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.specification.variants import Variant  # noqa: E402
from rmsnorm.torch_impl import RMSNorm, kernels, operations, operators, rms_norm  # noqa: E402

pytest.importorskip("rmsnorm.cpu._native", reason="without the kernels a program has plain operations")
pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from inside the compiler
]

FORWARD, BACKWARD = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
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
    monkeypatch.setattr(operators, "can_compute", lambda *_: False)
    monkeypatch.setattr(kernels, "kept_of", lambda *_: None)
    wanted = derivatives()
    assert len(results) == len(wanted) == 12
    for result, want in zip(results, wanted, strict=True):
        assert result.shape == want.shape
        assert (result - want).abs().max() <= NEAR * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.slow
def test_compiled_programs(dtype: Any) -> None:
    """With gradients, also for unknown sizes, rows with gaps and no rows: the bits of eager calls."""
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    options = {"variant": variant(), **GROUPS}
    for count in (3, 5, 0):
        tensors, dy = problem(dtype, count)
        results = []
        for function in (rms_norm, compiled):
            ungated = function(*tensors[:2], **options)
            y = function(*tensors[:2], gate=tensors[2], **options)
            gradients = [torch.autograd.grad(o, leaves, dy) for o, leaves in ((ungated, tensors[:2]), (y, tensors))]
            results.append(((ungated, *gradients[0]), (y, *gradients[1])))
        (wanted, wanted_gated), (got, got_gated) = results
        assert all(map(torch.equal, got, wanted))
        assert all(map(torch.equal, got_gated, wanted_gated))
    x = randn(3, 2, 12, dtype=dtype)[..., ::2]
    assert torch.equal(compiled(x, **options), rms_norm(x, **options))


def test_one_node_each() -> None:
    tensors, dy = problem()

    def step(*tensors: Any) -> Any:
        x, scale, gate = tensors
        y = rms_norm(x, scale, gate=gate, variant=variant(), **GROUPS)
        return torch.autograd.grad(y, tensors, dy)

    program = make_fx(step)(*tensors)
    ours = [node.target for node in program.graph.nodes if getattr(node.target, "namespace", "") == "rmsnorm"]
    assert ours == [FORWARD, BACKWARD]
    assert all(map(torch.equal, program(*tensors), step(*tensors)))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_gain_for_each_head_before_the_positions(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axes of the gain are not the last ones: the kernels compute it on another view, and y is contiguous."""
    x, dy = (randn(2, 3, 5, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    scale, gate = randn(3, 8, dtype=dtype, seed=2), randn(2, 3, 5, 8, dtype=dtype, seed=3)
    for tensors in ([x, scale], [x, scale, gate]):
        results = []
        for last in (False, True):
            leaves = [t.clone().requires_grad_() for t in tensors]
            moved = [t.transpose(1, 2) if last and t.ndim == 4 else t for t in leaves]
            options = {"variant": variant(), "axis": -1, "feature_axis": (-2, -1) if last else (1, -1)}
            with monkeypatch.context() as patch:
                patch.setattr(operations, "forward", None)  # of plain operations
                y = rms_norm(*moved[:2], gate=dict(enumerate(moved)).get(2), **options)
            assert y.is_contiguous()
            y = y.transpose(1, 2) if last else y
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
        assert all(map(torch.equal, *results))


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
    assert torch.equal(rms_norm(torch._neg_view(x), scale, **options), rms_norm(-x, scale, **options))


@pytest.mark.parametrize("masked", [False, True])
def test_the_operators_compute_groups_without_kernels(
    masked: bool, monkeypatch: pytest.MonkeyPatch, forget: Any
) -> None:
    """In a process that loads a program and has no kernels; and no rows, which no kernel takes."""
    (x, scale, _), dy = problem()
    mask = torch.arange(6) < 4 if masked else None
    program = make_fx(lambda x, scale: rms_norm(x, scale, mask=mask, variant=variant(), **GROUPS))(x, scale)
    ((*_, settings, k),) = (node.args for node in program.graph.nodes if node.target is FORWARD)

    def run(count: int) -> list[Any]:
        y, _, inverse_rms = FORWARD(x[:count], None, scale, None, mask, None, settings, k)
        return [
            y,
            inverse_rms,
            *BACKWARD(dy[:count], None, x[:count], inverse_rms, scale, None, mask, None, settings, k)[:2],
        ]

    assert [t.shape for t in run(0)] == [(0, 2, 6), (0, 2, 1), (0, 2, 6), (2, 6)]
    wanted = run(3)
    forget(kernels.run_of)
    monkeypatch.setattr(cpu, "missing", lambda *_: "there are none")
    for result, want in zip(run(3), wanted, strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        assert (result - want).abs().max() <= NEAR * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("position", ["after", "before"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_layer_with_a_gate_has_the_bits_of_the_golden(dtype: Any, position: str) -> None:
    """In a first call, and in one that it keeps; with gradients, without, and for rows and gates with gaps."""
    layer = RMSNorm(48, variant=variant(position=position), dtype=dtype, bias=True)
    torch.nn.init.normal_(layer.bias)
    for count, gaps in ((5, 1), (5, 1), (5, 2), (7, 1), (7, 1)):
        x, gate, dy = (randn(count, 48 * gaps, dtype=dtype, seed=seed)[:, ::gaps] for seed in range(3))
        parameters = [p.detach() for p in (layer.weight, layer.bias)]
        arrays = [to_numpy(t) for t in (x, *parameters, gate, dy)]
        wanted = golden.rms_norm(*arrays[:3], gate=arrays[3], variant=layer.variant)
        gradients = golden.rms_norm_vjp(arrays[4], *arrays[:3], gate=arrays[3], variant=layer.variant)
        with torch.no_grad():
            assert np.array_equal(to_numpy(layer(x, gate=gate)), wanted)
        leaves = [x.detach().requires_grad_(), layer.weight, layer.bias, gate.detach().requires_grad_()]
        y = layer(leaves[0], gate=leaves[3])
        assert np.array_equal(to_numpy(y.detach()), wanted)
        for got, want in zip(torch.autograd.grad(y, leaves, dy), gradients, strict=True):
            assert np.array_equal(to_numpy(got), want)


def test_an_axis_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="rms_norm: feature_axis is"):
        rms_norm(randn(3, 2, 6), axis=-1, feature_axis=np.array([-2, -1]))


@pytest.mark.parametrize("axis", [(2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_gain_for_each_channel(axis: Any, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images: y and the gradients are those of the golden, eager and compiled, each by one kernel."""
    x, dy = (randn(3, 4, 5, 8, seed=seed).to(memory_format=layout) for seed in (0, 1))
    leaves = [x.requires_grad_(), *(randn(4, seed=seed).requires_grad_() for seed in (2, 3))]

    def step(*tensors: Any) -> Any:
        y = rms_norm(*tensors, variant="lasagne", axis=axis, feature_axis=1)
        return y, *torch.autograd.grad(y, tensors, dy)

    program = make_fx(step)(*leaves)
    ours = [node.target for node in program.graph.nodes if getattr(node.target, "namespace", "") == "rmsnorm"]
    assert ours == [FORWARD, BACKWARD]
    options = {"variant": "lasagne", "axis": axis, "feature_axis": 1}
    arrays = list(map(to_numpy, leaves))
    want = golden.rms_norm(*arrays, **options), *golden.rms_norm_vjp(to_numpy(dy), *arrays, **options)
    monkeypatch.setattr(operations, "forward", None)  # of plain operations
    monkeypatch.setattr(operations, "backward", None)
    for results in (step(*leaves), program(*leaves)):
        assert results[0].is_contiguous(memory_format=layout)
        for result, expected in zip(results, want, strict=True):
            np.testing.assert_array_equal(to_numpy(result), expected)
