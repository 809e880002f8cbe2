"""Calls a function by the places and names of its parameters; its results are returned, or written to arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from rmsnorm.targets.arguments import BUFFERS, FromCall, Slot
from rmsnorm.targets.target import Target

_INPUTS: Final = ("scale", "bias", "gate", "mask", "residual")
_EPS: Final = 1e-6
_CHOSEN: Final = {FromCall.EPS: "eps", FromCall.OFFSET: "offset", FromCall.CENTRED: "offset"}  # the names of values


@dataclass
class Caller:
    """A function of somebody's as a function of arrays by their names, which returns y, or y and more.

    Attributes:
        function: what is called.
        slots: its parameters, in their order.
        gain_shape: the shape of the gain for a shape of x.
        values: eps and offset, where the caller has chosen them; else those that it must have are 1e-6 and 0.
    """

    function: Callable[..., Any]
    slots: Sequence[Slot]
    gain_shape: Callable[[Sequence[int]], tuple[int, ...]]
    values: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of a Target."""
        return tuple(dict.fromkeys(slot.role for slot in self.slots if slot.role in _INPUTS))

    @property
    def optional(self) -> frozenset[str]:
        """The arrays beside x that it may be called without."""
        return frozenset(slot.role for slot in self.slots if not slot.required and slot.role in _INPUTS)

    @property
    def required(self) -> frozenset[str]:
        """Which of residual and mask it is not called without."""
        return frozenset(slot.role for slot in self.slots if slot.required and slot.role in ("residual", "mask"))

    @property
    def writes(self) -> bool:
        """Whether it writes its results to arguments, so that there are no gradients."""
        return any(slot.role in BUFFERS or slot.writes for slot in self.slots)

    @property
    def asks(self) -> dict[str, bool]:
        """Whether it requires eps, and the number that is added to the gain, by their names, where it takes these."""
        chosen = [(_CHOSEN.get(slot.value), slot.required) for slot in self.slots if isinstance(slot.value, FromCall)]
        return {name: required for name, required in chosen if name}

    @property
    def notes(self) -> tuple[str, ...]:
        """What was passed without being asked for, as sentences."""
        known = {FromCall.EPS: self.values.get("eps", _EPS), FromCall.OFFSET: self.values.get("offset") or 0.0}
        slots = [slot for slot in self.slots if slot.role == "value" and slot.required and slot.key]
        constants = [(slot.key, slot.value) for slot in slots if not isinstance(slot.value, FromCall)]
        chosen = [(slot.key, known[slot.value]) for slot in slots if slot.value in [*known]]
        return tuple(f"{key}={value!r} was passed" for key, value in constants + chosen)

    def with_values(self, **values: float | None) -> Caller:
        return replace(self, values={**self.values, **values})

    def __call__(self, arrays: Mapping[str, Any]) -> Any:
        x, written, before = arrays["x"], {}, {}
        gain = self.gain_shape(x.shape) if arrays.get("scale") is None else tuple(arrays["scale"].shape)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for slot in self.slots:
            if slot.role in BUFFERS:
                value = written[slot.role] = _empty(x)
            elif slot.role != "value":
                value = arrays.get(slot.role)
                if value is None and slot.key:
                    continue
                if slot.writes:  # nothing can be written where elements share memory
                    value = written[slot.writes] = _copy(value) if _overlaps(value) else value
                    before[slot.writes] = _copy(value)
            elif not slot.required and "eps" not in self.values:
                continue
            else:
                value = self._value(slot.value, x, gain)
            if slot.key:
                named[slot.key] = value
            else:
                positional.append(value)
        result = self.function(*positional, **named)
        if not written:
            return result
        items = list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
        items = [item for item in items if not any(_is_one(item, array) for array in written.values())]
        for role, numbers in before.items():  # an argument gets its numbers back
            array, written[role] = written[role], _copy(written[role])
            array[...] = numbers
        return _joined(items, written)

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
        target, function=fresh.function, shape_of=fresh.shape_of, notes=fresh.notes,
        training=fresh.training, resized=fresh.resized, remade=fresh.remade, probe=fresh.probe,
    )  # fmt: skip


def _joined(items: list[Any], buffers: Mapping[str, Any]) -> Any:
    """y, or a tuple of y and more: an array for y comes first, one for x + residual after y."""
    first, rest = ([buffers["out"]], items) if "out" in buffers else (items[:1], items[1:])
    every = [*first, *(array for role, array in buffers.items() if role != "out"), *rest]
    return every[0] if len(every) == 1 else tuple(every) or None


def _copy(tensor: Any) -> Any:
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()


def _overlaps(tensor: Any) -> bool:
    strides = tensor.stride() if hasattr(tensor, "stride") else getattr(tensor, "strides", ())
    return any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=False))


def _is_one(item: Any, tensor: Any) -> bool:
    """Whether a result is an argument: an operator of PyTorch returns another object with its memory."""
    return item is tensor or (hasattr(item, "data_ptr") and hasattr(tensor, "data_ptr") and item.numel() > 0
                              and item.data_ptr() == tensor.data_ptr())  # fmt: skip


def _empty(x: Any) -> Any:
    """An array in which a result is expected, full of NaN."""
    return x.new_full(tuple(x.shape), math.nan) if hasattr(x, "new_full") else np.full(x.shape, math.nan, x.dtype)
