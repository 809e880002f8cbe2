"""Turns NumPy arrays into a framework's and back, and differentiates. A framework is imported when it is used."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import framework, imported

Array = npt.NDArray[Any]
Tensors = Mapping[str, Any]
Function = Callable[[Tensors], Any]
Outputs = Callable[[Tensors], Sequence[Any]]
_ALIGNED: Final = 16  # bytes that a wide load reads
Back = Callable[[Sequence[Any]], Mapping[str, Any]]
Pulled = tuple[Sequence[Any], dict[str, Any]]


class Bridge:
    """The way into a library of arrays, and back.

    Attributes:
        differentiable: whether the library has automatic differentiation.
        compiles: whether it compiles a function again for every new shape.
        strided: whether ``send`` keeps the strides of an array: the order of its axes in memory, gaps, repeats.
        mutable: whether an array may be written to.
        array: the class of its arrays.
        modes: contexts in which a call must give the same, by their names.
    """

    differentiable = True
    compiles = False
    strided = False
    mutable = False
    array: type
    modes: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = MappingProxyType({})

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        """The context of a call; ``wide``: some array is float64."""
        return contextlib.nullcontext()

    def precision(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        """The same of a call of this package, which needs nothing else of a scope."""
        return self.scope(wide)

    send: Callable[[Array], Any]  # the library's array
    fetch: Callable[[Any], Array]  # an array of the library in NumPy
    overwrite: Callable[[Any, Array], None]  # writes numbers to a library's array, where it is mutable
    is_floating: Callable[[Any], bool]
    push: Callable[[Outputs, Tensors, Tensors], Any]  # the derivative of the first result along tangents

    def linear(self, function: Function, tensors: Tensors, leaves: Collection[str]) -> tuple[Any, Back]:
        """What a function returns, and what turns cotangents into the gradient for each leaf, by its name.

        Of results that have no cotangent, or None, no gradient counts. A gradient is None where there is none.
        """
        raise NotImplementedError

    def pull(self, function: Outputs, tensors: Tensors, cotangents: Sequence[Any]) -> Pulled:
        """The results of a function, and the gradient for every floating-point tensor, by its name."""
        outputs, back = self.linear(function, tensors, [name for name, t in tensors.items() if self.is_floating(t)])
        return outputs, dict(back(cotangents))

    def compiled(self, function: Function) -> Function:
        """The function as the library's compiler makes it."""
        raise errors.out_of_domain("check", "compiled", True, "a framework with a compiler for a function", "drop it")


class NumPy(Bridge):
    differentiable = False
    strided = mutable = True
    array = np.ndarray

    def __init__(self, device: str = "cpu") -> None:
        _require("numpy", device, False)

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def send(self, array: Array) -> Any:
        backwards = tuple(slice(None, None, -1 if stride < 0 else 1) for stride in array.strides)
        memory, first, strides = _memory(array[backwards])
        sent = np.lib.stride_tricks.as_strided(memory[first:], array.shape, strides)[backwards]
        sent.flags.writeable = array.flags.writeable
        return sent

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def overwrite(self, tensor: Any, array: Array) -> None:
        tensor[...] = array


