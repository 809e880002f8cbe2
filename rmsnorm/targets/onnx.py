"""An ONNX model as a target, run by onnxruntime: its inputs and initializers of the right shape are parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm import errors
from rmsnorm.targets.bridges import NumPy
from rmsnorm.targets.layers import assign
from rmsnorm.targets.target import NoTarget, Target


def open_onnx(path: Path, *, width: int | None = None) -> Target:
    """Open a model whose first input is x and whose first output is y.

    Initializers with more than one element become inputs, so that the gain can be set.

    Raises:
        NoTarget: there is no such file, or it is no ONNX model.
        ModuleNotFoundError: onnx or onnxruntime is not installed.
    """
    try:
        import onnx
        import onnxruntime  # type: ignore[import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        raise errors.missing_framework(str(error.name), "onnx") from None
    if not path.exists():
        raise NoTarget(f"identify: there is no file {path}, expected an ONNX model; check the name")
    try:
        model = onnx.load(path)
        graph = model.graph
    except Exception as error:  # of protobuf
        raise NoTarget(f"identify: {path} is no ONNX model ({type(error).__name__}); check the file") from None
    named = {one.name for one in graph.input}
    for one in graph.initializer:
        if int(np.prod(one.dims)) > 1 and one.name not in named and one.data_type in _NAMES:
            graph.input.append(onnx.helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)))
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    x, *others = [one.name for one in graph.input if one.name not in constants] + [
        one.name for one in graph.input if one.name in constants
    ]
    shapes = {one.name: _sizes(one) for one in graph.input}
    types = {one.name: _NAMES.get(one.type.tensor_type.elem_type, "float32") for one in graph.input}
    roles = assign({name: tuple(size or 0 for size in shapes[name]) for name in others})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4

    @cache
    def session() -> Any:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def call(arguments: Mapping[str, Any]) -> Any:
        given = {x: arguments["x"], **{key: arguments[role] for role, key in roles.items() if role in arguments}}
        for name, array in given.items():
            if array.dtype.name != types[name]:
                raise TypeError(f"{name} is {types[name]} in the model")
        return session().run(None, {**{name: constants[name] for name in others if name in constants}, **given})[0]

    last = shapes[x][-1] if shapes[x] else None
    fixed = next((shapes[roles[role]] for role in ("scale", "bias") if role in roles), ())
    own = {role: tuple(size for size in shapes[key]) for role, key in roles.items()}
    size = last or (int(np.prod([n or 1 for n in fixed])) if fixed and all(fixed) else None)
    return Target(
        str(path), "onnx", NumPy(), call, tuple(roles), width=size,
        shape_of=lambda role, shape: tuple(n or shape[-1] for n in own[role]),
    )  # fmt: skip


_NAMES = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def _sizes(value: Any) -> tuple[int | None, ...]:
    return tuple(one.dim_value or None for one in value.type.tensor_type.shape.dim)
