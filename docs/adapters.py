"""Norms of packages that docs/results.py cannot name as they are: each one calls the function of its package alone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any


def torch_rms_norm(x: Any, weight: Any) -> Any:
    """torch.nn.functional.rms_norm, which wants the shape of the row, too."""
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)


def tokamax_rms_norm(x: Any, scale: Any) -> Any:
    """tokamax.layer_norm without the mean and without an offset, on XLA."""
    tokamax = importlib.import_module("tokamax")
    return tokamax.layer_norm(x, scale, None, subtract_mean=False, implementation="xla")


def mamba_rms_norm_ref(x: Any, weight: Any, bias: Any = None) -> Any:
    """The reference in mamba_ssm/ops/triton/layer_norm.py, from its file: to import the package needs CUDA."""
    return _reference()(x, weight, bias)


@functools.cache
def _reference() -> Any:
    folder = importlib.util.find_spec("mamba_ssm")
    if folder is None or folder.origin is None:
        raise ModuleNotFoundError("mamba_ssm is not installed")
    file = Path(folder.origin).parent / "ops" / "triton" / "layer_norm.py"
    loader = SourceFileLoader("mamba_layer_norm", str(file))
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    return module.rms_norm_ref


def write_onnx(path: Path) -> None:
    """A file with RMSNormalization of opset 23, in float32, of rows of any number and width."""
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, kind, ["rows", "width"]) for name in ("x", "y"))
    weight = helper.make_tensor_value_info("weight", kind, ["width"])
    node = helper.make_node("RMSNormalization", ["x", "weight"], ["y"])
    graph = helper.make_graph([node], "rms_norm", [x, weight], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
