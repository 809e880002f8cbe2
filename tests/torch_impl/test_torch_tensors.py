"""Tensors of every kind, in every mode: the numbers of plain tensors, the inputs as they were, never a crash.

A call is drawn with x, the gain, the mask, the residual and the gradients stored in different ways or of one subclass,
and made in one of PyTorch's modes. Outputs and gradients, by autograd and by the formula, are those that the same call
has on plain tensors without a mode, which other tests compare with the golden.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.testing._internal.logging_tensor import LoggingTensor  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_arrays import are_alike  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402


class Subclass(torch.Tensor):
    pass


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Overridden(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def imaginary(t: Any) -> Any:
    """A real tensor with the negative bit; 16 bits have no complex numbers, and get the bit directly."""
    if t.dtype != torch.float32:
        return torch._neg_view(-t)
    return torch.complex(torch.zeros_like(t), -t).conj().imag


def shifted(t: Any, start: int) -> Any:
    """In the middle of other memory, from that byte on."""
    memory = bytearray(start + t.numel() * t.element_size())
    view = torch.frombuffer(memory, dtype=t.dtype, offset=start, count=t.numel()).view(t.shape)
    return view.copy_(t)


def in_inference(t: Any) -> Any:
    with torch.inference_mode():
        return t.clone()


def zeros(t: Any) -> Any:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def functional(t: Any) -> Any:
    return torch._to_functional_tensor(t.clone())


VIEWS: list[Callable[[Any], Any]] = [
    lambda t: t.repeat_interleave(2, -1)[..., ::2],
    lambda t: t.mT.clone().mT if t.ndim > 1 else t.clone(),
    lambda t: t[..., :1].expand(t.shape),
    lambda t: shifted(t, 1),  # no element is where the processor would put it
    lambda t: shifted(t, 24),
]
NUMBERS = [
    *VIEWS,
    imaginary,
    in_inference,
    lambda t: torch._neg_view(-t),
    zeros,
    lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
    lambda t: torch.nn.Buffer(t.clone()),
    lambda t: t.clone().share_memory_(),
    functional,
]
SUBCLASSES: list[Callable[[Any], Any]] = [
    lambda t: t.clone().as_subclass(Subclass),
    lambda t: TwoTensor(t.clone(), t.clone()),
    lambda t: LoggingTensor(t.clone()),
]
MODES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "dispatch": Dispatched,
    "function": Overridden,
    "flops": lambda: FlopCounterMode(display=False),
    "saved": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "anomaly": torch.autograd.detect_anomaly,
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def plain(t: Any) -> Any:
    """Its numbers, in an ordinary tensor of its own."""
    t = t.a if isinstance(t, TwoTensor) else t.elem if isinstance(t, LoggingTensor) else t
    t = torch._from_functional_tensor(t) if torch._is_functional_tensor(t) else t
    with torch._C.DisableTorchFunctionSubclass():
        return torch.zeros(t.shape, dtype=t.dtype).copy_(t.detach())


def results(tensors: dict[str, Any], options: Any, mode: Callable[[], Any]) -> list[Any]:
    x, gain, residual, mask, *upstream = (tensors.get(name) for name in ("x", "gain", "residual", "mask", "dy", "dh"))
    upstream = upstream[: 1 if residual is None else 2]
    with warnings.catch_warnings(action="ignore"), mode():
        outputs = rms_norm(x, gain, residual=residual, mask=mask, **options)
        dy = tuple(upstream) if residual is not None else upstream[0]
        gradients = list(rms_norm_vjp(dy, x, gain, residual=residual, mask=mask, **options))
        if torch.is_grad_enabled() and not any(t.is_inference() for t in tensors.values()):
            leaves = [t.detach().requires_grad_() for t in (x, gain, residual) if t is not None]
            y = rms_norm(*leaves[:2], residual=leaves[2] if leaves[2:] else None, mask=mask, **options)
            gradients += torch.autograd.grad(y, leaves, upstream)
        outputs = [*outputs] if isinstance(outputs, tuple) else [outputs]
    return [plain(t) for t in (*outputs, *gradients) if t is not None]


@pytest.mark.needs("torch>=2.6", "in 2.5 a mode cannot make a subclass of Tensor of a tensor that has a Python object")
@pytest.mark.parametrize("mode", MODES)
def test_any_tensor_in_any_mode(mode: str) -> None:
    random = np.random.default_rng(list(MODES).index(mode))
    chosen = lambda items: items[random.integers(len(items))]  # noqa: E731
    for _ in range(20):
        dtype, axis = chosen([torch.float32, torch.bfloat16, torch.float16]), int(chosen([-1, 0]))
        shape = chosen([(3, 8), (2, 3, 6), (1, 1), (4, 33), (5,)])
        options = {"variant": str(chosen(["llama", "gemma", "keras", "x_transformers"])), "axis": axis}
        shapes = {"x": shape, "gain": (shape[axis],), "dy": shape}
        if random.random() < 0.4:
            shapes |= {"residual": shape, "dh": shape}
        subclass = chosen(SUBCLASSES)
        # PyTorch itself has no product of a TwoTensor and zeros that are not stored, and no view in inference mode of a
        # functional tensor that was made outside
        without = [zeros] * (subclass is SUBCLASSES[1]) + [functional] * (mode == "inference")
        numbers = [store for store in NUMBERS if store not in without]
        tensors = {}
        for name, sizes in shapes.items():
            stored = chosen([lambda t: t, chosen(numbers), subclass])
            tensors[name] = stored(torch.from_numpy(random.normal(size=sizes)).to(dtype))
        if random.random() < 0.3:
            tensors["mask"] = chosen(VIEWS)(torch.from_numpy(random.random(shape) < 0.8))
        before = {name: plain(t) for name, t in tensors.items()}
        got, want = results(tensors, options, MODES[mode]), results(before, options, contextlib.nullcontext)
        assert len(got) >= len(shapes) - ("residual" in shapes)
        for tensor, expected in zip(got, want, strict=False):  # some modes have no gradients by autograd
            largest = max(float(expected.abs().max()), 1.0)  # where all terms cancel, they are about 1
            ends = torch.tensor([largest], dtype=expected.dtype)
            alike = are_alike(torch.cat([tensor.flatten(), ends]), torch.cat([expected.flatten(), ends]))
            assert alike, (options, dtype, shape, tensors)
            assert tensor.dtype == expected.dtype
        assert all(torch.equal(plain(t), before[name]) for name, t in tensors.items())


def test_memory_that_was_freed() -> None:
    """As of a parameter of FSDP outside of a forward pass; to read it would end the process."""
    freed = torch.ones(4, 8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"shape \(4, 8\) has no memory"):
        rms_norm(freed)
    with pytest.raises(ValueError, match="has no memory"):
        rms_norm_vjp(freed, torch.ones(4, 8))


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("device", [default_device, torch.device], ids=["set_default_device", "with"])
@pytest.mark.parametrize("rows", [3, 2**16], ids=["small", "large"])
@pytest.mark.parametrize("axis", [-1, 0], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_where_x_is(device, rows, axis, dtype):
    """With meta as the default device: an allocation there has no memory to write to."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    gain = torch.linspace(0.5, 2, x.shape[axis], dtype=dtype)
    options = {"variant": "x_transformers", "axis": axis}

    def results():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, gain, x)]
        y, h, inverse_rms = rms_norm(*leaves[:2], residual=leaves[2], return_inverse_rms=True, **options)
        gradients = torch.autograd.grad((y, h), leaves, (x, x))
        return [y, h, inverse_rms, *gradients, *rms_norm_vjp(x, x, gain, **options)[:2]]

    want = results()
    with device("meta"):
        got = results()
    for tensor, expected in zip(got, want, strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, expected)


def test_a_layer_on_the_cpu_with_another_default_device():
    layer, x = RMSNorm(8), torch.linspace(-1, 2, 24).reshape(3, 8)
    want = layer(x)
    with torch.device("meta"):
        assert torch.equal(layer(x), want)
        assert layer.to("meta")(x.to("meta")).device.type == "meta"
