"""Nematus's models in four frameworks: what users call has the names and arguments of the protocol."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from rmsnorm.nematus import protocol
from rmsnorm.specification.frameworks import FRAMEWORKS

METHODS = ("__init__", "encode", "logits", "loss", "translate")
# What the constructor of a framework has in addition: keys for dropout; what Keras's base class takes.
MORE = {"flax": ["rngs"], "tf": ["kwargs"]}


def parameters(function: Any) -> list[Any]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_interface_is_that_of_the_protocol(framework: str) -> None:
    if FRAMEWORKS[framework].missing is not None:
        pytest.skip(f"{FRAMEWORKS[framework].missing} is not installed")
    module = import_module(f"rmsnorm.nematus.{framework}_models")
    for model in ("RNNSearch", "Transformer"):
        own, wanted = getattr(module, model), getattr(protocol, model)
        assert f"see rmsnorm.nematus.protocol.{model}." in inspect.getdoc(own)  # type: ignore[operator]
        for name in METHODS:
            more = MORE.get(framework, []) if name == "__init__" else []
            taken, expected = parameters(getattr(own, name)), parameters(getattr(wanted, name))
            assert [row for row in taken if row[0] not in more] == expected, name
            assert len(taken) == len(expected) + len(more)
    assert {"RNNSearch", "Transformer", "gru", "lstm"} <= set(module.__all__)
