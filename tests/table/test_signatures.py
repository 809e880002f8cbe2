"""Four frameworks, one interface: the same names, signatures and docstrings."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

from rmsnorm import numpy_impl

FUNCTIONS = ("rms_norm", "rms_norm_vjp")
LAYERS = {"numpy": [], "torch": ["RMSNorm"], "tf": ["RMSNormalization"], "flax": ["RMSNorm"]}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_framework_has_the_declared_functions(framework, name):
    """Their signature and docstring are those of one declaration; the example of each runs."""
    function, golden = (getattr(module.functional, name) for module in (framework, numpy_impl))
    assert inspect.signature(function) == inspect.signature(golden)
    words = inspect.getdoc(function)
    assert words.partition("Example:")[0] == inspect.getdoc(golden).partition("Example:")[0]
    parts = ["Args:", "Returns:", "Raises:", "Source:", "Example:"]
    assert [part for part in parts if f"\n{part}" in words] == parts
    example = doctest.DocTestParser().get_doctest(words, {name: function}, name, None, None)
    assert len(example.examples) >= 3
    assert not doctest.DocTestRunner().run(example).failed


def test_public_names_are_equal(framework):
    package = importlib.import_module(f"rmsnorm.{framework.name}_impl")
    golden = ["rms_norm_jvp", "rms_norm_quantised"]
    own = golden if framework.name == "numpy" else LAYERS[framework.name]
    assert sorted(package.__all__) == sorted([*FUNCTIONS, *own])
    for name in FUNCTIONS:
        assert getattr(package, name) is getattr(framework.functional, name)
        assert getattr(package, name).__module__ == f"rmsnorm.{framework.name}_impl.functional"
    with pytest.raises(AttributeError, match="has no attribute 'rmsnorm'"):
        _ = package.rmsnorm
