"""An ONNX model as a target, run by onnxruntime: its other inputs and its initializers are the arguments beside x."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.specification import errors
from rmsnorm.targets.arguments import argument_named
from rmsnorm.targets.bridges import Array, NumPy
from rmsnorm.targets.names import assign
from rmsnorm.targets.target import WIDTH, NoTarget, Target


def open_onnx(path: Path, device: str = "cpu") -> Target:
    """Open a model whose first output is y, and whose x is the first input without the name of another argument.

    Initializers with more than one element, and those with the name of a gain or a bias, become inputs, so that these
    can be set. A model for so many rows, as torch.onnx.export writes it, is run for as many batches as a call has, the
    last one filled up. Whether it is a model is for onnxruntime to say: it has operators of its own, also in ONNX's
    domain, that the checker of onnx does not know.

    Raises:
        NoTarget: there is no such file, or it is no ONNX model that onnxruntime runs.
        ModuleNotFoundError: onnx or onnxruntime is not installed.
        ValueError: onnxruntime has no such device.
    """
    if not path.is_file():
        raise NoTarget(f"there is no file {path}, expected an ONNX model; check the name")
    try:
        import onnx
        import onnxruntime  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise errors.missing_framework(str(error.name), "onnx") from None
    providers = {key: name for key, name in _PROVIDERS.items() if name in onnxruntime.get_available_providers()}
    if device not in providers:
        raise errors.not_a_choice("onnx", "device", device, list(providers))
    try:
        return _opened(path, onnx, onnxruntime, providers[device])
    except Exception as error:  # of many types: a file from outside can make its reader raise anything
        reason = " ".join(f"{type(error).__name__}: {_PLACE.sub('', str(error))}".split())
        raise NoTarget(f"{path} is no ONNX model that onnxruntime runs ({reason:.200}); check the file") from None


def _opened(path: Path, onnx: Any, onnxruntime: Any, provider: str) -> Target:
    model = onnx.load(path)
    graph = model.graph
    if not (graph.input and graph.output):
        raise ValueError("it has no input or no output")
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        is_parameter = math.prod(tensor.dims) > 1 or (tensor.dims and argument_named(tensor.name) in ("scale", "bias"))
        if is_parameter and tensor.name not in inputs and tensor.data_type in _DTYPES:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    required = [value.name for value in graph.input if value.name not in constants]
    x, *others = sorted(required, key=lambda name: argument_named(name) is not None)
    others += [value.name for value in graph.input if value.name in constants]
    shapes = {value.name: _sizes(value) for value in graph.input}
    types = {value.name: _DTYPES.get(value.type.tensor_type.elem_type, "float32") for value in graph.input}
    named = {str(argument_named(name)): name for name in reversed(required) if name != x}
    like_x: dict[str, str] = {argument: named[argument] for argument in ("gate", "residual") if argument in named}
    own = assign({name: tuple(size or 0 for size in shapes[name]) for name in others if name not in like_x.values()})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])
    if session.get_providers()[0] != provider:  # onnxruntime goes on without it
        raise ValueError(f"{provider} does not start")

    names = {"x": x, **like_x}
    batch = shapes[x][0] if len(shapes[x]) > 1 else None

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        y, *more = session.run(None, {**{name: constants[name] for name in others if name in constants}, **feeds})
        h = [array for array in more if array.shape == y.shape]  # the mean and 1 / rho have other shapes
        return [y, *h] if "residual" in like_x else [y]

    def call(arrays: Mapping[str, Any]) -> Any:
        feeds = {name: arrays[argument] for argument, name in (own | names).items() if argument in arrays}
        for name, array in feeds.items():
            if array.dtype.name != types[name]:
                raise TypeError(f"{name} is {types[name]} in the model")
        if batch is None:
            results = run(feeds)
        else:
            count = len(arrays["x"])
            rows = {name: feeds[name] for name in names.values() if name in feeds}
            parts = [
                run(feeds | {name: _filled(array[start : start + batch], batch) for name, array in rows.items()})
                for start in range(0, max(1, count), batch)
            ]
            results = [np.concatenate(entries)[:count] for entries in zip(*parts, strict=True)]
        return results[0] if len(results) == 1 else tuple(results)

    last = shapes[x][-1] if shapes[x] else None
    fixed = next((shapes[own[argument]] for argument in ("scale", "bias") if argument in own), ())
    count = math.prod(size or 0 for size in fixed)  # one number goes with any width
    size = last or (count if count > 1 else None)
    few = tuple(size or 4 for size in shapes[x][:-1])
    is_declared = any(shapes[x][:-1]) or len(shapes[x]) == 1
    return Target(
        str(path), "onnx", NumPy(), call, (*own, *like_x), width=size,
        shape_of=lambda argument, shape: tuple(n or shape[-1] for n in shapes[own[argument]]),
        rank=len(shapes[x]) or None, sizes=shapes[x], x_shape=(*few, size or WIDTH) if is_declared else None,
        dtypes={argument: types[name] for argument, name in (own | names).items()},
        required=frozenset({"residual"} & {*like_x}),
    )  # fmt: skip


def _filled(array: Array, size: int) -> Array:
    """So many rows of an array that has fewer."""
    return np.resize(array, (size, *array.shape[1:]))


_PROVIDERS: Final = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# what comes before onnxruntime's message: a number, and the place in its source
_PLACE: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (/onnxruntime_src.*\) (?=[A-Z]))?")
_DTYPES = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def _sizes(value: Any) -> tuple[int | None, ...]:
    return tuple(size.dim_value or None for size in value.type.tensor_type.shape.dim)