class Torch(Bridge):
    strided = mutable = True

    def __init__(self, device: str = "cpu") -> None:
        import torch

        _require("torch", device, torch.cuda.is_available())
        self.torch, self.device, self.array = torch, device, torch.Tensor

    @contextlib.contextmanager
    def scope(self, wide: bool) -> Iterator[None]:
        """Without the modes that the caller may be in."""
        with (
            self.torch.inference_mode(False),
            self.torch.set_grad_enabled(True),
            self.torch.autograd.set_detect_anomaly(False),  # which takes a NaN for an error
            self.torch.autocast(self.torch.device(self.device).type, enabled=False),
        ):
            yield

    def send(self, array: Array) -> Any:
        memory, first, strides = _memory(array)
        half = array.dtype == ml_dtypes.bfloat16
        tensor = self.torch.from_numpy(memory.view(np.int16) if half else memory).to(self.device)
        tensor = tensor.view(self.torch.bfloat16) if half else tensor
        return tensor.as_strided(array.shape, [stride // array.itemsize for stride in strides], first)

    def fetch(self, tensor: Any) -> Array:
        tensor = tensor.detach().cpu().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if not name.startswith(("bfloat16", "float8", "float4")):
            return tensor.numpy()
        bits = tensor.view(self.torch.int16 if name == "bfloat16" else self.torch.uint8).numpy()
        return bits if name.endswith("x2") else bits.view(getattr(ml_dtypes, name))  # of two in a byte, the bytes

    @property
    def modes(self) -> Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]]:  # type: ignore[override]
        kind = torch_device(self.device)
        return {
            "no_grad": self.torch.no_grad, "inference": self.torch.inference_mode,
            "autocast": lambda: self.torch.autocast(kind, dtype=self.torch.bfloat16),
            "deterministic": self._deterministic,
        }  # fmt: skip

    @contextlib.contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Tensors that nobody has written to are full of NaN there."""
        torch = self.torch
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

    def overwrite(self, tensor: Any, array: Array) -> None:
        with self.torch.no_grad():
            tensor.copy_(self.send(array))

    def is_floating(self, tensor: Any) -> bool:
        return bool(tensor.is_floating_point())

    def linear(self, function: Function, tensors: Tensors, leaves: Collection[str]) -> tuple[Any, Back]:
        inputs = {name: tensors[name].detach().requires_grad_() for name in leaves}

        def run() -> Any:
            with self.torch.enable_grad():
                return function({**tensors, **inputs})

        def gradients(result: Any, cotangents: Sequence[Any], *, kept: bool) -> Mapping[str, Any]:
            pairs = [(y, dy.to(y.dtype)) for y, dy in zip(_listed(result), cotangents, strict=False)
                     if dy is not None and y.requires_grad]  # fmt: skip
            if not pairs:
                return dict.fromkeys(inputs)
            ys, dys = zip(*pairs, strict=True)
            leaves = list(inputs.values())
            return dict(zip(inputs, self.torch.autograd.grad(ys, leaves, dys, kept, allow_unused=True), strict=True))

        def back(cotangents: Sequence[Any]) -> Mapping[str, Any]:
            try:
                return gradients(result, cotangents, kept=True)
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
            # What torch.compile made can be differentiated once: each backward pass gets a call of its own.
            return gradients(run(), cotangents, kept=False)

        result = run()
        return result, back

    def push(self, function: Outputs, tensors: Tensors, tangents: Tensors) -> Any:
        modes = self.torch.autograd.forward_ad
        with modes.dual_level():
            dual = {name: modes.make_dual(tensors[name].contiguous(), t) for name, t in tangents.items()}
            return modes.unpack_dual(function({**tensors, **dual})[0]).tangent

    def compiled(self, function: Function) -> Function:
        self.torch.compiler.reset()
        return self.torch.compile(function)  # type: ignore[no-any-return, unused-ignore]


class TensorFlow(Bridge):
    def __init__(self, device: str = "cpu") -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        _require("tf", device, bool(tf.config.list_physical_devices("GPU")))
        self.tf, self.device = tf, "/GPU:0" if device == "cuda" else "/CPU:0"
        self.array = tf.Tensor

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return self.tf.device(self.device)

    def send(self, array: Array) -> Any:
        return self.tf.constant(array)

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(self.tf.convert_to_tensor(tensor))

    def is_floating(self, tensor: Any) -> bool:
        return bool(tensor.dtype.is_floating)

    def linear(self, function: Function, tensors: Tensors, leaves: Collection[str]) -> tuple[Any, Back]:
        inputs = {name: tensors[name] for name in leaves}
        with self.tf.GradientTape(persistent=True) as tape:
            tape.watch(list(inputs.values()))
            result = function(tensors)

        def back(cotangents: Sequence[Any]) -> Mapping[str, Any]:
            pairs = [(y, self.tf.cast(dy, y.dtype)) for y, dy in zip(_listed(result), cotangents, strict=False)
                     if dy is not None]  # fmt: skip
            ys, dys = zip(*pairs, strict=True)
            return dict(zip(inputs, tape.gradient(list(ys), list(inputs.values()), list(dys)), strict=True))

        return result, back

    def push(self, function: Outputs, tensors: Tensors, tangents: Tensors) -> Any:
        pairs = [(tensors[name], t) for name, t in tangents.items()]
        with self.tf.autodiff.ForwardAccumulator(*zip(*pairs, strict=True)) as accumulator:
            y = function(tensors)[0]
        return accumulator.jvp(y)

    def compiled(self, function: Function) -> Function:
        return self.tf.function(function)  # type: ignore[no-any-return, unused-ignore]


class Jax(Bridge):
    compiles = True

    def __init__(self, device: str = "cpu") -> None:
        import jax

        _require("flax", device, any(entry.platform == "gpu" for entry in jax.devices()))
        self.precision = importlib.import_module("rmsnorm.flax_impl.private").enable_x64  # type: ignore[method-assign]
        self.jax, self.device = jax, jax.devices("gpu" if device == "cuda" else "cpu")[0]
        self.array = jax.Array

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(self.precision(wide))  # float64 only for calls with float64 arrays
        stack.enter_context(self.jax.numpy_dtype_promotion("standard"))
        return stack

    def send(self, array: Array) -> Any:
        return self.jax.device_put(np.asarray(array, order="C"), self.device)  # of no axis, too

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def is_floating(self, tensor: Any) -> bool:
        return bool(self.jax.numpy.issubdtype(tensor.dtype, np.floating))

    def linear(self, function: Function, tensors: Tensors, leaves: Collection[str]) -> tuple[Any, Back]:
        def listed(primals: Tensors) -> tuple[list[Any], Any]:
            result = function({**tensors, **primals})
            arrays = [y for y in _listed(result) if isinstance(y, self.array) and self.is_floating(y)]
            return arrays, result

        inputs = {name: tensors[name] for name in leaves}
        ys, pull, result = self.jax.vjp(listed, inputs, has_aux=True)

        def back(cotangents: Sequence[Any]) -> Mapping[str, Any]:
            wanted = [*cotangents, *[None] * len(ys)]
            dys = [self.jax.numpy.zeros_like(y) if dy is None else dy.astype(y.dtype)
                   for y, dy in zip(ys, wanted, strict=False)]  # fmt: skip
            return dict(pull(dys)[0])

        return result, back

    def push(self, function: Outputs, tensors: Tensors, tangents: Tensors) -> Any:
        every = {name: tangents.get(name, self.jax.numpy.zeros_like(t)) for name, t in tensors.items()}
        return self.jax.jvp(lambda primals: function(primals)[0], (tensors,), (every,))[1]

    def compiled(self, function: Function) -> Function:
        return self.jax.jit(function)  # type: ignore[no-any-return, unused-ignore]


def _listed(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else [result]


def torch_device(device: str) -> str:
    """The kind of a device: cuda of cuda:0."""
    return device.partition(":")[0]


def _require(name: str, device: str, has_gpu: bool) -> None:
    known = ["cpu", *(["cuda"] if has_gpu else [])]
    if device not in known:
        raise errors.not_a_choice(name, "device", device, known)


def _memory(array: Array) -> tuple[Array, int, tuple[int, ...]]:
    """A copy of an array's memory, flat; where the array begins in it, in elements; and its strides.

    It has room for a dense array of the shape, so that code which ignores the strides reads no foreign memory. An array
    that does not begin at a multiple of 16 bytes begins where that is so in the copy, too.
    """
    strides = array.strides if min(array.strides, default=0) >= 0 else array.copy().strides
    first = array.ctypes.data % _ALIGNED // array.itemsize if array.size else 0
    last = sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True)) // array.itemsize
    room = np.zeros(first + max(last + 1, array.size) + _ALIGNED if array.size else 0, array.dtype)
    start = -room.ctypes.data % _ALIGNED // array.itemsize
    memory = room[start:] if array.size else room
    np.lib.stride_tricks.as_strided(memory[first:], array.shape, strides)[...] = array
    return memory, first, strides


_BRIDGES: Final[dict[str, Callable[[str], Bridge]]] = {"numpy": NumPy, "torch": Torch, "tf": TensorFlow, "flax": Jax}


def bridge(name: str, device: str = "cpu") -> Bridge:
    """The bridge to the arrays of a framework, by its key or an alias: such as numpy or tensorflow.

    Raises:
        ValueError: there is no such framework, or it has no such device.
        ModuleNotFoundError: it is not installed.
    """
    key = framework("bridge", name).key
    with imported(key):
        return _BRIDGES[key](device)
