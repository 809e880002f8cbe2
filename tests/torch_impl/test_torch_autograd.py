"""What PyTorch differentiates beside the random calls of test_fuzz.py: what it keeps, computes, maps and refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_arrays import randn, to_numpy  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


@pytest.mark.parametrize("variant", ["llama", "standard"])
def test_forward_mode_where_y_is_not_finite(variant: str) -> None:
    x, scale = torch.tensor([[1.0, torch.inf, 2.0], [torch.nan, 1.0, 2.0]]), torch.full((3,), 1.5)
    tangents = torch.ones_like(x), torch.ones_like(scale)
    _, dy = torch.func.jvp(lambda x, scale: rms_norm(x, scale, variant=variant), (x, scale), tangents)
    want = golden.rms_norm_jvp((x.numpy(), scale.numpy()), tuple(map(to_numpy, tangents)), variant=variant)
    assert np.array_equal(dy.isnan(), np.isnan(want))


def test_half_second_derivatives() -> None:
    """A Hessian-vector product in bf16 is that of float64, rounded: three times at most, in dx, in it and in a sum."""
    x, v = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def product(x: Any, v: Any) -> Any:
        x = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(rms_norm(x).pow(2).mul(v).sum(), x, create_graph=True)
        return torch.autograd.grad((dx * v).sum(), x)[0].double()

    want = product(x.double(), v.double())
    # y, y^2 v, dx and dx v are rounded to bf16: four roundings, which cancellation over 64 terms enlarges
    assert (product(x, v) - want).abs().max() <= 4 * 2.0**-8 * 8 * want.abs().max()


@pytest.mark.parametrize("variant", ["standard", "llama", "zhang_torch", "x_transformers"])
def test_vmap(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 2, 4, 8), generator=generator)
    scale, mask = torch.randn((3, 8), generator=generator), torch.rand((3, 4, 8), generator=generator) > 0.3

    def one(x: Any, scale: Any, mask: Any) -> Any:
        return rms_norm(x, scale, variant=variant, mask=mask, partial=0.6)

    # float64 kernels round each operation, and plain operations do not
    for dtype in (torch.bfloat16, torch.float32):
        a, g = x.to(dtype), scale.to(dtype)
        want = torch.stack([one(a[i], g[i], mask[i]) for i in range(3)])
        assert torch.equal(torch.vmap(one)(a, g, mask), want)
        assert torch.equal(torch.vmap(one, (0, 1, 1))(a, g.mT, mask.movedim(0, 1)), want)
        masked = torch.stack([one(a[0], g[0], each) for each in mask])
        assert torch.equal(torch.vmap(one, (None, None, 0))(a[0], g[0], mask), masked)
        assert torch.equal(torch.vmap(torch.vmap(one, (0, None, None)))(a, g, mask), want)
        assert torch.equal(torch.vmap(one, (1, None, None))(a, g[0], mask[0]), one(a.transpose(0, 1), g[0], mask[0]))
        per_sample = torch.vmap(torch.func.grad(lambda g, a, m: one(a, g, m).square().sum()))(g, a, mask)
        for i in range(3):
            leaf = g[i].clone().requires_grad_()
            (alone,) = torch.autograd.grad(one(a[i], leaf, mask[i]).square().sum(), leaf)
            assert ulps(to_numpy(per_sample[i]), to_numpy(alone)).max() <= 1


def test_backward_keeps_only_x_the_parameters_the_mask_and_numbers_of_rows() -> None:
    """1 / rho of each row, and of float64 a power of two."""
    formats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, residual, masked in itertools.product(formats, (False, True), (False, True)):
        x, r = (torch.randn(6, 16, dtype=dtype).requires_grad_() for _ in range(2))
        scale, bias = (torch.randn(16, dtype=dtype).requires_grad_() for _ in range(2))
        mask = torch.rand(6, 16) > 0.3 if masked else None
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = rms_norm(x, scale, bias, residual=r if residual else None, mask=mask, variant="llama")
        kept = {tensor.data_ptr(): tensor for tensor in saved}
        h = out[1] if residual else x
        expected = [h, scale, *([mask] if masked else [])]
        assert all(tensor.data_ptr() in kept for tensor in expected)
        rest = [tensor for at, tensor in kept.items() if at not in {t.data_ptr() for t in (*expected, bias)}]
        assert [tuple(tensor.shape) for tensor in rest] == [(6, 1)] * (2 if dtype == torch.float64 else 1)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept.values())


def test_the_inverse_rms_is_a_constant_and_the_sum_is_not() -> None:
    leaf, x = randn(3, 8).requires_grad_(), randn(3, 8, seed=1)
    assert not rms_norm(leaf, return_inverse_rms=True)[1].requires_grad
    (gradient,) = torch.autograd.grad(rms_norm(x, residual=leaf)[1].sum(), leaf)
    assert torch.equal(gradient, torch.ones_like(leaf))


def _second_derivative(layer: Any, x: Any, dy: Any) -> Any:
    (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), (x, layer.weight))


def _tangent(layer: Any, x: Any, dy: Any) -> Any:
    with forward_ad.dual_level():  # whose own class is no tree in PyTorch 2.5
        return tuple(forward_ad.unpack_dual(layer(forward_ad.make_dual(x.detach(), dy))))


def _batches_of_gradients(layer: Any, x: Any, dy: Any) -> Any:
    return torch.autograd.grad(layer(x), x, torch.stack([dy, 2 * dy]), is_grads_batched=True)


def _checkpointed(layer: Any, x: Any, dy: Any) -> Any:
    return torch.autograd.grad(checkpoint(layer, x, use_reentrant=False), (x, *layer.parameters()), dy)


def _operators_seen(layer: Any, x: Any, dy: Any) -> Any:
    y = layer(x)
    with FlopCounterMode(display=False):
        return torch.autograd.grad(y, (x, *layer.parameters()), dy)


def _changed_in_place(layer: Any, x: Any, dy: Any) -> Any:
    x = x * 1
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    return y


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "y": lambda layer, x, dy: layer(x),
    "gradients": lambda layer, x, dy: torch.autograd.grad(layer(x), (x, *layer.parameters()), dy),
    "of the weight alone": lambda layer, x, dy: torch.autograd.grad(layer(x.detach()), layer.weight, dy),
    "of x alone": lambda layer, x, dy: torch.autograd.grad(layer.requires_grad_(False)(x), x, dy),
    "of a sum": lambda layer, x, dy: torch.autograd.grad(layer(x).sum(), (x, *layer.parameters())),
    "of columns": lambda layer, x, dy: torch.autograd.grad(layer(x).T, (x, *layer.parameters()), dy.T.contiguous()),
    "of minus y": lambda layer, x, dy: torch.autograd.grad(layer(x), (x, *layer.parameters()), torch._neg_view(dy)),
    "of no result": lambda layer, x, dy: torch.autograd.grad(
        torch.unbind(torch.stack([layer(x), x]))[1].sum(), (x, *layer.parameters())
    ),
    "twice": _second_derivative,
    "forward mode": _tangent,
    "torch.func": lambda layer, x, dy: torch.func.vjp(layer, x.detach())[1](dy),
    "vmap of the gradients": _batches_of_gradients,
    "checkpoint": _checkpointed,
    "a mode": _operators_seen,
    "changed in place": _changed_in_place,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_small_call_again_has_the_derivatives_of_the_first(use: str, dtype: Any, bias: bool) -> None:
    results = []
    for calls in (0, 2):
        layer, x = randomised(RMSNorm(24, dtype=dtype, bias=bias)), randn(5, 24, dtype=dtype).requires_grad_()
        for _ in range(calls):
            layer(x.detach() + 1).sum().backward()
        assert (not layer._kept) == (calls == 0 or not cpu.is_available())
        results.append(tree_leaves(USES[use](layer, x, randn(5, 24, dtype=dtype, seed=1))))
    assert len(results[0]) == len(results[1]) > 0
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*results, strict=True))
    assert all(t.dtype == dtype for t in results[0])


PRIMALS = "x", "scale", "bias"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Which gradients the kernels compute, call by call."""
    if not cpu.is_available():
        pytest.skip("there are no kernels here")
    from rmsnorm.cpu import _native

    seen: list[set[str]] = []
    run = _native.Plan.backward

    def record(plan: Any, **arrays: Any) -> None:
        seen.append({name for name in PRIMALS if arrays[f"d{name}"]})
        run(plan, **arrays)

    monkeypatch.setattr(_native.Plan, "backward", record)
    return seen


