"""The operators rmsnorm::gated_forward and rmsnorm::gated_backward: norms in groups in traced programs."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import randn  # noqa: E402

from rmsnorm.torch_impl import functional, gated_operators, rms_norm, rms_norm_jvp, rms_norm_vjp  # noqa: E402
from rmsnorm.variants import Variant  # noqa: E402

pytest.importorskip("numba", reason="without the kernels a program has plain operations")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler

FORWARD, BACKWARD = torch.ops.rmsnorm.gated_forward.default, torch.ops.rmsnorm.gated_backward.default
GROUPS = {"axis": -1, "feature_axis": (-2, -1)}
BF16, F32 = torch.bfloat16, torch.float32
# Float32, on numbers of the size of 1, second derivatives: some 100 operations and sums over 6 elements, on either side
NEAR = 2.0**-24 * 2 * (100 + 6) * 2**4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def variant(function: str = "silu", position: str = "after") -> Any:
    return Variant.get("llama").replace(gate_function=function, gate_position=position)


def problem(dtype: Any = F32, rows: int = 3) -> tuple[list[Any], Any]:
    """x, gain and gate in two groups of 6, and dy."""
    shapes = ((rows, 2, 6), (2, 6), (rows, 2, 6), (rows, 2, 6))
    *tensors, dy = (randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return [t.requires_grad_() for t in tensors], dy


def settings(tensors: Any, **chosen: Any) -> str:
    """The text of a call that was traced."""
    program = make_fx(lambda x, scale, gate: rms_norm(x, scale, gate=gate, variant=variant(**chosen), **GROUPS))(
        *tensors
    )
    (text,) = (node.args[-1] for node in program.graph.nodes if node.target is FORWARD)
    return str(text)


@pytest.mark.slow
def test_opcheck() -> None:
    (x, scale, gate), dy = problem(BF16)
    for gain, z in ((scale, gate), (None, gate), (scale, None)):
        text = settings((x, gain, z))
        torch.library.opcheck(FORWARD, (x, gain, z, text))
        torch.library.opcheck(BACKWARD, (dy, x, gain, z, text))


@pytest.mark.parametrize(("function", "position"), list(itertools.product(("silu", "sigmoid"), ("after", "before"))))
def test_every_derivative_is_that_of_plain_operations(function: str, position: str) -> None:
    """First and second derivatives, tangents and batches."""
    tensors, dy = problem()
    text = settings(tensors, function=function, position=position)

    def plain(*tensors: Any) -> Any:
        return gated_operators._plain_forward(*tensors, text)[0]

    def by_operator(*tensors: Any) -> Any:
        return FORWARD(*tensors, text)[0]

    def derivatives(function: Any) -> list[Any]:
        y = function(*tensors)
        first = torch.autograd.grad(y, tensors, dy.requires_grad_(), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (dy, *tensors))
        with torch.autograd.forward_ad.dual_level():
            dual = [torch.autograd.forward_ad.make_dual(t.detach(), t.detach() / 2) for t in tensors]
            tangent = torch.autograd.forward_ad.unpack_dual(function(*dual)).tangent
        batch = torch.vmap(function, (0, None, 0))(*(t[:, None] if t.ndim == 3 else t for t in tensors))
        return [y, *first, *second, tangent, batch]

    results = derivatives(by_operator)
    with mock.patch.object(gated_operators, "serve", return_value=False):
        wanted = derivatives(plain)
    assert len(results) == len(wanted) == 10
    moved = torch.func.jvp(lambda x: BACKWARD(dy, x, *tensors[1:], text), (tensors[0],), (dy,))[1]
    wanted_moved = torch.func.jvp(
        lambda x: gated_operators._plain_backward(dy, x, *tensors[1:], text), (tensors[0],), (dy,)
    )[1]
    for result, want in zip([*results, *moved], [*wanted, *wanted_moved], strict=True):
        assert result.shape == want.shape
        assert (result - want).abs().max() <= NEAR * max(1.0, float(want.detach().abs().max()))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.sample(1)
@pytest.mark.slow
def test_compiled_programs_have_the_bits_of_eager_calls(dtype: Any) -> None:
    """With gradients, also for unknown sizes, rows with gaps and no rows."""
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    options = {"variant": variant(), **GROUPS}
    for rows in (3, 5, 0):
        tensors, dy = problem(dtype, rows)
        results = []
        for function in (rms_norm, compiled):
            y = function(*tensors[:2], gate=tensors[2], **options)
            ungated = function(*tensors[:2], **options)
            gradients = (torch.autograd.grad(o, leaves, dy) for o, leaves in ((y, tensors), (ungated, tensors[:2])))
            results.append((y, ungated, *itertools.chain(*gradients)))
        assert all(map(torch.equal, *results))
    x, gate = (randn(3, 2, 12, dtype=dtype, seed=seed)[..., ::2] for seed in (0, 1))
    assert torch.equal(compiled(x, gate=gate, **options), rms_norm(x, gate=gate, **options))


def test_one_node_each() -> None:
    tensors, dy = problem()

    def step(*tensors: Any) -> Any:
        x, scale, gate = tensors
        y = rms_norm(x, scale, gate=gate, variant=variant(), **GROUPS)
        return torch.autograd.grad(y, tensors, dy)

    program = make_fx(step)(*tensors)
    assert [n.target for n in program.graph.nodes if getattr(n.target, "namespace", "") == "rmsnorm"] == [
        FORWARD,
        BACKWARD,
    ]
    assert all(map(torch.equal, program(*tensors), step(*tensors)))
    gradients = make_fx(lambda dy, x, scale, gate: rms_norm_vjp(dy, x, scale, gate=gate, variant=variant(), **GROUPS))
    assert BACKWARD in [node.target for node in gradients(dy, *(t.detach() for t in tensors)).graph.nodes]


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_gain_for_each_head_before_the_positions(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axes of the gain are not the last ones: the kernels compute it on another view, in the layout of x."""
    x, dy = (randn(2, 3, 5, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    scale, gate = randn(3, 8, dtype=dtype, seed=2), randn(2, 3, 5, 8, dtype=dtype, seed=3)
    for tensors in ([x, scale], [x, scale, gate]):
        results = []
        for last in (False, True):
            leaves = [t.clone().requires_grad_() for t in tensors]
            moved = [t.transpose(1, 2) if last and t.ndim == 4 else t for t in leaves]
            options = {"variant": variant(), "axis": -1, "feature_axis": (-2, -1) if last else (1, -1)}
            with monkeypatch.context() as patch:
                patch.setattr(functional, "forward", None)  # of plain operations
                y = rms_norm(*moved[:2], gate=dict(enumerate(moved)).get(2), **options)
            y = y.transpose(1, 2) if last else y
            assert y.is_contiguous()
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
    wanted = rms_norm_jvp((x, scale), (x / 2, None), **options)
    assert (tangent - wanted).abs().max() <= NEAR
    assert torch.equal(rms_norm(torch._neg_view(x), scale, **options), rms_norm(-x, scale, **options))


@pytest.mark.parametrize("gated", [False, True])
def test_the_operators_compute_without_kernels(gated: bool, monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    """In a process that loads a program and has no kernels; and no rows, which no kernel takes."""
    (x, scale, gate), dy = problem()
    z = gate if gated else None
    text = settings((x, scale, z))
    wanted = [*FORWARD(x, scale, z, text), *BACKWARD(dy, x, scale, z, text)]
    assert [t.shape for t in FORWARD(x[:0], scale, z if z is None else z[:0], text)] == [(0, 2, 6), (0, 2, 1)]
    forget(gated_operators._planned, gated_operators.gates.plan)
    monkeypatch.setattr("rmsnorm.cpu.is_available", lambda: False)
    results = [*FORWARD(x, scale, z, text), *BACKWARD(dy, x, scale, z, text)]
    for result, want in zip(results, wanted, strict=True):
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        assert not result.numel() or (result - want).abs().max() <= NEAR * max(1.0, float(want.detach().abs().max()))


def test_an_axis_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="rms_norm: feature_axis is"):
        rms_norm(randn(3, 2, 6), axis=-1, feature_axis=np.array([-2, -1]))


def test_without_groups_the_norm_has_its_own_operator() -> None:
    x, gate = randn(3, 6), randn(3, 6, seed=1)
    program = make_fx(lambda x, gate: rms_norm(x, gate=gate))(x, gate)
    assert torch.ops.rmsnorm.forward.default in [node.target for node in program.graph.nodes]
