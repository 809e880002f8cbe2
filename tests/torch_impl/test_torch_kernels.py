"""Where PyTorch uses the kernels, what a layer keeps of a call, and what backward keeps and computes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rmsnorm import cpu

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_arrays import LAYOUTS, hold, randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own
needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels")
SHAPES = (7, 24), (9, 24), (2, 3, 24), (1, 24), (5, 24), (7, 24)


def by_kernels(function: Callable[..., Any], *tensors: Any, **options: Any) -> bool:
    """Whether a function runs no arithmetic of PyTorch, from the profiler, which changes nothing in how it runs."""
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        function(*tensors, **options)
    arithmetic = {f"aten::{name}" for name in ("mul", "sqrt", "sum", "div", "rsqrt", "linalg_vector_norm")}
    return not {event.name for event in seen.function_events} & arithmetic


def slopes(x: Any, scale: Any, dy: Any) -> Any:
    return torch.autograd.grad(rms_norm(x, scale), (x, scale), dy)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_kernels_are_used(dtype: Any) -> None:
    """For the last axes of 16 and 32 bits, in any memory; by the formula, unless gradients may be differentiated."""
    tensors, scale = [randn(3, 6, 5, 24, dtype=dtype, seed=seed) for seed in range(4)], randn(24, dtype=dtype, seed=4)
    learned, of_groups = scale.clone().requires_grad_(), torch.ones(5)
    formula = functools.partial(rms_norm_vjp, scale=scale, bias=scale)
    for layout in LAYOUTS.values():
        x, residual, dy, dh = map(layout, tensors)
        leaf = x.detach().requires_grad_()
        assert by_kernels(slopes, leaf, learned, dy)
        assert by_kernels(rms_norm, x, partial=0.5)
        assert by_kernels(rms_norm, x, of_groups, feature_axis=2)
        assert not by_kernels(rms_norm, x, axis=0)
        assert not by_kernels(rms_norm, x, mask=x > 0)
        for options in ({}, {"partial": 0.3}, {"variant": "llama"}):
            assert by_kernels(formula, dy, x, **options)
        assert by_kernels(formula, (dy, dh), x, residual=residual)
        assert not by_kernels(formula, dy, leaf)
        assert not by_kernels(rms_norm, x.double())
        assert not by_kernels(rms_norm_vjp, dy, x.bfloat16(), residual=x.double())  # gradients of several dtypes
        y, h = rms_norm(leaf, learned, residual=residual, variant="llama")
        dx, dscale = torch.autograd.grad((y, h), (leaf, learned), (dy, dy))
        hold({"y": y, "dx": dx, "dscale": dscale}, x, learned, residual=residual, variant="llama", dy=dy, dh=dy)


def _record(monkeypatch: pytest.MonkeyPatch, computed: list[set[str]]) -> None:
    """Notes which gradients the kernels get an address for."""
    from rmsnorm.cpu import _native

    run = _native.Plan.backward

    def backward(plan: Any, **arrays: Any) -> None:
        computed.append({name for name in ("x", "scale", "bias") if arrays[f"d{name}"]})
        run(plan, **arrays)

    monkeypatch.setattr(_native.Plan, "backward", backward)


@pytest.mark.parametrize(("shape", "axis"), [((5, 8), None), ((200, 8, 64), 1)], ids=["", "for several elements"])
def test_a_gradient_alone_is_that_beside_others(
    engine: str, shape: Any, axis: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For x, the parameters, the residual and the gate; for two tasks of threads. The kernels compute no other one."""
    sizes = {"x": shape, "scale": (8,), "bias": (8,), "residual": shape, "gate": shape}
    values = {name: randn(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}

    def gradients(*names: str) -> list[Any]:
        arrays = {name: value.clone().requires_grad_(name in names) for name, value in values.items()}
        y, h = rms_norm(**arrays, feature_axis=axis)
        (y.sin().sum() + h.cos().sum()).backward()
        return [arrays[name].grad for name in names]

    computed: list[set[str]] = []
    if engine == "kernels":
        _record(monkeypatch, computed)
    for name, together in zip(values, gradients(*values), strict=True):
        computed.clear()
        (alone,) = gradients(name)
        assert torch.equal(alone, together), name
        assert computed == ([{"x" if name == "residual" else name}] if engine == "kernels" and name != "gate" else [])


def test_backward_keeps_only_x_the_parameters_the_mask_and_numbers_of_rows() -> None:
    """1 / rho of each row, and of float64 a power of two."""
    formats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, residual, masked in zip(formats, (False, True) * 2, (False, True, True, False), strict=True):
        x, r = (randn(6, 16, dtype=dtype, seed=seed).requires_grad_() for seed in range(2))
        scale, bias = (randn(16, dtype=dtype, seed=seed).requires_grad_() for seed in range(2))
        mask = randn(6, 16, seed=2) > -0.5 if masked else None
        saved: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            out = rms_norm(x, scale, bias, residual=r if residual else None, mask=mask, variant="llama")
        kept = {tensor.data_ptr(): tensor for tensor in saved}
        expected = {t.data_ptr() for t in (out[1] if residual else x, scale, *([mask] if masked else []))}
        assert expected <= kept.keys()
        rest = [tuple(tensor.shape) for at, tensor in kept.items() if at not in expected | {bias.data_ptr()}]
        assert rest == [(6, 1)] * (2 if dtype == torch.float64 else 1)
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept.values())