@pytest.mark.parametrize("shared", [False, True], ids=["", "a parameter for several elements"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_compute_only_gradients_that_somebody_needs(dtype: Any, shared: bool, computed: list[set[str]]) -> None:
    """Of frozen gains, and of x in a first layer, they get no address. The other gradients keep their bits."""
    shape, size = ((200, 8, 64), 8) if shared else ((200, 512), 512)  # two tasks of threads
    tensors = {"x": randn(*shape, dtype=dtype), "scale": randn(size, seed=1), "bias": randn(size, seed=2)}
    options: dict[str, Any] = {"feature_axis": 1} if shared else {}
    expected: dict[str, Any] = {}
    for needed in itertools.chain.from_iterable(itertools.combinations(tensors, r) for r in (3, 2, 1)):
        leaves = {key: tensor.clone().requires_grad_(key in needed) for key, tensor in tensors.items()}
        y = rms_norm(**leaves, **options)
        gradients = torch.autograd.grad(y, [leaves[key] for key in needed], randn(*shape, dtype=y.dtype, seed=5))
        expected = expected or dict(zip(needed, gradients, strict=True))
        assert computed.pop() == set(needed)
        assert computed == []
        assert all(torch.equal(g, expected[key]) for key, g in zip(needed, gradients, strict=True))


@pytest.mark.parametrize("needed", [("x",), ("scale",), ("bias",), ("x", "bias"), ("x", "scale", "bias")])
def test_a_small_call_again_computes_only_those(needed: tuple[str, ...], computed: list[set[str]]) -> None:
    layer, x = RMSNorm(24, bias=True), randn(5, 24).requires_grad_("x" in needed)
    layer.weight.requires_grad_("scale" in needed)
    layer.bias.requires_grad_("bias" in needed)
    for _ in range(3):
        layer(x).sum().backward()
    assert len(layer._kept) == 1
    assert computed == [set(needed)] * 3
