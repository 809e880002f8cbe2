"""Files of ONNX as targets: operators of onnxruntime, fixed numbers of rows, and what is no model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rmsnorm import Variant
from rmsnorm.identify import identify
from rmsnorm.parity import check
from rmsnorm.targets import NoTarget, open_target

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; pip install '.[onnx]'")


def test_an_onnx_model(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    gain = onnx.numpy_helper.from_array(np.linspace(0.5, 2, 32, dtype="float32"), "onnx::Mul_7")
    node = helper.make_node("RMSNormalization", ["x", "onnx::Mul_7"], ["y"], epsilon=3e-4)
    shapes = [helper.make_tensor_value_info(name, floats, ["n", 32]) for name in "xy"]
    graph = helper.make_graph([node], "norm", shapes[:1], shapes[1:], [gain])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "norm.onnx")
    identity = identify(str(tmp_path / "norm.onnx"))
    assert identity.recognised, identity.text
    assert (identity["eps"], identity["eps_position"], identity["scale_offset"]) == (3e-4, "inside", 0.0)
    assert identity["rounding"] is None, "it takes float32 only"
    node.output[0] = "h"
    gate = [helper.make_node("Sigmoid", ["gate"], ["f"]), helper.make_node("Mul", ["h", "f"], ["y"])]
    inputs = [*shapes[:1], helper.make_tensor_value_info("gate", floats, ["n", 32])]
    graph = helper.make_graph([node, *gate], "norm", inputs, shapes[1:], [gain])
    onnx.save(helper.make_model(graph, opset_imports=model.opset_import, ir_version=10), tmp_path / "gated.onnx")
    assert identify(str(tmp_path / "gated.onnx"))["gate"] == "sigmoid, after"


def _saved(
    path: Any, operator: str, inputs: list[str], outputs: list[str], ir_version: int = 10, rows: Any = "n",
    **options: Any,
) -> str:  # fmt: skip
    """A file of one operator of onnxruntime, of which inputs with one axis are initializers."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    domain = "com.microsoft" if operator.startswith("Skip") else ""
    node = helper.make_node(operator, inputs, outputs, domain=domain, epsilon=3e-4)
    values = [
        helper.make_tensor_value_info(name, floats, [rows, 32])
        for name in (*inputs, *outputs)
        if name and name not in ("gamma", "beta")
    ]
    vectors = [
        onnx.numpy_helper.from_array(np.linspace(0.5, 2, 32, dtype="float32"), name)
        for name in inputs
        if name in ("gamma", "beta")
    ]
    count = len(inputs) - len(vectors)
    graph = helper.make_graph([node], "norm", values[:count], values[count:], vectors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path, **options)
    return str(path)


def test_operators_of_onnxruntime(tmp_path: Any) -> None:
    """One is in ONNX's domain, where the checker of onnx refuses it; one takes a residual and returns the sum last."""
    path = _saved(tmp_path / "simple.onnx", "SimplifiedLayerNormalization", ["input", "gamma"], ["y"])
    identity = identify(path)
    assert (identity.recognised, identity["eps"], identity["eps_position"]) == (True, 3e-4, "inside"), identity.text
    operator, outputs = "SkipSimplifiedLayerNormalization", ["y", "", "", "sum"]
    path = _saved(tmp_path / "skip.onnx", operator, ["skip", "input", "gamma"], outputs)
    identity = identify(path)
    assert (identity.recognised, identity["eps"], identity["eps_position"]) == (True, 3e-4, "inside"), identity.text
    target = open_target(path)
    assert target.arguments == ("scale", "residual")
    random = np.random.default_rng(0)
    x, residual = (random.normal(size=(4, 32)).astype("float32") for _ in range(2))
    target.forward(x, residual=residual)
    assert target.second is not None
    assert np.array_equal(target.second, x + residual)
    path = _saved(tmp_path / "mean.onnx", "SkipLayerNormalization", ["input", "skip", "gamma", "beta"], ["y"])
    assert open_target(path).arguments == ("scale", "bias", "residual")
    assert "is LayerNorm, not RMSNorm" in identify(path).text


def test_a_fixed_number_of_rows_and_a_residual(tmp_path: Any) -> None:
    """Both results of the batches are put together."""
    path = _saved(tmp_path / "skip.onnx", "SkipSimplifiedLayerNormalization", ["skip", "input", "gamma"],
                  ["y", "", "", "sum"], rows=3)  # fmt: skip
    report = check(path, Variant(name="mine", eps=3e-4), limits={"max_rows": 300})
    assert report.passed, report.details


def test_onnxruntime_decides_what_a_model_is(tmp_path: Any) -> None:
    """Weights may be in a file beside it; the message says why a model does not run."""
    arguments = "RMSNormalization", ["x", "gamma"], ["y"]
    beside = {"save_as_external_data": True, "location": "gains", "size_threshold": 0}
    path = _saved(tmp_path / "beside.onnx", *arguments, **beside)
    assert (tmp_path / "gains").stat().st_size == 32 * 4
    assert identify(path)["eps"] == 3e-4
    path = _saved(tmp_path / "newer.onnx", *arguments, ir_version=99)
    with pytest.raises(
        NoTarget, match=r"newer.onnx is no ONNX model that onnxruntime runs \(Fail: Unsupported model IR"
    ):
        open_target(path)
    path = _saved(tmp_path / "other.onnx", "NoOperator", ["x", "gamma"], ["y"])
    with pytest.raises(NoTarget, match=r"onnxruntime runs \(.*NoOperator"):
        open_target(path)
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(
        NoTarget, match=r"onnxruntime runs \(ValueError: it has no input or no output\); check the file"
    ):
        open_target(str(tmp_path / "empty.onnx"))
