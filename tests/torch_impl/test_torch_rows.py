"""The compiled kernels in PyTorch: the same results as without them, and tensors for which they are not used."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from rmsnorm import cpu

torch = pytest.importorskip("torch")
pytest.importorskip("rmsnorm.cpu._native")
if not cpu.is_available():
    pytest.skip("RMSNORM_CPU_KERNELS=0 switches the kernels off", allow_module_level=True)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_arrays import LAYOUTS, are_alike, hold, randn  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, kernels, rms_norm, rms_norm_vjp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own
ROUNDED = (torch.float16, torch.bfloat16, torch.float32)
LARGE = (2100, 1025)  # above every threshold: of threads, blocks


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches the kernels off, and on again."""

    def switch(off: bool) -> None:
        monkeypatch.setattr(kernels, "kept_of", (lambda *_: None) if off else kept_of)

    kept_of = kernels.kept_of
    return switch


def operators(function: Callable[[], Any]) -> set[str]:
    """Names of the operators that run, from the profiler, which changes nothing in how they run."""
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        function()
    return {event.name for event in seen.function_events}


def by_kernels(function: Callable[[], Any]) -> bool:
    """Whether a function runs no arithmetic of PyTorch."""
    arithmetic = {f"aten::{name}" for name in ("mul", "sqrt", "sum", "div", "rsqrt", "linalg_vector_norm")}
    return not operators(function) & arithmetic


