"""Nematus in four frameworks, one interface: the same files, public names, signatures and order of definitions."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rmsnorm
from rmsnorm.frameworks import FRAMEWORKS
from rmsnorm.nematus import protocol

FOLDER = Path(rmsnorm.__file__).parent / "nematus"
FILES = {
    *("__init__.py", "parameters.py", "sentences.py", "recurrent.py", "recurrent_layers.py"),
    *("output.py", "rnnsearch.py", "transformer.py", "zero_rnnsearch.py"),
}
MODULES = ("recurrent", "output", "rnnsearch", "transformer", "zero_rnnsearch")
CELLS = ("nematus_gru", "gru", "lstm")
MODELS = ("RNNSearch", "Transformer")
METHODS = ("encode", "logits", "loss", "translate")

# Files that a framework lacks or has in addition, and why.
OTHER_FILES = {
    ("numpy", "sentences.py"): "the checks return NumPy arrays",
    ("numpy", "recurrent_layers.py"): "NumPy has functions only",
    ("tf", "model.py"): "the base class of the two Keras models",
    ("tf", "layers.py"): "layers for Nematus's own graphs",
}
# Arguments that a framework has in addition to the protocol, by method, and why. All are keyword-only.
OTHER_ARGUMENTS = {
    ("numpy", "RNNSearch.loss"): ["rng"],  # NumPy has no training mode
    ("numpy", "Transformer.loss"): ["training"],
    ("flax", "RNNSearch.__init__"): ["rngs"],  # keys for dropout
    ("flax", "Transformer.__init__"): ["rngs"],
    **{("tf", f"{model}.{name}"): ["training"] for model in MODELS for name in METHODS[:3]},  # as in Keras
}
# Arguments of constructors whose names a framework fixes, and why.
OTHER_CONSTRUCTORS = {("tf", model): "that of the base class, which passes **kwargs to keras.Model" for model in MODELS}
# Public methods that a framework has in addition, and why.
OTHER_METHODS = {
    "numpy": {"gradients"},  # the golden has its gradients
    "torch": {"forward"},  # the call of a module
    "tf": {"parameters_in"},  # parameters as tensors of a graph
    "flax": set(),
}
# Definitions of one framework, by file. All others must be in every framework, in the same order.
OTHER_DEFINITIONS = {
    # The golden has gradients. It takes step after step through the whole decoder, and attends to keys and values that
    # it computes from the memory, because that is shorter to differentiate.
    ("numpy", "recurrent"): {"nematus_gru_vjp", "gru_vjp", "lstm_vjp"},
    ("numpy", "output"): {"embed"},
    ("numpy", "rnnsearch"): {"_SourceGradients", "_Step", "_StepGradients", "_decoder_step", "_step_with_input"},
    ("numpy", "transformer"): {"_mix"},
    ("torch", "rnnsearch"): {"_base_steps"},
    # Functions become graphs, and get parameters and dropout there.
    ("tf", "recurrent"): {"_run", "_nematus_gru"},
    ("tf", "output"): {"_wide"},
    ("tf", "rnnsearch"): {"_context"},
    ("tf", "transformer"): {"_keep"},
    # Functions are compiled, and get keys for dropout.
    ("flax", "recurrent"): {"_column"},
    ("flax", "rnnsearch"): {"_context", "_with_dropout"},
    ("flax", "transformer"): {"_dropout"},
}
LACKING_DEFINITIONS = {
    ("flax", "zero_rnnsearch"): {"_drop"},  # masks have names there
    ("numpy", "output"): {"softmax"},  # written out where its gradient is
    ("numpy", "rnnsearch"): {"_base_step"},
    ("numpy", "transformer"): {"_memory", "_decode", "_self_attention"},
}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the arguments but ``self``."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


def differences(actual: Any, wanted: Any, extra: list[str]) -> Iterator[str]:
    """What of a signature is not as wanted, but for keyword-only arguments of these names."""
    arguments = shape(actual)
    added = [p for p in arguments if p[0] in extra and p[1] is inspect.Parameter.KEYWORD_ONLY]
    if [name for name, _, _ in added] != extra:
        yield f"{actual.__qualname__} has {[name for name, _, _ in added]} in addition, expected {extra}"
    rest = [p for p in arguments if p not in added]
    if rest != shape(wanted):
        yield f"{actual.__qualname__} takes {rest}, expected {shape(wanted)}"


def interface_differences(package: Any, framework: str) -> Iterator[str]:
    """What in a package is not as in the protocol."""
    for name in CELLS:
        yield from differences(getattr(package, name), getattr(protocol.Cells, name), [])
    for model in MODELS:
        wanted, actual = getattr(protocol, model), getattr(package, model)
        names = METHODS if (framework, model) in OTHER_CONSTRUCTORS else ("__init__", *METHODS)
        for name in names:
            extra = OTHER_ARGUMENTS.get((framework, f"{model}.{name}"), [])
            yield from differences(getattr(actual, name), getattr(wanted, name), extra)
        own = {name for name, value in vars(actual).items() if inspect.isfunction(value) and name[0] != "_"}
        if own != {*METHODS, *OTHER_METHODS[framework]}:
            yield f"{model} has the methods {sorted(own)}, expected {sorted({*METHODS, *OTHER_METHODS[framework]})}"


def definitions(source: str, module: str) -> list[str]:
    """Functions and classes of a file, and the public methods of its models, in their order."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        if isinstance(node, ast.ClassDef) and node.name in MODELS:
            names += [entry.name for entry in node.body if isinstance(entry, ast.FunctionDef) and entry.name in METHODS]
    assert names, module
    return names


