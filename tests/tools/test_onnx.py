"""ONNX: its own test cases of RMSNormalization, and what torch.onnx.export makes of a call and of a layer."""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

import numpy as np
import pytest
from wrong_equations import CASES

from rmsnorm import PRESETS
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Data, Outcome, make
from rmsnorm.parity.judge import compare, expect
from rmsnorm.testing import rms_norm_interval

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")


def node_cases() -> list[Any]:
    """Those of the module of this operator alone: `collect_testcases` runs the modules of all, which takes long."""
    from onnx.backend.test.case.node import _NodeTestCases, rmsnormalization  # noqa: F401  # adds its cases when imported

    return [case for case in _NodeTestCases if [node.op_type for node in case.model.graph.node] == ["RMSNormalization"]]


def attributes(node: Any) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def test_the_node_cases_of_onnx_are_right_and_can_tell_another_eps() -> None:
    cases = node_cases()
    assert len(cases) == 19
    for case in cases:
        said = {"epsilon": 1e-5, "axis": -1, "stash_type": 1, **attributes(case.model.graph.node[0])}
        assert {*said} == {"epsilon", "axis", "stash_type"}
        for (x, scale), (want,) in case.data_sets:
            for eps, is_right in ((said["epsilon"], True), (said["epsilon"] * 2 + 0.1, False)):
                options = {"variant": "onnx", "eps": eps, "axis": tuple(range(said["axis"] % x.ndim, x.ndim))}
                low, high = rms_norm_interval(x, scale, **options)
                assert np.all((low <= want) & (want <= high)) == is_right, case.name


def exported(model: Any, inputs: Any, opset: int, **options: Any) -> Any:
    """The file of a model: of opset 23 by torch.export, of others by tracing."""
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed; pip install '.[onnx]'")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells which packages it did not find
    file = io.BytesIO()
    options |= {"opset_version": opset, "dynamo": opset == 23}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)  # of PyTorch to itself
        for category in (DeprecationWarning, torch.jit.TracerWarning):  # sizes that checks compare
            warnings.simplefilter("ignore", category)
        program = torch.onnx.export(model.eval(), inputs, None if opset == 23 else file, verbose=False, **options)
    return program.model_proto if opset == 23 else onnx.load_from_string(file.getvalue())


OPTIONS = (
    "vector; strided; huge; tiny; non-finite; no gain, bias; partial 0.3; mask, partial; mask, residual; residual; "
    "residual, exact sum; channels; apart; groups; gain f32; out f32; gate; gate of x; sigmoid gate of x; "
    "gate, masked sum; width 1"
)


def calls_in_float16() -> list[Data]:
    """Rows with every kind of preset, and other cases with one that rounds before the gain, or one that does not.

    The runtime's CPU provider has no arithmetic in bfloat16.
    """
    kinds: dict[Any, str] = {}
    for name, v in PRESETS.items():
        kinds.setdefault((v.rounding, v.eps_position, v.scale_offset, v.bias, v.result_dtype), name)
    calls = [("rows", name) for name in kinds.values()]
    calls += [(case, ("llama", "standard")[index % 2]) for index, case in enumerate(OPTIONS.split("; "))]
    return [make(CASES[case], preset, "float16") for case, preset in calls]


@pytest.mark.parametrize("opset", [23, 9])
def test_the_exported_graph_rounds_where_the_variant_says(opset: int) -> None:
    """One program of all calls, by the reference evaluator, with the operator as ONNX defines it."""
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    from rmsnorm.torch_impl import rms_norm as torch_rms_norm

    calls = calls_in_float16()
    arrays = [{"x": d.x, "scale": d.scale, "bias": d.bias, **d.arrays} for d in calls]
    feeds = {
        f"{name} {i}": np.ascontiguousarray(array)
        for i, call in enumerate(arrays)
        for name, array in call.items()
        if array is not None
    }

    class Model(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            inputs, outputs = dict(zip(feeds, tensors, strict=True)), []
            for i, (data, call) in enumerate(zip(calls, arrays, strict=True)):
                named = {name: inputs.get(f"{name} {i}") for name in call}
                outputs += torch_rms_norm(**named, **data.options, return_inverse_rms=True)
            return tuple(outputs)

    class RMSNormalization(OpRun):  # that of the package computes in the dtype of x, whatever stash_type says
        def _run(self, x: Any, scale: Any, axis: Any = -1, epsilon: Any = 1e-5, stash_type: Any = 1) -> Any:
            assert stash_type == 1
            axes = tuple(range(axis % x.ndim, x.ndim))
            broadcast = np.broadcast_to(scale, [x.shape[axis] for axis in axes])
            return (rms_norm(x, broadcast, variant="onnx", eps=epsilon, axis=axes),)

    file = exported(Model(), tuple(map(torch.from_numpy, feeds.values())), opset, input_names=[*feeds])
    kept = {entry.name for entry in file.graph.input}
    with np.errstate(all="ignore"):
        evaluator = ReferenceEvaluator(file, new_ops=[RMSNormalization])
        outputs = iter(evaluator.run(None, {name: array for name, array in feeds.items() if name in kept}))
    for data in calls:
        got = {"y": [next(outputs)]}
        if data.residual is not None:
            assert np.array_equal(next(outputs), add(data.x, data.residual, data.call.sum_dtype), equal_nan=True)
        got["inverse_rms"] = [next(outputs)]
        for verdict in compare(Outcome(got), expect(data, [*got])):
            assert verdict.passed, (data.case.name, data.variant.name, verdict)
    assert next(outputs, None) is None
    assert any(data.call.norm_dtype == "float16" for data in calls)


OPERATORS = {"standard": "RMSNormalization", "equinox": "RMSNormalization Add", "zhang_torch": ""}


def test_layers_become_the_operator_of_opset_23_where_it_computes_the_same() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    from rmsnorm.torch_impl import RMSNorm

    model = torch.nn.Sequential(*[RMSNorm((3, 5), variant=name) for name in OPERATORS])
    batch = ({0: torch.export.Dim("batch")},)
    nodes = exported(model, (torch.ones(4, 3, 5),), 23, dynamic_shapes=batch).graph.node
    norms = [attributes(node) for node in nodes if node.op_type == "RMSNormalization"]
    assert [node.op_type for node in nodes][:3] == " ".join(OPERATORS.values()).split()
    assert len(norms) == 2
    assert {(norm["axis"], norm.get("stash_type", 1)) for norm in norms} == {(-2, 1)}
    eps = [PRESETS[name].eps_for("float32") for name, operators in OPERATORS.items() if operators]
    assert [norm["epsilon"] for norm in norms] == pytest.approx(eps, rel=2.0**-24, abs=0)
