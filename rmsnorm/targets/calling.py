"""Calls a function by the places and names of its parameters, and finds its results: returned, or written in place."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from rmsnorm.targets.arguments import FromCall, Slot
from rmsnorm.targets.bridges import Array, Bridge, Function
from rmsnorm.targets.target import Target

INPUTS: Final = ("scale", "bias", "gate", "mask", "residual")
_EPS: Final = 1e-6
_BUFFERS: Final = ("out", "h_out")
_LIBRARIES: Final = {"torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy", "mlx": "mlx.core"}


@dataclass
class Caller:
    """A function of somebody's as a function of arrays by their names, which returns y, or y and more.

    Attributes:
        function: what is called.
        slots: its parameters, in their order.
        gain_shape: the shape of the gain for a shape of x.
        values: eps and offset, where the caller has chosen them; else those that it must have are 1e-6 and 0.
        in_place: the arguments to which it writes its results, by whether a residual is passed, once a call shows it.
        others: arguments that the caller passes under their own names.
    """

    function: Callable[..., Any]
    slots: Sequence[Slot]
    gain_shape: Callable[[Sequence[int]], tuple[int, ...]]
    values: Mapping[str, float | None] = field(default_factory=dict)
    in_place: dict[bool, tuple[str, ...]] = field(default_factory=dict)
    others: Sequence[str] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of a Target."""
        roles = ["scale" if slot.role == "layer" else slot.role for slot in self.slots]
        return tuple(dict.fromkeys(role for role in roles if role in INPUTS))

    def has(self, *roles: str) -> bool:
        return any(slot.role in roles for slot in self.slots)

    @property
    def optional(self) -> frozenset[str]:
        """The arrays beside x that it may be called without."""
        return frozenset(slot.role for slot in self.slots if not slot.required and slot.role in INPUTS)

    @property
    def required(self) -> frozenset[str]:
        """Which of residual and mask it is not called without."""
        return frozenset(slot.role for slot in self.slots if slot.required and slot.role in ("residual", "mask"))

    @property
    def writes(self) -> bool:
        """Whether its results are not returned, so that there are no gradients."""
        return self.has(*_BUFFERS) or any(self.in_place.values())

    @property
    def asks(self) -> dict[str, bool]:
        """Whether it requires eps, and the number that is added to the gain, by their names, where it takes these."""
        names = {FromCall.EPS: "eps", FromCall.OFFSET: "offset", FromCall.CENTRED: "offset"}
        asked = {names[s.value]: s.required for s in self.slots if s.role == "value" and s.value in list(names)}
        formula = {"eps": True, "offset": True} if self.has("dy") else {"eps": True} if self.has("layer") else {}
        return {**formula, **asked}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was passed without being asked for, as sentences."""
        known = {FromCall.EPS: self.values.get("eps", _EPS), FromCall.OFFSET: self.values.get("offset") or 0.0}
        constants = [
            (slot.key, known.get(slot.value, slot.value)) for slot in self.slots
            if slot.role == "value" and slot.required and slot.key
            and (slot.value in list(known) or not isinstance(slot.value, FromCall))
        ]  # fmt: skip
        notes = tuple(f"{key}={value!r} was passed" for key, value in constants)
        return (*notes, "y was taken from the formula, as it is a backward pass alone") if self.has("dy") else notes

    def with_values(self, **values: float | None) -> Caller:
        return replace(self, values={**self.values, **values})

    def __call__(self, arrays: Mapping[str, Any]) -> Any:
        return self._of_two(arrays) if self.has("k") else self._of_one(arrays)

    def _of_two(self, arrays: Mapping[str, Any]) -> Any:
        """Of q and k: the first and the last rows of x. k and its gain are reversed, so that no gain fits the other."""
        x, scale = arrays["x"], arrays.get("scale")
        axis = -2 if len(x.shape) > 2 else 0
        count = int(x.shape[axis])
        whole = len(x.shape) < 2 or count < 2
        half = count if whole else (count + 1) // 2

        def part(tensor: Any, start: int, end: int) -> Any:
            return tensor[..., start:end, :] if axis == -2 else tensor[start:end]

        q, k = (x, x) if whole else (part(x, 0, half), part(x, count - half, count))
        both = {**arrays, "x": q, "k": _reversed(k)} | ({} if scale is None else {"scale_k": _reversed(scale)})
        y = self._of_one(both)
        if not (isinstance(y, (tuple, list)) and len(y) == 2):
            return y
        end = _reversed(y[1])
        if whole:
            return y[0]
        return _concatenated([y[0], part(end, 2 * half - count, half)], axis)

    def _of_one(self, arrays: Mapping[str, Any]) -> Any:
        if any(self.in_place.values()):  # nothing can be written where elements share memory
            arrays = {name: _copy(array) if name in ("x", "residual") and _overlaps(array) else array
                      for name, array in arrays.items()}  # fmt: skip
        x, buffers = arrays["x"], {}
        gain = self.gain_shape(x.shape) if arrays.get("scale") is None else tuple(arrays["scale"].shape)
        positional: list[Any] = []
        named: dict[str, Any] = {name: arrays[name] for name in self.others}
        for slot in self.slots:
            if slot.role in _BUFFERS:
                value = buffers[slot.role] = _empty(x)
            elif slot.role == "layer":
                value = SimpleNamespace(weight=arrays.get("scale"), bias=None)
                value.eps = value.variance_epsilon = self._eps(x)
            elif slot.role != "value":
                value = arrays.get(slot.role)
                if value is None and slot.key:
                    continue
            elif not slot.required and self._chosen(slot.value) not in self.values:
                continue
            else:
                value = self._value(slot.value, x, gain)
            if slot.key:
                named[slot.key] = value
            else:
                positional.append(value)
        return self._settled(arrays, buffers, lambda: self.function(*positional, **named))

    def _settled(self, arrays: Mapping[str, Any], buffers: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """The result, or the arrays that were written to; x and the others get their numbers back."""
        mode, whole = "residual" in arrays, "h_out" in buffers or (buffers and "residual" not in self.required)
        writable = {name: arrays[name] for name in ("x", "k", "residual") if _is_writable(arrays.get(name))}
        if whole or not writable or self.in_place.get(mode) == ():
            result = run()
            return _joined(_items(result), buffers) if buffers else result
        before = {name: _copy(tensor) for name, tensor in writable.items()}
        result = run()
        if result is not None and not ("residual" in self.required or buffers):
            self.in_place[mode] = ()
            return result
        items = _items(result) if "out" not in buffers else []
        if result is None and not buffers and "residual" in self.required:  # both results must be somewhere
            self.in_place[mode] = ("x", "residual")
        written = self.in_place.get(mode)
        if written is None:
            written = tuple(name for name, tensor in writable.items() if not _same(tensor, before[name]))
            if all(bool((tensor != 0).any()) for tensor in before.values()):  # else a sum may change nothing
                self.in_place[mode] = written
        whole = len(items) < 2 or sum(any(_is_one(item, writable[name]) for item in items) for name in written) == 2
        if not (buffers or (written and whole)):
            if mode in self.in_place:
                self.in_place[mode] = ()
            return result
        copies = {name: _copy(writable[name]) for name in written}
        returned = [name for item in items for name in written if _is_one(item, writable[name])]
        items = [next((copies[n] for n in written if _is_one(item, writable[n])), item) for item in items]
        if len(items) < 2:  # what was written and is not returned comes after it
            items += [copies[name] for name in written if name not in returned]
            returned = list(written)
        for name in returned:
            writable[name][...] = before[name]
        return _joined(items, buffers)

    @staticmethod
    def _chosen(value: Any) -> str:
        return "eps" if value is FromCall.EPS else "offset"

    def _eps(self, x: Any) -> float:
        eps = self.values.get("eps", _EPS)
        return float(np.finfo("float64" if "float64" in str(x.dtype) else "float32").eps) if eps is None else eps

    def _value(self, value: Any, x: Any, gain: tuple[int, ...]) -> Any:
        width = math.prod(self.gain_shape(x.shape))
        known: dict[Any, Callable[[], Any]] = {
            FromCall.GAIN_SHAPE: lambda: gain,
            FromCall.WIDTH: lambda: width,
            FromCall.ROWS: lambda: math.prod(x.shape) // max(1, width),
            FromCall.EPS: lambda: self._eps(x),
            FromCall.OFFSET: lambda: float(self.values.get("offset") or 0.0),
            FromCall.CENTRED: lambda: bool(self.values.get("offset")),
        }
        return known[value]() if isinstance(value, FromCall) else value


def with_values(target: Target, *, optional: bool = False, **values: float | None) -> Target:
    """The target called with this eps or offset, where it requires it; or wherever it takes it, with ``optional``."""
    chosen = {name: value for name, value in values.items() if target.asks.get(name, False) or
              (optional and name in target.asks)}  # fmt: skip
    if not chosen or target.remade is None:
        return target
    fresh = target.remade(chosen)
    return replace(
        target, function=fresh.function, derivatives=fresh.derivatives, shape_of=fresh.shape_of, notes=fresh.notes,
        training=fresh.training, resized=fresh.resized, remade=fresh.remade, probe=fresh.probe,
    )  # fmt: skip


def backward_pass(caller: Caller, bridge: Bridge) -> tuple[Function, Callable[[Mapping[str, Array], Array], Any]]:
    """y by the formula, and the gradients by the function of somebody's, which is a backward pass alone."""

    def inverse_rms(x: Array) -> Array:
        wide = x.astype(np.float64)
        mean = (wide * wide).mean(axis=-1, keepdims=True)
        eps = caller.values.get("eps", _EPS)
        return 1 / np.sqrt(mean + (np.finfo(np.float32).eps if eps is None else eps))

    def y(tensors: Mapping[str, Any]) -> Any:
        arrays = {name: bridge.fetch(tensor) for name, tensor in tensors.items()}
        x, gain = arrays["x"], arrays.get("scale", np.ones(1)).astype(np.float64)
        normalised = x.astype(np.float64) * inverse_rms(x) * (gain + (caller.values.get("offset") or 0.0))
        return bridge.send((normalised + arrays.get("bias", np.zeros(1)).astype(np.float64)).astype(x.dtype))

    shapes: list[Callable[[Array], Array]] = [lambda r: r[..., 0], lambda r: r, lambda r: r.reshape(-1)]

    def derivatives(arrays: Mapping[str, Array], dy: Array) -> Mapping[str, Array | None]:
        x = arrays["x"]
        wide = "float64" if x.dtype == np.float64 else "float32"
        r = inverse_rms(x).astype(wide)
        failure: Exception | None = None
        for shape in list(shapes):
            sent = {name: bridge.send(array) for name, array in {**arrays, "dy": dy, "inverse_rms": shape(r)}.items()}
            try:
                result = caller(sent)
            except Exception as error:  # it may take 1 / rho in another shape
                failure = failure or error
                continue
            shapes[:] = [shape]
            break
        else:
            assert failure is not None  # noqa: S101  (no shape was taken)
            raise failure
        every = result if isinstance(result, (tuple, list)) else (result,)
        rest = [bridge.fetch(tensor) for tensor in every if isinstance(tensor, bridge.array)]
        gradients: dict[str, Array | None] = {}
        for name in ("x", *(argument for argument in caller.arguments if argument in arrays)):
            index = next((n for n, array in enumerate(rest) if array.shape == arrays[name].shape), None)
            gradients[name] = None if index is None else rest.pop(index)
        return gradients

    return y, derivatives


