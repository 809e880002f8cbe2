"""Where PyTorch uses the kernels, what a layer keeps of a call, and what backward keeps and computes."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable
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
ROUNDED = (torch.float16, torch.bfloat16, torch.float32)
SHAPES = (7, 24), (9, 24), (2, 3, 24), (1, 24), (5, 24), (7, 24)
PRIMALS = "x", "scale", "bias"


def operators(function: Callable[[], Any]) -> set[str]:
    """Names of the operators that run, from the profiler, which changes nothing in how they run."""
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        function()
    return {event.name for event in seen.function_events}


def by_kernels(function: Callable[[], Any]) -> bool:
    """Whether a function runs no arithmetic of PyTorch."""
    arithmetic = {f"aten::{name}" for name in ("mul", "sqrt", "sum", "div", "rsqrt", "linalg_vector_norm")}
    return not operators(function) & arithmetic


@needs_kernels
def test_the_kernels_are_used() -> None:
    """For the last axes of 16 and 32 bits, in any memory. The golden has the same results."""
    for dtype, layout in itertools.product(ROUNDED, LAYOUTS):
        x, residual, dy = (LAYOUTS[layout](randn(3, 6, 5, 24, dtype=dtype, seed=seed)) for seed in range(3))
        scale = randn(24, dtype=dtype, seed=3).requires_grad_()
        leaf = x.detach().requires_grad_()
        assert by_kernels(lambda x=leaf, g=scale, dy=dy: torch.autograd.grad(rms_norm(x, g), (x, g), dy))
        assert by_kernels(lambda x=x: rms_norm(x, partial=0.5))
        assert by_kernels(lambda x=x: rms_norm(x, torch.ones(5), feature_axis=2))
        assert not by_kernels(lambda x=x: rms_norm(x, axis=0))
        assert not by_kernels(lambda x=x: rms_norm(x, mask=x > 0))
        y, h = rms_norm(leaf, scale, residual=residual, variant="llama")
        dx, dscale = torch.autograd.grad((y, h), (leaf, scale), (dy, dy))
        hold({"y": y, "dx": dx, "dscale": dscale}, x, scale, residual=residual, variant="llama", dy=dy, dh=dy)
    assert not by_kernels(lambda: rms_norm(randn(4, 24, dtype=torch.float64)))


@needs_kernels
def test_the_kernels_are_used_by_the_formula_of_the_gradients() -> None:
    """Also with a residual; not if the gradients may be differentiated or are rounded to several dtypes."""
    scale = torch.ones(24)
    for dtype in ROUNDED:
        x, dy, residual, dh = (randn(3, 6, 5, 24, dtype=dtype, seed=seed) for seed in range(4))
        cases: list[dict[str, Any]] = [{}, {"residual": residual}, {"partial": 0.3}, {"variant": "llama"}]
        for options in cases:
            upstream = (dy, dh) if "residual" in options else dy
            upstream = upstream if "variant" not in options or dtype == torch.float32 else dy.float()
            for layout in ("contiguous", "transposed"):
                a = LAYOUTS[layout](x)
                assert by_kernels(functools.partial(rms_norm_vjp, upstream, a, scale, scale, **options))
        assert not by_kernels(functools.partial(rms_norm_vjp, dy, x.requires_grad_(), scale))
    x, dy = randn(4, 24), randn(4, 24)
    assert not by_kernels(lambda: rms_norm_vjp(dy, x.bfloat16(), scale, residual=x))


def test_a_gradient_alone_is_that_beside_others(engine: str) -> None:
    """For x, the parameters, the residual and the gate."""
    values = {name: randn(*((8,) if name in ("scale", "bias") else (5, 8)), seed=seed)
              for seed, name in enumerate(("x", "scale", "bias", "residual", "gate"))}  # fmt: skip

    def gradients(*names: str) -> list[Any]:
        arrays = {name: value.clone().requires_grad_(name in names) for name, value in values.items()}
        y, h = rms_norm(**arrays)
        (y.sin().sum() + h.cos().sum()).backward()
        return [arrays[name].grad for name in names]

    for name, together in zip(values, gradients(*values), strict=True):
        (alone,) = gradients(name)
        assert torch.equal(alone, together), name


def test_gradients_in_other_memory() -> None:
    """dy with its columns apart, or all of one number, is read as its copy is."""
    x, scale, dy = randn(6, 32).bfloat16().requires_grad_(), randn(32).requires_grad_(), randn(6, 32, seed=1).bfloat16()
    y = rms_norm(x, scale)
    one = torch.ones((), dtype=y.dtype)
    for view in (dy.t().contiguous().t(), dy.repeat(1, 2)[:, :32], one.expand(y.shape)):
        found = [torch.autograd.grad(y, (x, scale), v, retain_graph=True) for v in (view, view.clone().contiguous())]
        assert all(map(torch.equal, *found))


def test_backward_keeps_only_x_the_parameters_the_mask_and_numbers_of_rows() -> None:
    """1 / rho of each row, and of float64 a power of two."""
    formats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, residual, masked in zip(formats, (False, True) * 2, (False, True, True, False), strict=True):
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
    "gradients": lambda layer, x, dy: torch.autograd.grad(layer(x), (x, *layer.parameters()), dy),
    "of the weight alone": lambda layer, x, dy: torch.autograd.grad(layer(x.detach()), layer.weight, dy),
    "of x alone": lambda layer, x, dy: torch.autograd.grad(layer.requires_grad_(False)(x), x, dy),
    "of a sum": lambda layer, x, dy: torch.autograd.grad(layer(x).sum(), (x, *layer.parameters())),
    "of columns": lambda layer, x, dy: torch.autograd.grad(layer(x).T, (x, *layer.parameters()), dy.T.contiguous()),
    "of minus y": lambda layer, x, dy: torch.autograd.grad(layer(x), (x, *layer.parameters()), torch._neg_view(dy)),
    "twice": _second_derivative,
    "forward mode": _tangent,
    "vmap of the gradients": lambda layer, x, dy: torch.autograd.grad(
        layer(x), x, torch.stack([dy, 2 * dy]), is_grads_batched=True
    ),
    "checkpoint": lambda layer, x, dy: torch.autograd.grad(
        checkpoint(layer, x, use_reentrant=False), (x, *layer.parameters()), dy
    ),
    "changed in place": _changed_in_place,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, False), (torch.float32, True)], ids=str)
def test_a_small_call_again_has_the_derivatives_of_the_first(use: str, dtype: Any, bias: bool) -> None:
    results = []
    for calls in (0, 2):
        layer, x = randomised(RMSNorm(24, dtype=dtype, bias=bias)), randn(5, 24, dtype=dtype).requires_grad_()
        for _ in range(calls):
            layer(x.detach() + 1).sum().backward()
        results.append(tree_leaves(USES[use](layer, x, randn(5, 24, dtype=dtype, seed=1))))
    assert len(results[0]) == len(results[1]) > 0
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(*results, strict=True))
    assert all(t.dtype == dtype for t in results[0])


@needs_kernels
@pytest.mark.parametrize("shared", [False, True], ids=["", "a parameter for several elements"])
def test_kernels_compute_only_gradients_that_somebody_needs(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frozen gains, and of x in a first layer, they get no address. The other gradients keep their bits."""
    from rmsnorm.cpu import _native

    computed: list[set[str]] = []
    run = _native.Plan.backward

    def record(plan: Any, **arrays: Any) -> None:
        computed.append({name for name in PRIMALS if arrays[f"d{name}"]})
        run(plan, **arrays)

    monkeypatch.setattr(_native.Plan, "backward", record)
    shape, size = ((200, 8, 64), 8) if shared else ((200, 512), 512)  # two tasks of threads
    tensors = {"x": randn(*shape, dtype=torch.bfloat16), "scale": randn(size, seed=1), "bias": randn(size, seed=2)}
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


