"""ONNX: its own test cases of RMSNormalization on every backend, and what torch.onnx.export makes of ours."""

from __future__ import annotations

import io
import logging
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from wrong_equations import CASES

from rmsnorm import PRESETS, Variant
from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Outcome, make
from rmsnorm.parity.judge import Expected, compare, expect
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

onnx = pytest.importorskip("onnx", reason="onnx is not installed; pip install '.[onnx]'")
F32_RANGE = ("huge", "tiny")  # squares that leave float32, in which a runtime for ONNX computes


def _node_cases() -> list[Any]:
    """Those of the module of this operator alone: `collect_testcases` runs the modules of all, which takes long."""
    from onnx.backend.test.case.node import _NodeTestCases, rmsnormalization  # noqa: F401  # adds its cases when imported

    return [case for case in _NodeTestCases if [node.op_type for node in case.model.graph.node] == ["RMSNormalization"]]


NODE_CASES = _node_cases()
assert len(NODE_CASES) == 19


def _judged(got: Any, x: Any, scale: Any, bias: Any = None, **options: Any) -> Any:
    """The verdict on y, as `rmsnorm check` has it."""
    specs = [None if p is None else Spec(p.shape, p.dtype.name) for p in (x, scale, bias)]
    call = resolve("test", *specs, **options)
    want = rms_norm(x, scale, bias, **options)
    unit = term_sizes(x, scale, bias, dy=x, tangents=(None, None, None), **options)["y"] * 2.0**-24
    expected = Expected.around(want, np.maximum(unit, 2.0**-150), bound("y", call, "float32"))
    (verdict,) = compare(Outcome({"y": [got]}), {"y": expected})
    return verdict


@pytest.mark.parametrize("case", NODE_CASES, ids=lambda case: case.name.removeprefix("test_rms_normalization_"))
def test_the_node_cases_of_onnx(framework: Any, case: Any) -> None:
    (node,) = case.model.graph.node
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    assert attributes.pop("stash_type", 1) == 1
    variant = Variant.get("onnx").replace(eps=attributes.pop("epsilon", 1e-5))
    first = attributes.pop("axis", -1)
    assert not attributes
    for (x, scale), (want,) in case.data_sets:
        axes = tuple(range(first % x.ndim, x.ndim))
        y = framework.rms_norm(x, scale, variant=variant, axis=axes)
        assert np.array_equal(y, rms_norm(x, scale, variant=variant, axis=axes))
        verdict = _judged(want, x, scale, variant=variant, axis=axes)
        assert verdict.passed, verdict.detail
        wrong = _judged(want, x, scale, variant=variant.replace(eps=variant.eps * 2 + 0.1), axis=axes)
        assert not wrong.passed, "the case cannot tell"


def _export(model: Any, inputs: Any, **options: Any) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed; pip install '.[onnx]'")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells which packages it did not find
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)  # of PyTorch to itself
        return torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False, **options)


def _export_by_tracing(model: Any, inputs: Any, **options: Any) -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    file = io.BytesIO()
    with warnings.catch_warnings():
        for category in (DeprecationWarning, torch.jit.TracerWarning):  # sizes that checks compare
            warnings.simplefilter("ignore", category)
        torch.onnx.export(model.eval(), inputs, file, dynamo=False, **options)
    return SimpleNamespace(model_proto=onnx.load_from_string(file.getvalue()))


def _producers(program: Any) -> list[Any]:
    """Operator names on the way from the inputs to each output."""
    producers = []
    for output in program.model.graph.outputs:
        names, waiting = [], [output.producer()]
        while waiting:
            node = waiting.pop()
            if node is not None:
                names.insert(0, node.op_type)
                waiting += [value.producer() for value in node.inputs if value is not None]
        producers.append(names)
    return producers


def _chosen(dtype: str) -> list[Any]:
    """Rows with every kind of preset, and the other cases with one that rounds before the gain and one that does not.

    What 16-bit ONNX cannot hold is left out: the runtime's CPU provider has no arithmetic in bfloat16.
    """
    kinds: dict[Any, str] = {}
    for name, v in PRESETS.items():
        kinds.setdefault((v.rounding, v.eps_position, v.scale_offset, v.bias, v.result_dtype), name)
    calls = [("rows", name) for name in kinds.values()]
    calls += [
        (name, preset)
        for name, case in CASES.items()
        for preset in ("llama", "standard")
        if name != "rows" and case.shape[0] < 10000 and case.parameters != "bfloat16" and dtype in case.dtypes
    ]
    return [make(CASES[name], preset, dtype) for name, preset in calls if name not in F32_RANGE or dtype != "float32"]


EXPORTS = [("float16", 23), ("float16", 9)]  # opset 23 by torch.export, the others by tracing


