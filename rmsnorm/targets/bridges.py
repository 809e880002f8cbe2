"""NumPy arrays into a framework's and back, and its automatic differentiation. A framework is imported when used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Function = Callable[[Mapping[str, Any]], Any]


class Bridge(Protocol):
    """A library.

    Attributes:
        differentiable: whether it has automatic differentiation.
        compiles: whether it compiles for each shape.
    """

    differentiable: bool
    compiles: bool

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]: ...
    def send(self, array: Array) -> Any: ...
    def fetch(self, tensor: Any) -> Array: ...
    def pull(self, function: Function, arguments: Mapping[str, Any], dy: Array) -> dict[str, Any]: ...


class NumPy:
    differentiable = False
    compiles = False

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def send(self, array: Array) -> Any:
        return array.copy()

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def pull(self, function: Function, arguments: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        raise NotImplementedError


class Torch:
    differentiable = True
    compiles = False

    def __init__(self, device: str = "cpu") -> None:
        import torch

        self.torch, self.device = torch, device

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def send(self, array: Array) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(array.view(np.int16).copy()).view(self.torch.bfloat16).to(self.device)
        return self.torch.from_numpy(array.copy()).to(self.device)

    def fetch(self, tensor: Any) -> Array:
        tensor = tensor.detach().cpu().contiguous()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def pull(self, function: Function, arguments: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        wanted = {name: t for name, t in arguments.items() if t.is_floating_point()}
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in wanted.items()}
        with self.torch.enable_grad():
            y = function({**arguments, **leaves})
        if not y.requires_grad:
            return dict.fromkeys(leaves)
        found = self.torch.autograd.grad(y, list(leaves.values()), self.send(dy).to(y.dtype), allow_unused=True)
        return dict(zip(leaves, found, strict=True))


class TensorFlow:
    differentiable = True
    compiles = False

    def __init__(self, device: str = "cpu") -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        self.tf, self.place = tf, "/GPU:0" if device == "cuda" else "/CPU:0"

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return self.tf.device(self.place)

    def send(self, array: Array) -> Any:
        return self.tf.constant(array)

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(self.tf.convert_to_tensor(tensor))

    def pull(self, function: Function, arguments: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        wanted = {name: t for name, t in arguments.items() if t.dtype.is_floating}
        with self.tf.GradientTape() as tape:
            tape.watch(list(wanted.values()))
            y = function(arguments)
        found = tape.gradient(y, list(wanted.values()), self.tf.cast(self.send(dy), y.dtype))
        return dict(zip(wanted, found, strict=True))


class Jax:
    differentiable = True
    compiles = True

    def __init__(self, device: str = "cpu") -> None:
        import jax

        self.jax, self.device = jax, jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(self.jax.enable_x64(wide))  # float64 only where it is asked
        stack.enter_context(self.jax.numpy_dtype_promotion("standard"))
        return stack

    def send(self, array: Array) -> Any:
        return self.jax.device_put(np.ascontiguousarray(array), self.device)

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def pull(self, function: Function, arguments: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        wanted = {name: t for name, t in arguments.items() if self.jax.numpy.issubdtype(t.dtype, np.floating)}
        y, pull = self.jax.vjp(lambda given: function({**arguments, **given}), wanted)
        return dict(pull(self.send(dy).astype(y.dtype))[0])


_BRIDGES: Final[dict[str, Callable[[str], Bridge]]] = {
    "numpy": lambda device: NumPy(),
    "torch": Torch,
    "tensorflow": TensorFlow,
    "jax": Jax,
}


def bridge(library: str, device: str = "cpu") -> Bridge:
    """The way into a library: numpy, torch, tensorflow or jax."""
    return _BRIDGES[library](device)