@needs_kernels
def test_a_second_call_with_a_residual_or_a_gate_is_the_first() -> None:
    """What the layer keeps of a call holds neither."""
    layer, x, residual = RMSNorm(24, variant="llama"), randn(7, 24).requires_grad_(), randn(7, 24, seed=1)
    for options in ({"residual": residual}, {"gate": residual}, {"residual": residual, "gate": residual + 1}):
        first, again = ([*y] if isinstance(y, tuple) else [y] for y in (layer(x, **options), layer(x, **options)))
        assert all(map(torch.equal, first, again))
        slopes = [torch.autograd.grad(sum(o.sum() for o in y), (x, layer.weight)) for y in (first, again)]
        assert all(map(torch.equal, *slopes))
    assert [t.dtype for t in layer(x, residual=residual.double())] == [torch.float64] * 2
    assert torch.equal(layer(x, residual=residual.t().contiguous().t())[0], layer(x, residual=residual)[0])


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
    layer, failures = RMSNorm(24), []
    wanted = {shape: rms_norm(randn(*shape), layer.weight, variant="torch", eps=layer.eps) for shape in SHAPES}

    def work(first: int) -> None:
        for i in range(300):
            shape = SHAPES[(first + i) % len(SHAPES)]
            y = layer(randn(*shape))
            if y.shape != shape or not torch.equal(y, wanted[shape]):
                failures.append(shape)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