@pytest.fixture(scope="module", params=EXPORTS, ids=str)
def exported(request: pytest.FixtureRequest) -> Any:
    """Cases, the program that computes all of them, and its inputs."""
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    from rmsnorm.torch_impl import rms_norm as torch_rms_norm

    dtype, opset = request.param
    cases = [data for data in _chosen(dtype) if opset == 23 or data.x.shape[-1]]  # that exporter divides by a size of 0
    arrays = [{"x": d.x, "scale": d.scale, "bias": d.bias, **d.arrays} for d in cases]
    feeds = {
        f"{name} {i}": np.ascontiguousarray(array)
        for i, call in enumerate(arrays)
        for name, array in call.items()
        if array is not None
    }

    class Model(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            inputs, outputs = dict(zip(feeds, tensors, strict=True)), []
            for i, (data, call) in enumerate(zip(cases, arrays, strict=True)):
                named = {name: inputs.get(f"{name} {i}") for name in call}
                outputs += torch_rms_norm(**named, **data.options, return_inverse_rms=True)
            return tuple(outputs)

    export = _export if opset == 23 else _export_by_tracing
    inputs = tuple(map(torch.from_numpy, feeds.values()))
    program = export(Model(), inputs, opset_version=opset, input_names=[*feeds])
    kept = {entry.name for entry in program.model_proto.graph.input}
    return cases, program, {name: array for name, array in feeds.items() if name in kept}


def _verdicts(cases: Any, outputs: Any) -> Any:
    remaining = iter(outputs)
    for data in cases:
        want = expect(data)
        names = ["y", "inverse_rms"] if data.residual is None else ["y", "h", "inverse_rms"]
        got = {name: [next(remaining)] for name in names}
        if data.residual is not None:
            assert np.array_equal(got["h"][0], add(data.x, data.residual, data.call.sum_dtype), equal_nan=True)
        for verdict in compare(Outcome(got), {name: want[name] for name in ("y", "inverse_rms")}):
            yield data, verdict
    assert next(remaining, None) is None


def test_the_exported_graph_rounds_where_the_variant_says(exported: Any) -> None:
    """The same graph by the reference evaluator, with the operator as ONNX defines it: bit for bit in 16 bits."""
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class RMSNormalization(OpRun):  # that of the package computes in the dtype of x, whatever stash_type says
        def _run(self, x: Any, scale: Any, axis: Any = -1, epsilon: Any = 1e-5, stash_type: Any = 1) -> Any:
            assert stash_type == 1
            axes = tuple(range(axis % x.ndim, x.ndim))
            options = {"variant": "onnx", "eps": epsilon, "axis": axes}
            broadcast = np.broadcast_to(scale, [x.shape[axis] for axis in axes])
            return (rms_norm(x, broadcast, **options),)

    cases, program, feeds = exported
    evaluator = ReferenceEvaluator(program.model_proto, new_ops=[RMSNormalization])
    with np.errstate(all="ignore"):
        outputs = evaluator.run(None, feeds)
    failed = [
        (data.case.name, data.variant.name, verdict)
        for data, verdict in _verdicts(cases, outputs)
        if not verdict.passed
    ]
    assert not failed
    assert any(data.call.norm_dtype == "float16" for data in cases)


PLAIN = {"zhang_torch": "outside", "x_transformers": "clamp", "zhang_tf": "eps", "zero": "eps"}


@pytest.mark.slow
def test_layers_become_the_operator_of_opset_23() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    from rmsnorm.torch_impl import RMSNorm

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([RMSNorm((3, 5), variant=name) for name in PRESETS])
            generator = torch.Generator().manual_seed(0)
            for parameter in self.parameters():  # of equal layers the exporter makes one
                parameter.data.normal_(0.3, 1.0, generator=generator)

        def forward(self, x: Any) -> Any:
            return tuple(layer(x) for layer in self.layers)

    batch = {0: torch.export.Dim("batch")}
    program = _export(Model(), (torch.ones(4, 3, 5),), opset_version=23, dynamic_shapes=(batch,))
    for name, producers in zip(PRESETS, _producers(program), strict=True):
        if name in PLAIN:
            assert "RMSNormalization" not in producers, name
        else:
            assert producers == ["RMSNormalization", "Add"] if PRESETS[name].bias else ["RMSNormalization"], name
    nodes = [node for node in program.model_proto.graph.node if node.op_type == "RMSNormalization"]
    attributes = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    assert {node["axis"] for node in attributes} == {-2}
    assert {node.get("stash_type", 1) for node in attributes} == {1}
    eps = [PRESETS[name].eps_for("float32") for name in PRESETS if name not in PLAIN]
    assert [node["epsilon"] for node in attributes] == pytest.approx(eps, rel=2.0**-24, abs=0)
