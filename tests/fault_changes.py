"""What a fault does to a call: to its arguments, or to what comes back, in arrays of any framework."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any


class Call:
    """A call of what a fault wraps: ``call["x"]`` is an argument, None if it is not passed; ``call(x=y)`` makes it."""

    def __init__(self, function: Callable[..., Any], names: tuple[str, ...], args: Any, options: Any) -> None:
        self.function, self.names, self.args, self.options = function, names, args, options

    def __getitem__(self, name: str) -> Any:
        if name in self.options:
            return self.options[name]
        place = self.names.index(name)
        return self.args[place] if place < len(self.args) else None

    def __call__(self, **changed: Any) -> Any:
        args, options = list(self.args), dict(self.options)
        for name, value in changed.items():
            place = self.names.index(name) if name in self.names else len(args)
            if place < len(args) and name not in options:
                args[place] = value
            else:
                options[name] = value
        return self.function(*args, **options)


def framework(array: Any) -> str:
    kind = type(array).__module__.split(".")[0]
    return {"jaxlib": "jax", "ml_dtypes": "numpy"}.get(kind, kind)


def xp(array: Any) -> Any:
    """The array functions of the framework of an array."""
    names = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax.numpy"}
    return importlib.import_module(names.get(framework(array), "numpy"))


def dtype(array: Any) -> str:
    named = re.search(r"bfloat16|float\d+", str(array.dtype))
    return named[0] if named else ""


def eps(array: Any) -> float:
    """One unit in the last place of 1 in the dtype of an array."""
    return {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}.get(dtype(array), 2.0**-23)


def ulp(array: Any) -> Any:
    """Every number about one unit in the last place further from 0."""
    return (array * (1 + eps(array))) if array is not None else None


def stop(array: Any) -> Any:
    """The array without its gradient."""
    if framework(array) == "torch":
        return array.detach()
    if framework(array) == "tensorflow":
        return xp(array).stop_gradient(array)
    return importlib.import_module("jax").lax.stop_gradient(array)


def slope(array: Any, factor: float) -> Any:
    """The same numbers, whose gradient is multiplied by a factor."""
    return stop(array) + (array - stop(array)) * factor


def _joined(parts: list[Any]) -> Any:
    join = {"torch": "cat", "tensorflow": "concat"}.get(framework(parts[0]), "concatenate")
    return getattr(xp(parts[0]), join)(parts, 0)


def with_first(result: Any, change: Callable[[Any], Any]) -> Any:
    """A result whose first array, y or dx, is changed."""
    return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)


def nth(result: tuple[Any, ...], index: int, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    changed = list(result)
    if index < len(changed) and changed[index] is not None:
        changed[index] = change(changed[index])
    return tuple(changed)


def axes(call: Call, count: int) -> bool:
    return getattr(call["x"], "ndim", len(getattr(call["x"], "shape", ()))) == count


def plain(call: Call) -> bool:
    """Whether x has rows and nothing comes along that has rows, too."""
    others = ("mask", "residual", "gate")
    return len(call["x"].shape) > 1 and all(call[name] is None for name in others if name in call.names)


def traced(call: Call) -> bool:
    """Whether a compiler sees the call."""
    x = call["x"]
    if framework(x) == "torch":
        return bool(importlib.import_module("torch").compiler.is_compiling())
    if framework(x) == "tensorflow":
        return not importlib.import_module("tensorflow").executing_eagerly()
    return isinstance(x, importlib.import_module("jax").core.Tracer)


def without_last_row(call: Call) -> Any:
    """dscale of a product with the Jacobian lacks the last row."""
    result = call()
    if call["scale"] is None or not plain(call) or call["x"].shape[0] < 2:
        return result
    less = call(dy=call["dy"][:-1], x=call["x"][:-1])
    return nth(result, 1, lambda _: less[1])


def gain_misses_last_row(call: Call) -> Any:
    """y is right; in automatic differentiation dscale lacks the last row."""
    x, scale = call["x"], call["scale"]
    rows = x.shape[0] if scale is not None and plain(call) and isinstance(x.shape[0], int) else 0
    if rows < 2 or isinstance(call(), tuple):
        return call()
    return _joined([call(x=x[:-1]), call(x=x[-1:], scale=stop(scale))])


def in_memory(call: Call) -> Any:
    """x that is not dense is read as if it were."""
    x = call["x"]
    if framework(x) != "torch" or traced(call) or x.is_contiguous() or x.layout is not xp(x).strided:
        return call()
    strides, size = [], 1
    for length in reversed(x.shape):
        strides.insert(0, size)
        size *= max(length, 1)
    return call(x=x.as_strided(x.shape, strides))


def writes(call: Call) -> Any:
    y = call()
    x = call["x"]
    if type(x).__name__ == "ndarray" and x.flags.writeable and x.size:
        x.flat[0] = x.flat[0] * (1 + eps(x))
    return y


def flushed(call: Call) -> Any:
    """Subnormal numbers of x count as 0."""
    import numpy as np

    x = call["x"]
    if not isinstance(x, np.ndarray) or dtype(x) != "float32":
        return call()
    return call(x=np.where(abs(x) < 2.0**-126, np.zeros_like(x), x).astype(x.dtype))


def overflows(call: Call) -> Any:
    """The squares of large float32 overflow."""
    y = call()
    x = call["x"]
    if dtype(x) != "float32" or framework(x) not in ("torch", "numpy") or traced(call) or not x.size:
        return y
    large = float(abs(x).max()) > 2.0**64
    return with_first(y, lambda value: value * 0) if large else y


def rounded_twice(call: Call) -> Any:
    """y of bfloat16 is rounded to float32 first, which moves some numbers that lie near the middle of two."""
    y = call()
    if dtype(call["x"]) != "bfloat16" or call["out_dtype"] is not None:
        return y
    narrow = (y[0] if isinstance(y, tuple) else y).dtype
    return with_first(call(out_dtype="float32"), lambda wide: wide.astype(narrow))


def preset(name: str, **fields: Any) -> Callable[[Call], Any]:
    """A preset has another field."""

    def change(call: Call) -> Any:
        variant = call()
        return variant.replace(**fields) if variant.name == name and call["variant"] == name else variant

    return change


def passing(call: Call, when: Callable[[Any], bool]) -> Any:
    """A report without the failures of some comparisons."""
    report = call()
    kept = [record for record in report.run.records if record.passed or not when(record)]
    if all(record.passed for record in kept) and report.run.status == "differs":
        return replaced(report, run=replaced(report.run, records=kept, status="held"))
    return replaced(report, run=replaced(report.run, records=kept))


def with_array(parameters: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Parameters of which the last by name is changed."""
    last = max(parameters)
    return {name: change(array) if name == last else array for name, array in parameters.items()}


def replaced(value: Any, **fields: Any) -> Any:
    from dataclasses import replace

    return replace(value, **fields)


def status(call: Call) -> Any:
    """A command that finds a difference ends with 0."""
    try:
        return call()
    except SystemExit as end:
        raise SystemExit(0 if end.code == 1 else end.code) from None


def double_last(call: Call) -> Any:
    """The last number of the result is doubled."""
    result = call()
    return _joined([result[:-1], result[-1:] * 2])
