"""Nematus in four frameworks: what users call has the names and arguments of the protocol."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rmsnorm import nematus
from rmsnorm.cli import port
from rmsnorm.nematus import protocol
from rmsnorm.specification.frameworks import FRAMEWORKS

CELLS = ("nematus_gru", "gru", "lstm")
MODELS = ("RNNSearch", "Transformer")
METHODS = ("encode", "logits", "loss", "translate")

# Arguments that a framework has in addition to the protocol, by method, and why. All are keyword-only.
OTHER_ARGUMENTS = {("flax", f"{model}.__init__"): ["rngs"] for model in MODELS}  # keys for dropout
# Arguments of constructors whose names a framework fixes, and why.
OTHER_CONSTRUCTORS = {("tf", model): "that of the base class, which passes **kwargs to keras.Model" for model in MODELS}


def differences(actual: Any, wanted: Any, extra: list[str]) -> Iterator[str]:
    """What of a signature is not as wanted, but for keyword-only arguments of these names."""
    taken, expected = ([*inspect.signature(one).parameters.values()] for one in (actual, wanted))
    added = [p for p in taken if p.name in extra and p.kind is inspect.Parameter.KEYWORD_ONLY]
    if [p.name for p in added] != extra:
        yield f"{actual.__qualname__} has {added} in addition, expected {extra}"
    of = [[p for p in own if p not in added and p.name != "self"] for own in (taken, expected)]
    rest, expected = ([(p.name, p.kind, p.default) for p in own] for own in of)
    if rest != expected:
        yield f"{actual.__qualname__} takes {rest}, expected {expected}"


def interface_differences(package: Any, framework: str) -> Iterator[str]:
    """What in a package is not as in the protocol."""
    for name in CELLS:
        yield from differences(getattr(package, name), getattr(protocol.Cells, name), [])
    for model in MODELS:
        names = METHODS if (framework, model) in OTHER_CONSTRUCTORS else ("__init__", *METHODS)
        for name in names:
            extra = OTHER_ARGUMENTS.get((framework, f"{model}.{name}"), [])
            wanted, actual = (getattr(getattr(module, model), name) for module in (protocol, package))
            yield from differences(actual, wanted, extra)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_interface_is_that_of_the_protocol(framework: str) -> None:
    if FRAMEWORKS[framework].missing is not None:
        pytest.skip(f"{FRAMEWORKS[framework].missing} is not installed")
    package = import_module(f"rmsnorm.nematus.{framework}")
    assert not list(interface_differences(package, framework))
    assert {*CELLS, *MODELS} <= set(package.__all__)
    for name in (*CELLS, *MODELS):
        assert "see rmsnorm.nematus.protocol." in inspect.getdoc(getattr(package, name))  # type: ignore[operator]


def test_a_planted_difference_is_seen() -> None:
    """The negative control: a package that is as the others, with one name, default, kind or place changed."""
    from rmsnorm.nematus import numpy as package

    def renamed(self: Any, x: Any, mask: Any) -> Any: ...
    def other(self: Any, x: Any, x_mask: Any, y: Any, *, stepwise: Any = True, training: Any = None) -> Any: ...
    def positional(self: Any, x: Any, x_mask: Any, y: Any, stepwise: Any = False, *, training: Any = None) -> Any: ...
    def without_mode(self: Any, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Any: ...

    changes = {"encode": renamed, "logits": other, "loss": without_mode}
    for name, function in (*changes.items(), ("logits", positional)):
        fake = types.SimpleNamespace(**{own: getattr(package, own) for own in (*CELLS, *MODELS)})
        fake.RNNSearch = type("RNNSearch", (package.RNNSearch,), {name: function})
        assert len(list(interface_differences(fake, "numpy"))) == 1, name


def test_what_a_dialect_decides_is_in_the_table() -> None:
    """Nothing compares a dialect with a name: a decision is a field of ``rules.Rules``, and its name says which."""
    files = [*Path(nematus.__file__).parent.rglob("*.py"), Path(port.__file__)]
    compared = [
        f"{file.name}:{node.lineno}: {ast.unparse(node)}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Compare) and is_dialect(node.left)
        if any(isinstance(other, ast.Constant) and isinstance(other.value, str) for other in node.comparators)
    ]
    assert len(files) > 40
    assert not compared


def is_dialect(node: ast.expr) -> bool:
    return ast.unparse(node).endswith(("dialect", "dialect']", "is_zero"))