def _items(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]


def _joined(items: list[Any], buffers: Mapping[str, Any]) -> Any:
    """y, or a tuple of y and more: an array for y comes first, one for x + residual after y."""
    first, rest = ([buffers["out"]], items) if "out" in buffers else (items[:1], items[1:])
    every = [*first, *(array for role, array in buffers.items() if role != "out"), *rest]
    return every[0] if len(every) == 1 else tuple(every) or None


def _is_writable(tensor: Any) -> bool:
    kind = type(tensor).__module__.partition(".")[0]
    return kind == "numpy" or (kind == "torch" and not tensor.requires_grad)


def _copy(tensor: Any) -> Any:
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()


def _overlaps(tensor: Any) -> bool:
    strides = tensor.stride() if callable(getattr(tensor, "stride", None)) else tensor.strides
    return any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.tobytes() == other.tobytes()
    raw = [tensor.contiguous().view(-1).view(_module(tensor).uint8) for tensor in (one, other)]
    return bool((raw[0] == raw[1]).all())


def _is_one(item: Any, tensor: Any) -> bool:
    """Whether a result is an argument: an operator of PyTorch returns another object with its memory."""
    return item is tensor or (hasattr(item, "data_ptr") and hasattr(tensor, "data_ptr") and item.numel() > 0
                              and item.data_ptr() == tensor.data_ptr())  # fmt: skip


def _empty(x: Any) -> Any:
    """An array in which a result is expected, full of NaN."""
    return x.new_full(tuple(x.shape), math.nan) if hasattr(x, "new_full") else np.full(x.shape, math.nan, x.dtype)


def _module(tensor: Any) -> Any:
    name = type(tensor).__module__.partition(".")[0]
    return importlib.import_module(_LIBRARIES.get(name, name))


def _reversed(tensor: Any) -> Any:
    """Along the last axis, in memory of its own where it can be written to."""
    if hasattr(tensor, "flip"):
        return tensor.flip(-1)
    return tensor[..., ::-1].copy() if isinstance(tensor, np.ndarray) else tensor[..., ::-1]


def _concatenated(parts: list[Any], axis: int) -> Any:
    module = _module(parts[0])
    join = module.concatenate if hasattr(module, "concatenate") else module.concat
    return join(parts, axis)