def _of_all(layer: Any, x: Any, dy: Any, **options: Any) -> Any:
    y = layer(x, **options)
    return torch.autograd.grad(y, (x, *layer.parameters()), (dy, dy) if isinstance(y, tuple) else dy)


def _second_derivative(layer: Any, x: Any, dy: Any) -> Any:
    (dx,) = torch.autograd.grad(layer(x), x, dy, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), (x, layer.weight))


def _tangent(layer: Any, x: Any, dy: Any) -> Any:
    with forward_ad.dual_level():  # whose own class is no tree in PyTorch 2.5
        return tuple(forward_ad.unpack_dual(layer(forward_ad.make_dual(x.detach(), dy))))


def _changed_in_place(layer: Any, x: Any, dy: Any) -> Any:
    x = x * 1
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    return y


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gradients": _of_all,
    "of the weight alone": lambda layer, x, dy: torch.autograd.grad(layer(x.detach()), layer.weight, dy),
    "of x alone": lambda layer, x, dy: torch.autograd.grad(layer.requires_grad_(False)(x), x, dy),
    "of minus y": lambda layer, x, dy: _of_all(layer, x, torch._neg_view(dy)),
    "twice": _second_derivative,
    "forward mode": _tangent,
    "vmap of the gradients": lambda layer, x, dy: torch.autograd.grad(
        layer(x), x, torch.stack([dy, 2 * dy]), is_grads_batched=True
    ),
    "checkpoint": lambda layer, x, dy: torch.autograd.grad(
        checkpoint(layer, x, use_reentrant=False), (x, *layer.parameters()), dy
    ),
    "changed in place": _changed_in_place,
    "residual": lambda layer, x, dy: _of_all(layer, x, dy, residual=dy),
    "wider residual": lambda layer, x, dy: layer(x, residual=dy.double()),
    "transposed residual": lambda layer, x, dy: _of_all(layer, x, dy, residual=dy.t().contiguous().t()),
    "gate": lambda layer, x, dy: _of_all(layer, x, dy, gate=dy),
    "residual and gate": lambda layer, x, dy: _of_all(layer, x, dy, residual=dy, gate=dy + 1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, False), (torch.float32, True)], ids=str)
def test_a_small_call_again_has_the_derivatives_of_the_first(use: str, dtype: Any, bias: bool) -> None:
    """After calls of x alone, with a residual, and as itself: what the layer keeps of a call holds no tensor."""

    def compute(*before: str) -> list[Any]:
        layer, x = randomised(RMSNorm(24, dtype=dtype, bias=bias)), randn(5, 24, dtype=dtype).requires_grad_()
        dy = randn(5, 24, dtype=dtype, seed=1)
        for name in before:
            USES[name](layer, (x.detach() + 1).requires_grad_(), dy + 1)
        return tree_leaves(USES[use](layer, x, dy))

    want = compute()
    assert want
    for before in ("gradients", "residual", use):
        got = compute(before, before)
        assert [(a.dtype, a.stride()) for a in got] == [(a.dtype, a.stride()) for a in want]
        assert all(map(torch.equal, got, want))


@needs_kernels
def test_a_kept_call_keeps_no_tensor() -> None:
    layer, x, residual = RMSNorm(24), randn(7, 24), randn(7, 24, seed=1)
    for _ in range(2):
        y, h = layer(x, residual=residual)
    tensors = [weakref.ref(t) for t in (x, residual, y, h)]
    del x, residual, y, h
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 4


def test_threads_with_other_shapes_have_their_own_results() -> None:
    layer, inputs = RMSNorm(24), [randn(*shape) for shape in SHAPES]
    wanted = [rms_norm(x, layer.weight, variant="torch") for x in inputs]

    def work(first: int) -> bool:
        order = [(first + i) % len(inputs) for i in range(300)]
        return all(torch.equal(layer(inputs[i]), wanted[i]) for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
