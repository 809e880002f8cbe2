"""ONNX files with sizes of their own, as torch.onnx.export writes them, are asked in as many batches as needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmsnorm.identify import identify
from rmsnorm.targets import open_target

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; pip install '.[onnx]'")


def written(path: Path, sizes: list[Any], gains: int) -> str:
    """A file with eps 1e-5, x and y of these sizes, and a gain of 1.5 in so many elements."""
    make, number = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, number, sizes) for name in "xy")
    constants = {"eps": np.float32(1e-5), "axes": np.array([-1]), "scale": np.full(gains, 1.5, "float32")}
    nodes = [("Mul", "x x", "s"), ("ReduceMean", "s axes", "m"), ("Add", "m eps", "q"), ("Sqrt", "q", "r"),
             ("Div", "x r", "d"), ("Mul", "d scale", "y")]  # fmt: skip
    graph = make.make_graph(
        [make.make_node(name, inputs.split(), [output]) for name, inputs, output in nodes], "norm", [x], [y],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9), path)
    return str(path)


@pytest.mark.parametrize("gains", [64, 1])
@pytest.mark.parametrize("sizes", [[2, 16, 64], [4, 64], ["n", 16, 64], [64]], ids=str)
def test_identify_takes_any_sizes_and_a_gain_of_one_number(tmp_path: Path, sizes: list[Any], gains: int) -> None:
    identity = identify(written(tmp_path / "norm.onnx", sizes, gains))
    assert identity.recognised, identity.text
    assert identity["eps"] == 1e-5


def test_the_last_batch_is_filled_up(tmp_path: Path) -> None:
    target = open_target(written(tmp_path / "norm.onnx", [4, 64], 64))
    x = np.random.default_rng(0).normal(size=(10, 64)).astype("float32")
    y = target.forward(x, np.ones(64, "float32"))
    np.testing.assert_allclose(y, x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5), rtol=1e-6)