def check_equal(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            assert torch.equal(g, w)


def check_of_one_kind(got: Any, want: Any) -> None:
    """Results of the same dtypes and shapes, of which x + residual is rounded once."""
    for g, w in zip(got, want, strict=True):
        assert (g is None, getattr(g, "dtype", None)) == (w is None, getattr(w, "dtype", None))
        assert w is None or g.shape == w.shape
    if len(got) == 6:
        assert torch.equal(got[1], want[1])


def check_alike(got: Any, want: Any) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            assert are_alike(g, w)


def everything(layout: str, dtype: Any, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """y, h and every gradient, within the bounds of the kit, of inputs in one layout, which are not written to.

    For many numbers the golden takes a minute.
    """
    x, residual, dy, dh = (LAYOUTS[layout](randn(*shape, dtype=dtype, seed=seed)) for seed in range(4))
    scale, bias = (randn(shape[-1], dtype=dtype, seed=seed).repeat(2)[: shape[-1]] for seed in (5, 6))
    inputs = [x, residual, scale, bias, dy, dh]
    before = [tensor.clone() for tensor in inputs]
    leaves = [tensor.detach().requires_grad_() for tensor in (x, residual, scale, bias)]
    named = {**options, "residual": leaves[1] if options.get("residual") else None}
    bias = leaves[3] if named.pop("bias", False) else None
    outputs = rms_norm(leaves[0], leaves[2], bias, **named)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = (dy, dh)[: len(outputs)]
    upstream = tuple(v if v.dtype == y.dtype else v.to(y.dtype) for v, y in zip(upstream, outputs, strict=True))
    gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    for tensor, copy_before in zip(inputs, before, strict=True):
        assert torch.equal(tensor, copy_before), "an input was written to"
    names = "y", *(["h"] if len(outputs) > 1 else []), "dx", "dresidual", "dscale", "dbias"
    results = dict(zip(names, (*outputs, *gradients), strict=True))
    of_kit = {name: result for name, result in results.items() if name != "h"}
    arrays = {"residual": named["residual"], "dy": upstream[0], "dh": dict(enumerate(upstream)).get(1)}
    if x.numel() < 2**16:
        hold(of_kit, leaves[0], leaves[2], bias, **{**named, **arrays})
    return tuple(results.values())


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_kernels_as_without(layout: str, dtype: Any, without_kernels: Any) -> None:
    """Forward and backward, within the bounds of the kit; y and h lie as y of the built-in one."""
    options: list[dict[str, Any]] = [{}, {"bias": True}, {"residual": True}, {"partial": 0.3}]
    for variant, more in itertools.product(("standard", "llama", "zhang_torch", "flax"), options):
        results = []
        for off in (False, True):
            without_kernels(off)
            results.append(everything(layout, dtype, (3, 6, 5, 24), {"variant": variant, **more}))
        check_of_one_kind(*results)
        x = LAYOUTS[layout](randn(3, 6, 5, 24))
        like = x if layout == "channels_last" else x.contiguous()  # in PyTorch 2.13; that of 2.5 keeps more layouts
        assert all(tensor.stride() == like.stride() for tensor in results[0][: 2 if "residual" in more else 1])


@pytest.mark.parametrize("dtype", ROUNDED)
def test_large_with_kernels_as_without(dtype: str, without_kernels: Any) -> None:
    for options in ({}, {"residual": True, "variant": "llama"}):
        results = []
        for off in (False, True):
            without_kernels(off)
            results.append(everything("contiguous", dtype, (3, 700, 1025), options))
        check_of_one_kind(*results)
        check_alike(*results)


def test_the_kernels_are_used() -> None:
    """For the last axes of 16 and 32 bits. The other tests compare these two ways."""
    for dtype, layout in itertools.product(ROUNDED, LAYOUTS):
        x = LAYOUTS[layout](randn(3, 6, 5, 24, dtype=dtype)).requires_grad_()
        scale, dy = torch.ones(24, requires_grad=True), randn(3, 6, 5, 24, dtype=dtype)
        assert by_kernels(lambda x=x, scale=scale, dy=dy: torch.autograd.grad(rms_norm(x, scale), (x, scale), dy))
        assert by_kernels(lambda x=x: rms_norm(x, partial=0.5))
        assert by_kernels(lambda x=x: rms_norm(x, torch.ones(5), feature_axis=2))
        assert not by_kernels(lambda x=x: rms_norm(x, axis=0))
        assert not by_kernels(lambda x=x: rms_norm(x, mask=x > 0))
    assert not by_kernels(lambda: rms_norm(randn(4, 24, dtype=torch.float64)))


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
    with torch.no_grad():
        assert by_kernels(lambda: rms_norm_vjp(dy, x.requires_grad_(), scale))
    assert not by_kernels(lambda: rms_norm_vjp(dy, x.bfloat16(), scale, residual=x))
    assert not by_kernels(lambda: torch.func.vmap(lambda dy, x: rms_norm_vjp(dy, x, scale)[0])(dy, x))
    leaves = [randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((4, 8), (4, 8), (8,))]
    assert torch.autograd.gradcheck(lambda *leaves: rms_norm_vjp(*leaves)[:2], leaves, check_forward_ad=True)


def test_gradients_of_other_dtypes_and_steps() -> None:
    x, scale = randn(6, 32).bfloat16().requires_grad_(), randn(32).requires_grad_()
    y = rms_norm(x, scale)
    dy = randn(6, 32, seed=1).bfloat16()
    want = torch.autograd.grad(y, (x, scale), dy, retain_graph=True)
    ones = torch.autograd.grad(y, (x, scale), torch.ones_like(y), retain_graph=True)
    check_equal(torch.autograd.grad(y.sum(), (x, scale), retain_graph=True), ones)
    for other in (dy.t().contiguous().t(), dy.repeat(1, 2)[:, :32]):
        check_equal(torch.autograd.grad(y, (x, scale), other, retain_graph=True), want)
    y.backward(dy.float())  # autograd casts it
    check_equal((x.grad, scale.grad), want)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_any_number_of_threads_gives_the_same_bits(dtype: Any) -> None:
    x, dy = (randn(*LARGE, dtype=dtype, seed=seed) for seed in range(2))
    scale, bias = (randn(LARGE[1], dtype=dtype, seed=seed) for seed in range(2))
    leaves = [tensor.requires_grad_() for tensor in (x, scale, bias)]
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            y = rms_norm(*leaves)
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        check_equal(result, results[0])


class Named(torch.Tensor):
    """A subclass that sees what is done to it."""

    seen: ClassVar[set[str]] = set()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.add(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_subclass_and_a_mode_see_the_operators() -> None:
    x, scale, dy = randn(4, 32).requires_grad_(), randn(32).requires_grad_(), randn(4, 32, seed=1)
    y = rms_norm(x, scale)
    want = (y.detach(), *torch.autograd.grad(y, (x, scale), dy))
    named = x.detach().as_subclass(Named).requires_grad_()
    got = rms_norm(named, scale)
    assert type(got) is Named
    assert "mul" in Named.seen or "__mul__" in Named.seen
    results = (got.detach(), *torch.autograd.grad(got, (named, scale), dy))
    check_alike([tensor.as_subclass(torch.Tensor) for tensor in results], want)
    with Watch() as watch:
        got = rms_norm(x, scale)
        forward = len(watch.seen)
        results = (got.detach(), *torch.autograd.grad(got, (x, scale), dy))
    check_alike(results, want)
    assert "aten.sqrt.default" in watch.seen[:forward]
    assert "aten.mul.Tensor" in watch.seen[forward:]
    y = rms_norm(x, scale)
    with Watch() as watch:  # the backward pass of a forward pass by kernels
        check_alike(torch.autograd.grad(y, (x, scale), dy), want[1:])
    assert "aten.mul.Tensor" in watch.seen


def test_fake_and_meta_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, scale = torch.empty(4, 32, dtype=torch.bfloat16, requires_grad=True), torch.empty(32, requires_grad=True)
        y, h = rms_norm(x, scale, residual=x, variant="llama")
        y.sum().backward()
    shapes = [(tensor.shape, tensor.dtype) for tensor in (y, h, x.grad, scale.grad)]
    assert shapes == [((4, 32), torch.float32), *[((4, 32), torch.bfloat16)] * 2, ((32,), torch.float32)]
    for dtype, masked in itertools.product((torch.float64, torch.bfloat16), (False, True)):
        x = torch.empty(LARGE, device="meta", dtype=dtype, requires_grad=True)
        scale = torch.empty(LARGE[1], device="meta", requires_grad=True)
        mask = torch.empty((LARGE[0], 1), device="meta", dtype=torch.bool) if masked else None
        y, inverse_rms = rms_norm(x, scale, mask=mask, partial=0.3, variant="llama", return_inverse_rms=True)
        assert (y.device.type, y.shape, inverse_rms.shape) == ("meta", LARGE, (LARGE[0], 1))
        y.sum().backward()
        assert (x.grad.shape, x.grad.dtype, scale.grad.dtype) == (LARGE, dtype, torch.float32)


STORED = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr(),
    "_mkldnn": lambda t: t.to_mkldnn(),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of PyTorch, about its sparse and quantised tensors
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", STORED)
def test_what_has_no_memory_of_that_kind_is_refused_by_name(kind: str) -> None:
    """Every argument of every function, and x of a layer that has made such a call before."""
    if kind == "_mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("no mkldnn here")
    x, scale = randn(4, 32), randn(4, 32, seed=1)
    layer, options = RMSNorm(32), {"axis": -1, "feature_axis": (0, 1)}
    layer(layer(x))
    calls = {
        "rms_norm": (rms_norm, {"x": x, "scale": scale, "bias": scale, "gate": x}),
        "rms_norm_vjp": (rms_norm_vjp, {"x": x, "scale": scale, "bias": scale, "gate": x, "dy": x}),
    }  # fmt: skip
    for op, (function, arguments) in calls.items():
        for name in arguments:
            sentence = rf"{name} f32\[4, 32\] is {kind}, expected a dense tensor; call to_dense\(\) first"
            if kind == "meta":
                sentence = rf"{name} is on the device meta, expected cpu, where x is; load its values first"
                sentence = sentence if name != "x" else r"scale is on the device cpu, expected meta, where x is"
            with pytest.raises((TypeError, ValueError), match=f"^{op}: {sentence}"):
                function(**{**arguments, name: STORED[kind](arguments[name])}, **options)
    sentence = "scale is on the device cpu" if kind == "meta" else rf"x f32\[4, 32\] is {kind}"
    with pytest.raises((TypeError, ValueError), match=f"^rms_norm: {sentence}"):
        layer(STORED[kind](x))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantised_numbers_are_refused() -> None:
    x = torch.quantize_per_tensor(randn(4, 32), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match="rms_norm: x has dtype qint8, expected"):
        rms_norm(x, torch.ones(32))


@pytest.mark.parametrize("differentiated", [False, True])
def test_results_are_ordinary_tensors(differentiated: bool) -> None:
    """They can grow, be shared, saved and copied, also if rmsnorm asked for their memory."""
    x, residual, scale = randn(*LARGE), randn(*LARGE, seed=1), randn(LARGE[1])
    if differentiated:
        for tensor in (x, residual, scale):
            tensor.requires_grad_()
    y, h, inverse_rms = rms_norm(x, scale, residual=residual, return_inverse_rms=True)
    results = [y, h, inverse_rms]
    if differentiated:
        results += torch.autograd.grad(y.sum(), (x, residual, scale))
    for tensor in [result.detach() for result in results]:
        want = tensor.clone()
        assert torch.equal(copy.deepcopy(tensor), want)
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), want)
        tensor.add_(1).sub_(1)  # it can be written to
        assert tensor.untyped_storage().resizable()
        tensor.resize_(tensor.numel() + 2**20)
        assert torch.equal(tensor[: want.numel()], want.add(1).sub(1).reshape(-1))
        assert torch.equal(want.share_memory_(), want)
    assert torch.equal(rms_norm(x.detach(), scale.detach()).share_memory_(), rms_norm(x.detach(), scale.detach()))
