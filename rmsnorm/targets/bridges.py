"""Turns NumPy arrays into a framework's and back, and differentiates. A framework is imported when it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rmsnorm.frameworks import framework

Array = npt.NDArray[Any]
Function = Callable[[Mapping[str, Any]], Any]


class Bridge(Protocol):
    """The way into a library of arrays, and back.

    Attributes:
        differentiable: whether the library has automatic differentiation.
        compiles: whether it compiles a function again for every new shape.

    ``scope`` is the context of a call (``wide``: some array is float64), ``send`` and ``fetch`` convert an array,
    ``pull`` returns the gradient for every floating-point tensor, by its name, None where there is none.
    """

    differentiable: bool
    compiles: bool

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]: ...
    def send(self, array: Array) -> Any: ...
    def fetch(self, tensor: Any) -> Array: ...
    def pull(self, function: Function, tensors: Mapping[str, Any], dy: Array) -> dict[str, Any]: ...


class NumPy:
    differentiable = False
    compiles = False

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return np.errstate(all="ignore")

    def send(self, array: Array) -> Any:
        return array.copy()

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def pull(self, function: Function, tensors: Mapping[str, Any], dy: Array) -> dict[str, Any]:
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

    def pull(self, function: Function, tensors: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items() if t.is_floating_point()}
        with self.torch.enable_grad():
            y = function({**tensors, **leaves})
        if not y.requires_grad:
            return dict.fromkeys(leaves)
        gradients = self.torch.autograd.grad(y, list(leaves.values()), self.send(dy).to(y.dtype), allow_unused=True)
        return dict(zip(leaves, gradients, strict=True))


class TensorFlow:
    differentiable = True
    compiles = False

    def __init__(self, device: str = "cpu") -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        self.tf, self.device = tf, "/GPU:0" if device == "cuda" else "/CPU:0"

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        return self.tf.device(self.device)

    def send(self, array: Array) -> Any:
        return self.tf.constant(array)

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(self.tf.convert_to_tensor(tensor))

    def pull(self, function: Function, tensors: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        leaves = {name: t for name, t in tensors.items() if t.dtype.is_floating}
        with self.tf.GradientTape() as tape:
            tape.watch(list(leaves.values()))
            y = function(tensors)
        gradients = tape.gradient(y, list(leaves.values()), self.tf.cast(self.send(dy), y.dtype))
        return dict(zip(leaves, gradients, strict=True))


class Jax:
    differentiable = True
    compiles = True

    def __init__(self, device: str = "cpu") -> None:
        import jax

        self.jax, self.device = jax, jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def scope(self, wide: bool) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        stack.enter_context(self.jax.enable_x64(wide))  # float64 only for calls with float64 arrays
        stack.enter_context(self.jax.numpy_dtype_promotion("standard"))
        return stack

    def send(self, array: Array) -> Any:
        return self.jax.device_put(np.ascontiguousarray(array), self.device)

    def fetch(self, tensor: Any) -> Array:
        return np.asarray(tensor)

    def pull(self, function: Function, tensors: Mapping[str, Any], dy: Array) -> dict[str, Any]:
        leaves = {name: t for name, t in tensors.items() if self.jax.numpy.issubdtype(t.dtype, np.floating)}
        y, pull = self.jax.vjp(lambda primals: function({**tensors, **primals}), leaves)
        return dict(pull(self.send(dy).astype(y.dtype))[0])


_BRIDGES: Final[dict[str, Callable[[str], Bridge]]] = {
    "numpy": lambda device: NumPy(),
    "torch": Torch,
    "tf": TensorFlow,
    "flax": Jax,
}


def bridge(name: str, device: str = "cpu") -> Bridge:
    """The bridge to the arrays of a framework, by its key or an alias: numpy, torch, tensorflow, jax, ...

    Raises:
        ValueError: there is no such framework.
    """
    return _BRIDGES[framework("identify", name).key](device)
