"""Norms in groups, with a gate and without, in traced programs: the operators take groups, plain operations a gate."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import randn  # noqa: E402

from rmsnorm.torch_impl import rms_norm, rms_norm_jvp  # noqa: E402
from rmsnorm.variants import Variant  # noqa: E402

pytest.importorskip("numba", reason="without the kernels a program has plain operations")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler

FORWARD, BACKWARD = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
GROUPS = {"axis": -1, "feature_axis": (-2, -1)}
BF16, F32 = torch.bfloat16, torch.float32
# Float32, on numbers of the size of 1, second derivatives: some 100 operations and sums over 6 elements, on either side
NEAR = 2.0**-24 * 2 * (100 + 6) * 2**4


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def problem(dtype: Any = F32, rows: int = 3) -> tuple[list[Any], Any]:
    """x, gain and gate in two groups of 6, and dy."""
    shapes = ((rows, 2, 6), (2, 6), (rows, 2, 6), (rows, 2, 6))
    *tensors, dy = (randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return [t.requires_grad_() for t in tensors], dy


def traced(function: Any, *tensors: Any) -> Any:
    """A program, and its nodes of our operators."""
    program = make_fx(function)(*tensors)
    return program, [n for n in program.graph.nodes if getattr(n.target, "namespace", "") == "rmsnorm"]


def check(got: Any, want: Any, gated: bool) -> None:
    """The bits of eager calls, but for what the plain operations of a gate round."""
    if gated and got.numel():
        assert (got - want).abs().max() <= torch.finfo(want.dtype).eps * max(1.0, float(want.detach().abs().max()))
    else:
        assert torch.equal(got, want)


@pytest.mark.slow
def test_opcheck() -> None:
    (x, scale, residual), dy = problem(BF16)
    for gain, other in ((scale, residual), (None, None)):
        _, (node,) = traced(lambda x: rms_norm(x, gain, variant="llama", **GROUPS), x)  # noqa: B023
        settings = node.args[5:]
        torch.library.opcheck(FORWARD, (x, other, gain, None, None, *settings))
        torch.library.opcheck(BACKWARD, (dy, other, x, randn(3, 2, 1).double().abs(), gain, None, None, *settings))


def test_one_node_each() -> None:
    tensors, dy = problem()
    for options, nodes in (({}, [FORWARD, BACKWARD]), ({"gate": tensors[2].detach()}, [FORWARD, BACKWARD])):

        def step(x: Any, scale: Any) -> Any:
            y = rms_norm(x, scale, variant="llama", **options, **GROUPS)  # noqa: B023
            return torch.autograd.grad(y, (x, scale), dy)

        program, found = traced(step, *tensors[:2])
        assert [node.target for node in found] == nodes
        for got, want in zip(program(*tensors[:2]), step(*tensors[:2]), strict=True):
            check(got, want, gated=bool(options))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.sample(1)
@pytest.mark.slow
def test_compiled_programs_have_the_bits_of_eager_calls(dtype: Any) -> None:
    """With gradients, also for unknown sizes, rows with gaps and no rows."""
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True)
    options = {"variant": Variant.get("llama"), **GROUPS}
    for rows, gated in itertools.product((3, 5, 0), (False, True)):
        tensors, dy = problem(dtype, rows)
        leaves, results = tensors[: 2 + gated], []
        for function in (compiled, rms_norm):
            y = function(*leaves[:2], gate=leaves[2] if gated else None, **options)
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
        for got, want in zip(*results, strict=True):
            check(got, want, gated)
    x = randn(3, 2, 12, dtype=dtype)[..., ::2]
    assert torch.equal(compiled(x, **options), rms_norm(x, **options))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_gain_for_each_head_before_the_positions(dtype: Any) -> None:
    """The axes of the gain are not the last ones: the kernels compute it on another view, in the layout of x."""
    x, dy = (randn(2, 3, 5, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    scale, gate = randn(3, 8, dtype=dtype, seed=2), randn(2, 3, 5, 8, dtype=dtype, seed=3)
    for tensors in ([x, scale], [x, scale, gate]):
        results = []
        for last in (False, True):
            leaves = [t.clone().requires_grad_() for t in tensors]
            moved = [t.transpose(1, 2) if last and t.ndim == 4 else t for t in leaves]
            options = {"variant": "llama", "axis": -1, "feature_axis": (-2, -1) if last else (1, -1)}
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
    options = {"axis": -1, "feature_axis": axes, "variant": "llama"}
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x / 2)
        tangent = torch.autograd.forward_ad.unpack_dual(rms_norm(dual, scale, **options)).tangent
    wanted = rms_norm_jvp((x, scale), (x / 2, None), **options)
    assert (tangent - wanted).abs().max() <= NEAR
    assert torch.equal(rms_norm(torch._neg_view(x), scale, **options), rms_norm(-x, scale, **options))


def test_the_operators_compute_without_kernels(monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    """In a process that loads a program and has no kernels; and no rows, which no kernel takes."""
    from rmsnorm.torch_impl import operators

    (x, scale, _), dy = problem()
    program, (node,) = traced(lambda x, scale: rms_norm(x, scale, variant="llama", **GROUPS), x, scale)
    wanted, settings = program(x, scale), node.args[5:]
    assert [*FORWARD(x[:0], None, scale, None, None, *settings)[0].shape] == [0, 2, 6]
    gradients = torch.autograd.grad(wanted, (x, scale), dy)
    forget(operators.planned)
    monkeypatch.setattr("rmsnorm.cpu.is_available", lambda: False)
    y = program(x, scale)
    for result, want in zip((y, *torch.autograd.grad(y, (x, scale), dy)), (wanted, *gradients), strict=True):
        assert (result - want).abs().max() <= NEAR * max(1.0, float(want.detach().abs().max()))


def test_an_axis_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="rms_norm: feature_axis is"):
        rms_norm(randn(3, 2, 6), axis=-1, feature_axis=np.array([-2, -1]))
