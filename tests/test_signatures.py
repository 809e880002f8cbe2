"""Four frameworks, one interface: the same files, names, signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import rmsnorm
from rmsnorm import numpy_impl
from rmsnorm.specification.frameworks import FRAMEWORKS

PACKAGE = Path(rmsnorm.__file__).parent
FUNCTIONS = ("rms_norm", "rms_norm_vjp")
FILES = {"__init__.py", "functional.py", "arithmetic.py", "gate.py", "rounding.py", "layers.py"}
# The additional and missing files of each folder, and why. An entry that is no longer needed fails.
EXCEPTIONS = {
    "numpy": {
        "rounding.py": "double_double.py",
        "layers.py": "functions only",
        "formula.py": "the formula in plain NumPy, for readers",
        "double_double.py": "the arithmetic of the golden",
        "fast.py": "the golden's bits by the CPU kernels",
        "kernels.py": "the door to the kernels",
        "quantised.py": "the golden of a norm and a quantisation",
    },
    "torch": {
        "onnx.py": "the operator that the exporter writes",
        "arithmetic.py": "operations.py",
        "engines.py": "which code computes a call",
        "private.py": "what PyTorch has no public function for",
        "compiled.py": "rms_norm as torch.compile has it",
        "inductor.py": "what it writes for the operators",
        "operators.py": "the kernels in a program that is compiled or exported",
        "autograd.py": "a torch.autograd.Function",
        "gpu.py": "the Triton kernels",
        "memory.py": "which tensors a kernel may read",
        "kernels.py": "the door to the kernels",
        "operations.py": "the arithmetic in the framework's own operations",
    },
    "tf": {
        "arithmetic.py": "operations.py",
        "engines.py": "which code computes a call",
        "operations.py": "the arithmetic in the framework's own operations",
        "kernels.py": "the door to the kernels",
        "graph.py": "functions that XLA compiles in a graph",
        "private.py": "what TensorFlow has no public function for",
        "portable.py": "the formula that exporters see, and backends of Keras without a framework",
    },
    "flax": {
        "linen.py": "Flax has two module systems",
        "arithmetic.py": "operations.py",
        "engines.py": "which code computes a call",
        "kernels.py": "the door to the kernels: primitives of JAX",
        "operations.py": "the arithmetic in the framework's own operations",
        "private.py": "what JAX has no public function for, or none in some versions",
    },
}
LAYERS = {"numpy": [], "torch": ["RMSNorm"], "tf": ["RMSNormalization"], "flax": ["RMSNorm"]}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_equal(framework, name):
    golden = inspect.signature(getattr(numpy_impl.functional, name))
    signature = inspect.signature(getattr(framework.functional, name))
    assert [(p.name, p.kind, p.default) for p in signature.parameters.values()] == [
        (p.name, p.kind, p.default) for p in golden.parameters.values()
    ]
    for parameter, other in zip(signature.parameters.values(), golden.parameters.values(), strict=True):
        assert parameter.annotation is not inspect.Parameter.empty
        plain = "Array" not in other.annotation
        assert not plain or parameter.annotation == other.annotation, "only the types of arrays differ"


def _words(function):
    """The docstring without the code of its example."""
    text = inspect.getdoc(function)
    before, example = re.split(r"\n *Example:\n", text)
    assert ">>> " in example
    return before


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_are_equal_but_for_the_example(framework, name):
    golden = getattr(numpy_impl.functional, name)
    words = _words(getattr(framework.functional, name))
    assert words == _words(golden)
    parts = ["Args:", "Returns:", "Raises:", "Source:"]
    assert [part for part in parts if f"\n{part}" in words] == parts


def test_public_names_are_equal(framework):
    package = importlib.import_module(f"rmsnorm.{framework.name}_impl")
    golden = ["rms_norm_jvp", "rms_norm_quantised", "allowed"]
    own = golden if framework.name == "numpy" else LAYERS[framework.name]
    assert sorted(package.__all__) == sorted([*FUNCTIONS, *own])
    for name in FUNCTIONS:
        assert getattr(package, name) is getattr(framework.functional, name)
        assert getattr(package, name).__module__ == f"rmsnorm.{framework.name}_impl.functional"
    with pytest.raises(AttributeError, match="has no attribute 'rmsnorm'"):
        _ = package.rmsnorm


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_has_the_same_files(framework):
    names = {path.name for path in (PACKAGE / f"{framework}_impl").glob("*.py")}
    assert names ^ FILES == set(EXCEPTIONS[framework]), (
        "an additional or missing file, or an exception no longer needed"
    )