def order_differences(files: dict[str, str], module: str) -> Iterator[str]:
    """Where definitions of a file (by framework: its source) differ, or their order."""
    orders = {
        framework: [
            name
            for name in definitions(source, module)
            if name not in OTHER_DEFINITIONS.get((framework, module), set())
        ]
        for framework, source in files.items()
    }
    everything = orders["torch"]
    for framework, order in orders.items():
        wanted = [name for name in everything if name not in LACKING_DEFINITIONS.get((framework, module), set())]
        if order != wanted:
            yield f"{framework}/{module}.py defines {order}, expected {wanted}"


def package_of(framework: str) -> Any:
    if FRAMEWORKS[framework].missing is not None:
        pytest.skip(f"{FRAMEWORKS[framework].missing} is not installed")
    return import_module(f"rmsnorm.nematus.{framework}")


def sources(module: str) -> dict[str, str]:
    return {name: (FOLDER / name / f"{module}.py").read_text(encoding="utf-8") for name in FRAMEWORKS}


def test_the_files_are_the_same() -> None:
    for framework in FRAMEWORKS:
        files = {path.name for path in (FOLDER / framework).glob("*.py")}
        assert files ^ FILES == {file for name, file in OTHER_FILES if name == framework}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_interface_is_that_of_the_protocol(framework: str) -> None:
    assert not list(interface_differences(package_of(framework), framework))


@pytest.mark.parametrize("module", MODULES)
def test_definitions_and_their_order_are_the_same(module: str) -> None:
    assert not list(order_differences(sources(module), module))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_public_names_are_the_same(framework: str) -> None:
    layers = {"GRU", "LSTM", "NematusGRU"}
    others = {
        "numpy": {f"{name}_vjp" for name in CELLS},
        "torch": layers,
        "tf": layers | {f"{name}Cell" for name in layers},
        "flax": layers,
    }
    package = package_of(framework)
    assert set(package.__all__) == {*CELLS, *MODELS, *others[framework]}
    for name in package.__all__:
        assert getattr(package, name).__name__ == name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_docstrings_point_to_the_protocol(framework: str) -> None:
    package = package_of(framework)
    for name in CELLS:
        assert f"see rmsnorm.nematus.protocol.Cells.{name}." in inspect.getdoc(getattr(package, name))  # type: ignore[operator]
        assert "Returns:" in inspect.getdoc(getattr(protocol.Cells, name))  # type: ignore[operator]
    for model in MODELS:
        assert f"see rmsnorm.nematus.protocol.{model}." in inspect.getdoc(getattr(package, model))  # type: ignore[operator]
        for name in METHODS:
            text = inspect.getdoc(getattr(getattr(package, model), name))
            assert text is not None
            assert text.startswith(f"See protocol.{model}.{name}.")
            assert len(text.splitlines()) == 1


def test_a_planted_difference_is_seen() -> None:
    """The negative control: a package that is as the others, with one name, default, kind or place changed."""
    from rmsnorm.nematus import numpy as package

    def copy(model: str, **changes: Any) -> Any:
        members = dict(vars(getattr(package, model))) | changes
        fake = types.SimpleNamespace(**{name: getattr(package, name) for name in (*CELLS, *MODELS)})
        setattr(fake, model, type(model, (), members))
        return fake

    assert not list(interface_differences(copy("RNNSearch"), "numpy"))

    def renamed(self: Any, x: Any, mask: Any) -> Any: ...
    def another_default(self: Any, x: Any, x_mask: Any, y: Any, *, stepwise: bool = True) -> Any: ...
    def positional(self: Any, x: Any, x_mask: Any, y: Any, stepwise: bool = False) -> Any: ...
    def without_rng(self: Any, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Any: ...

    for changes in (
        {"encode": renamed},
        {"logits": another_default},
        {"logits": positional},
        {"loss": without_rng},
        {"sample": renamed},
    ):
        assert len(list(interface_differences(copy("RNNSearch", **changes), "numpy"))) == 1, changes

    fake = copy("RNNSearch")
    fake.gru = package.lstm
    assert len(list(interface_differences(fake, "numpy"))) == 1

    files = sources("rnnsearch")
    moved = files["flax"].replace("def _attend(", "def _other(").replace("def _encode(", "def _attend(", 1)
    assert len(list(order_differences({**files, "flax": moved}, "rnnsearch"))) == 1
    lacking = files["tf"].replace("def _begin(", "def _context_again(")
    assert len(list(order_differences({**files, "tf": lacking}, "rnnsearch"))) == 1


def test_no_exception_is_unused() -> None:
    for (framework, module), names in OTHER_DEFINITIONS.items():
        assert names <= set(definitions(sources(module)[framework], module)), (framework, module)
    for (framework, module), names in LACKING_DEFINITIONS.items():
        assert not names & set(definitions(sources(module)[framework], module)), (framework, module)
