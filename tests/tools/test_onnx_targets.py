"""Files of ONNX as targets: operators, sizes of their own, and what is no model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmsnorm import Variant
from rmsnorm.identify import identify
from rmsnorm.parity import check
from rmsnorm.targets import NoTarget, open_target
from rmsnorm.targets.onnx import open_onnx

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed; pip install '.[onnx]'")

SKIP = {
    "operator": "SkipSimplifiedLayerNormalization",
    "inputs": ["skip", "input", "gamma"],
    "outputs": ["y", "", "", "sum"],
}
BESIDE = {"save_as_external_data": True, "location": "gains", "size_threshold": 0}


def saved(
    path: Path, operator: str = "RMSNormalization", inputs: Any = ("x", "gamma"), outputs: Any = ("y",), *,
    eps: float = 3e-4, dtype: str = "float32", shape: Any = ("n", 32), gate: bool = False, ir_version: int = 10,
    **options: Any,
) -> str:  # fmt: skip
    """A file of one operator, of which gamma and beta are initializers; its y is multiplied by sigmoid(gate)."""
    helper, code = onnx.helper, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    domain = "com.microsoft" if operator.startswith("Skip") else ""
    nodes = [helper.make_node(operator, inputs, ["h"] if gate else outputs, domain=domain, epsilon=eps)]
    if gate:
        nodes += [helper.make_node("Sigmoid", ["z"], ["f"]), helper.make_node("Mul", ["h", "f"], ["y"])]
    own = [name for name in inputs if name in ("gamma", "beta")]
    taken, given = (
        [helper.make_tensor_value_info(name, code, shape) for name in names if name and name not in own]
        for names in ((*inputs, *["z"] * gate), outputs)
    )
    vectors = [onnx.numpy_helper.from_array(np.linspace(0.5, 2, shape[-1]).astype(dtype), name) for name in own]
    graph = helper.make_graph(nodes, "norm", taken, given, vectors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir_version), path, **options)
    return str(path)


@pytest.mark.parametrize(
    ("file", "arguments", "gate"),
    [
        ({}, ("scale",), None),
        ({"gate": True}, ("scale", "gate"), "sigmoid, after"),
        (BESIDE, ("scale",), None),
        ({"operator": "SimplifiedLayerNormalization", "inputs": ["input", "gamma"]}, ("scale",), None),
        (SKIP, ("scale", "residual"), None),
    ],
    ids=["operator", "gated", "weights in a file beside it", "in the domain of ONNX", "residual"],
)
def test_identify_reads_a_file(file: dict[str, Any], arguments: tuple[str, ...], gate: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "norm.onnx", **file)
    identity = identify(path)
    assert identity.recognised or gate, identity.text
    assert (identity["eps"], identity["eps_position"], identity["scale_offset"]) == (3e-4, "inside", 0.0)
    assert identity["rounding"] is None, "it takes float32 only"
    assert identity["gate"] == gate
    assert {*open_target(path).arguments} == {*arguments}
    assert (tmp_path / "gains").exists() == (file is BESIDE)


def test_a_file_that_subtracts_the_mean_is_layer_norm(tmp_path: Path) -> None:
    path = saved(tmp_path / "mean.onnx", "SkipLayerNormalization", ["input", "skip", "gamma", "beta"])
    assert open_target(path).arguments == ("scale", "bias", "residual")
    assert "is LayerNorm, not RMSNorm" in identify(path).text


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", ("rows", 64)), ("float16", (2, 3, 64)), ("float32", (5, 1, 2, 1, 1, 16))],
)
@pytest.mark.usefixtures("few_circumstances")
def test_a_file_is_called_as_it_declares(dtype: str, shape: tuple[Any, ...], tmp_path: Path) -> None:
    right = check(saved(tmp_path / "a.onnx", dtype=dtype, shape=shape, eps=1e-6), "standard")
    assert right.passed, right.text
    assert {record.dtype for record in right.run.records} == {dtype}
    wrong = check(saved(tmp_path / "b.onnx", dtype=dtype, shape=shape, eps=1e-5), "standard")
    assert not wrong.passed
    assert not any("raised" in line for line in wrong.text.splitlines() if line.startswith("  '"))
    other = {"float32": "float16", "float16": "float32"}[dtype]
    with pytest.raises(ValueError, match=f"a.onnx was compared in no case, .*it takes x in {dtype} alone"):
        check(str(tmp_path / "a.onnx"), "standard", dtypes=other)


def test_a_fixed_number_of_rows_and_a_residual(tmp_path: Path) -> None:
    """Both results of the batches are put together."""
    path = saved(tmp_path / "skip.onnx", **SKIP, shape=(3, 32))
    random = np.random.default_rng(0)
    x, residual = (random.normal(size=(4, 32)).astype("float32") for _ in range(2))
    assert np.array_equal(open_target(path).called({"x": x, "residual": residual}).sum, x + residual)
    report = check(path, Variant(name="mine", eps=3e-4), limits={"max_rows": 300})  # as 3 rows are a batch
    assert report.passed, report.details


@pytest.mark.parametrize(("sizes", "gains"), [([2, 16, 64], 64), ([64], 64), (["n", 16, 64], 1)], ids=str)
def test_identify_takes_any_sizes_and_a_gain_of_one_number(tmp_path: Path, sizes: list[Any], gains: int) -> None:
    """As torch.onnx.export writes them, with the sizes in constants of the graph, too: in as many batches as needed."""
    make, number = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (make.make_tensor_value_info(name, number, sizes) for name in "xy")
    constants = {"eps": np.float32(1e-5), "axes": np.array([-1]), "scale": np.full(gains, 1.5, "float32")}
    nodes = [("Mul", "x x", "s"), ("ReduceMean", "s axes", "m"), ("Add", "m eps", "q"), ("Sqrt", "q", "r"),
             ("Div", "x r", "d"), ("Mul", "d scale", "z"), ("Reshape", "z sizes", "y")]  # fmt: skip
    constants["sizes"] = np.array([-1 if size == "n" else size for size in sizes])
    graph = make.make_graph(
        [make.make_node(name, inputs.split(), [output]) for name, inputs, output in nodes], "norm", [x], [y],
        [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    path = str(tmp_path / "norm.onnx")
    onnx.save(make.make_model(graph, opset_imports=[make.make_opsetid("", 18)], ir_version=9), path)
    identity = identify(path)
    assert (identity.recognised, identity["eps"]) == (True, 1e-5), identity.text
    if sizes[0] == 2:
        rows = np.random.default_rng(0).normal(size=(5, 16, 64)).astype("float32")
        want = rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-5)
        np.testing.assert_allclose(open_target(path).forward(rows, np.ones(gains, "float32")), want, rtol=1e-6)


def test_files_that_are_none(tmp_path: Path) -> None:
    """A damaged one gets a sentence or is a model, and nothing else."""
    with pytest.raises(NoTarget, match=r"newer.onnx is no ONNX model that onnxruntime runs \(Fail: Unsupported model"):
        open_target(saved(tmp_path / "newer.onnx", ir_version=99))
    path, random = tmp_path / "model.onnx", np.random.default_rng(0)
    x, y = (onnx.helper.make_tensor_value_info(name, 1, [None, 8]) for name in "xy")
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    whole, no_input, no_output = (
        onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", *ends)).SerializeToString()
        for nodes, *ends in (([node], [x], [y]), ([node], [], [y]), ([], [x], []))
    )
    for content in (b"", b"text", no_input, no_output):
        path.write_bytes(content)
        with pytest.raises(NoTarget, match=r"model.onnx is no ONNX model"):
            open_onnx(path)
    for _ in range(200):
        flipped = bytearray(whole)
        for place in random.integers(0, len(whole), 3):
            flipped[place] ^= 1 << random.integers(8)
        path.write_bytes(flipped)
        try:
            open_onnx(path)
        except NoTarget as error:
            assert len(str(error).splitlines()) == 1, error  # noqa: PT017
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NoTarget, match=r"model\.onnx"):
        open_onnx(path)
