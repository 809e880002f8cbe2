"""Norms of packages that docs/results.py cannot name as they are: each one calls the function of its package alone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np


def torch_rms_norm(x: Any, weight: Any) -> Any:
    """torch.nn.functional.rms_norm, which wants the shape of the row, too."""
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight)


def equinox_rms_norm(x: Any, weight: Any, bias: Any) -> Any:
    """equinox.nn.RMSNorm, which takes one row."""
    return _of_rows("RMSNorm", x, weight, bias)


def equinox_layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    """equinox.nn.LayerNorm, which takes one row."""
    return _of_rows("LayerNorm", x, weight, bias)


def _of_rows(name: str, x: Any, weight: Any, bias: Any) -> Any:
    import jax

    equinox = importlib.import_module("equinox")
    layer = getattr(equinox.nn, name)(x.shape[-1])
    layer = equinox.tree_at(lambda own: (own.weight, own.bias), layer, (weight, bias))
    return jax.vmap(layer)(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def haiku_rms_norm(x: Any, scale: Any) -> Any:
    """haiku.RMSNorm, which lives in what haiku.transform takes alone."""
    haiku = importlib.import_module("haiku")
    norm = haiku.without_apply_rng(haiku.transform(lambda x: haiku.RMSNorm(-1)(x)))
    return norm.apply({"rms_norm": {"scale": scale}}, x)


def mlx_rms_norm(x: Any, weight: Any) -> Any:
    """mlx.nn.RMSNorm of arrays of NumPy, which has no gradients; float64 holds the numbers of each dtype on the way."""
    mx, nn = (importlib.import_module(name) for name in ("mlx.core", "mlx.nn"))
    own, gain = (mx.array(a.astype("float64"), mx.float64).astype(getattr(mx, a.dtype.name)) for a in (x, weight))
    layer = nn.RMSNorm(x.shape[-1])
    layer.weight = gain
    y = layer(own)
    return np.array(y.astype(mx.float64)).astype(str(y.dtype).rpartition(".")[2])


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
