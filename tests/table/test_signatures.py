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


BUILT_IN = {"torch": "torch.nn:RMSNorm", "keras": "keras.layers:RMSNormalization", "nnx": "flax.nnx:RMSNorm",
            "linen": "flax.linen:RMSNorm"}  # fmt: skip
OURS = {"torch": "rmsnorm.torch_impl:RMSNorm", "keras": "rmsnorm.tf_impl:RMSNormalization",
        "nnx": "rmsnorm.flax_impl:RMSNorm", "linen": "rmsnorm.flax_impl.linen:RMSNorm"}  # fmt: skip
COMMON = {"use_bias": "bias", "epsilon": "eps"}  # names of one option in another framework
ALONE = {  # what one framework's layers have in its own way
    "keras": {"scale", "feature_axis", *(f"{part}_{what}" for part in ("scale", "bias")
                                         for what in ("initializer", "regularizer", "constraint"))},
    "nnx": {"bias_init", "bias_metadata"}, "linen": {"bias_init"},
}  # fmt: skip


def constructor(name):
    """The arguments of a layer's constructor, with their defaults, and its docstring."""
    module, _, kind = name.partition(":")
    layer = getattr(pytest.importorskip(module), kind, None)
    if layer is None:
        pytest.skip(f"{name} is of a later version")
    parameters = list(inspect.signature(layer.__init__).parameters.values())[1:]
    named = {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named, inspect.getdoc(layer) or ""


@pytest.mark.parametrize("kind", OURS)
def test_the_layers_have_the_same_options_and_describe_them(kind):
    """Beside the arguments of the built-in layer: an option of one framework's layer alone fails here."""
    ours, words = constructor(OURS[kind])
    theirs, _ = constructor(BUILT_IN[kind])
    own = {name: default for name, default in ours.items() if name not in theirs}
    shared = {COMMON.get(name, name): ours[name] for name in (*own, "use_bias") if name in ours}
    shared = {name: default for name, default in shared.items() if name not in ALONE.get(kind, ())}
    assert {*shared} == {"bias", "partial", "variant"}
    assert [shared[name] for name in ("bias", "partial")] == [None, None]
    assert {name: ours[name] for name in ours if COMMON.get(name, name) == "eps"} == {
        "eps" if kind == "torch" else "epsilon": None
    }
    assert [name for name in own if name not in words] == []
