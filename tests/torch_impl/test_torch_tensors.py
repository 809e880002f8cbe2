"""Tensors that are no plain memory, in every mode: the numbers of plain ones, inputs as they were, never a crash."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_utils import CrossRefFakeMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch_arrays import are_alike, randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402


class Subclass(torch.Tensor):
    pass


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def shifted(t: Any, start: int) -> Any:
    """In the middle of other memory, from that byte on."""
    memory = bytearray(start + t.numel() * t.element_size())
    view = torch.frombuffer(memory, dtype=t.dtype, offset=start, count=t.numel()).view(t.shape)
    return view.copy_(t)


def in_inference(t: Any) -> Any:
    with torch.inference_mode():
        return t.clone()


VIEWS: list[Callable[[Any], Any]] = [
    torch.clone,
    lambda t: t.repeat_interleave(2, -1)[..., ::2],
    lambda t: t.mT.clone().mT if t.ndim > 1 else t.clone(),
    lambda t: t[..., :1].expand(t.shape),
    lambda t: shifted(t, 1),  # no element is where the processor would put it
    lambda t: shifted(t, 24),
]
NUMBERS = [
    *VIEWS,
    in_inference,
    lambda t: torch._neg_view(-t),
    lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    lambda t: t.clone().share_memory_(),
    lambda t: t.clone().as_subclass(Subclass),
]
MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "dispatch": Watch,
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "anomaly": torch.autograd.detect_anomaly,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def plain(t: Any) -> Any:
    """Its numbers, in an ordinary tensor of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.zeros(t.shape, dtype=t.dtype).copy_(t.detach())


def results(tensors: dict[str, Any], options: Any, mode: Callable[[], Any]) -> list[Any]:
    """y, the gradients by the formula and, where the mode has them, by autograd."""
    x, scale, residual, mask = (tensors.get(name) for name in ("x", "scale", "residual", "mask"))
    dy = (tensors["dy"],) if residual is None else (tensors["dy"], tensors["dh"])
    with warnings.catch_warnings(action="ignore"), mode():
        y = rms_norm(x, scale, residual=residual, mask=mask, **options)
        found = [*y] if isinstance(y, tuple) else [y]
        found += rms_norm_vjp(dy if dy[1:] else dy[0], x, scale, residual=residual, mask=mask, **options)
        if torch.is_grad_enabled() and not any(t.is_inference() for t in tensors.values()):
            leaves = [t.detach().requires_grad_() for t in (x, scale, residual) if t is not None]
            y = rms_norm(*leaves[:2], residual=leaves[2] if leaves[2:] else None, mask=mask, **options)
            found += torch.autograd.grad(y, leaves, dy)
    return [plain(t) for t in found if t is not None]


@pytest.mark.needs("torch>=2.6", "in 2.5 a mode cannot make a subclass of Tensor of a tensor that has a Python object")
@pytest.mark.parametrize("mode", MODES)
def test_any_tensor_in_any_mode(mode: str) -> None:
    random = np.random.default_rng(list(MODES).index(mode))
    chosen = lambda items: items[random.integers(len(items))]  # noqa: E731
    for _ in range(15):
        dtype, axis = chosen([torch.float32, torch.bfloat16, torch.float16]), int(chosen([-1, 0]))
        shape = chosen([(3, 8), (2, 3, 6), (1, 3), (4, 33), (5,)])
        options = {"variant": str(chosen(["llama", "gemma", "keras", "x_transformers"])), "axis": axis}
        names = ["x", "dy", "scale", *(["residual", "dh"] if random.random() < 0.4 else [])]
        numbers = {name: random.normal(size=(shape[axis],) if name == "scale" else shape) for name in names}
        tensors = {name: chosen(NUMBERS)(torch.from_numpy(each).to(dtype)) for name, each in numbers.items()}
        if random.random() < 0.3:
            tensors["mask"] = chosen(VIEWS)(torch.from_numpy(random.random(shape) < 0.8))
        before = {name: plain(t) for name, t in tensors.items()}
        got, want = results(tensors, options, MODES[mode]), results(before, options, contextlib.nullcontext)
        assert len(got) > len(names) // 2
        for tensor, expected in zip(got, want, strict=False):  # some modes have no gradients by autograd
            assert tensor.dtype == expected.dtype
            end = torch.tensor([max(float(expected.abs().max()), 1.0)], dtype=expected.dtype)  # terms that cancel
            assert are_alike(*(torch.cat([t.flatten(), end]) for t in (tensor, expected))), (options, tensors)
        assert all(torch.equal(plain(t), before[name]) for name, t in tensors.items())


def test_memory_that_was_freed() -> None:
    """As of a parameter of FSDP outside of a forward pass; to read it would end the process."""
    freed = torch.ones(4, 8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"shape \(4, 8\) has no memory"):
        rms_norm(freed)
    with pytest.raises(ValueError, match="has no memory"):
        rms_norm_vjp(freed, torch.ones(4, 8))


def test_a_subclass_and_a_mode_see_the_operators() -> None:
    """Also those of the backward pass of a forward pass by kernels; with their numbers."""
    x, scale, dy = randn(4, 32).requires_grad_(), randn(32).requires_grad_(), randn(4, 32, seed=1)
    y = rms_norm(x, scale)
    want = torch.autograd.grad(y, (x, scale), dy, retain_graph=True)
    two = rms_norm(TwoTensor(x.detach(), 2 * x.detach()), scale)
    assert type(two) is TwoTensor
    assert are_alike(two.a, y)
    with Watch() as watch:
        assert are_alike(rms_norm(x, scale), y)
    assert "aten.sqrt.default" in watch.seen
    with Watch() as watch:
        assert all(map(are_alike, torch.autograd.grad(y, (x, scale), dy), want))
    assert "aten.mul.Tensor" in watch.seen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the mode's own
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_fake_tensors_foretell_the_real_ones(dtype: Any) -> None:
    """Shape, dtype and strides of every operator inside, forward and backward; and tensors on meta."""
    with CrossRefFakeMode():
        x, scale = randn(4, 8, dtype=dtype).requires_grad_(), randn(8).requires_grad_()
        y, h = rms_norm(x, scale, residual=x, mask=torch.ones(4, 8) > 0, partial=0.3, variant="llama")
        (y.sum() + h.sum()).backward()
    x, scale = (torch.empty(sizes, device="meta", dtype=dtype, requires_grad=True) for sizes in ((4, 8), 8))
    y, inverse_rms = rms_norm(x, scale, partial=0.3, return_inverse_rms=True)
    assert (y.device.type, y.shape, inverse_rms.shape) == ("meta", (4, 8), (4, 1))
    y.sum().backward()
    assert (x.grad.shape, x.grad.dtype, scale.grad.dtype) == ((4, 8), dtype, dtype)


STORED: dict[str, Callable[[Any], Any]] = {
    "sparse_coo": lambda t: t.to_sparse(),
    "sparse_csr": lambda t: t.to_sparse_csr(),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of PyTorch, about these tensors
@pytest.mark.parametrize("kind", STORED)
def test_what_has_no_memory_of_that_kind_is_refused_by_name(kind: str) -> None:
    """Every argument of every function, and x of a layer that has made such a call before."""
    x, layer = randn(4, 32), RMSNorm(32)
    options, names = {"axis": -1, "feature_axis": (0, 1)}, ("x", "scale", "bias", "gate")
    for function, arguments in ((rms_norm, names), (rms_norm_vjp, ("dy", *names))):
        for name in arguments:
            sentence = rf"{name} f32\[4, 32\] is {kind}, expected a dense tensor; call to_dense\(\) first"
            if kind == "meta":
                sentence = rf"{name} is on the device meta, expected cpu, where x is; load its values first"
                sentence = sentence if name != "x" else "(scale|dy) is on the device cpu, expected meta, where x is"
            with pytest.raises((TypeError, ValueError), match=f"^{function.__name__}: {sentence}"):
                function(**{**dict.fromkeys(arguments, x), name: STORED[kind](x)}, **options)
    layer(layer(x))
    with pytest.raises((TypeError, ValueError), match=r"^rms_norm: (scale is on the device cpu|x f32\[4, 32\] is )"):
        layer(STORED[kind](x))


@pytest.mark.needs("torch>=2.6", "jagged tensors have no rms_norm in 2.5, the built-in one either")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors(layout: Any) -> None:
    """Sequences of different lengths, no padding. PyTorch's stack of encoders makes the strided layout."""
    layer, parts = randomised(RMSNorm(8)), [randn(2, 8), randn(5, 8, seed=1), randn(1, 8, seed=2)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    y = layer(nested)
    (y.values() if layout is torch.jagged else torch.nested.to_padded_tensor(y, 0.0)).square().sum().backward()
    gain, layer.weight.grad = layer.weight.grad, None
    for got, slope, part in zip(y.unbind(), nested.grad.unbind(), parts, strict=True):
        leaf = part.clone().requires_grad_()
        want = layer(leaf)
        want.square().sum().backward()
        assert are_alike(got, want)
        assert are_alike(slope, leaf.grad)
    assert are_alike(gain, layer.weight.grad)
