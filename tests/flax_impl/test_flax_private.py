"""In a JAX without what rmsnorm asks of it in private, or under an older name, the results are the same."""

from __future__ import annotations

import ast
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from programs import printed

import rmsnorm

pytest.importorskip("jax")
from rmsnorm.flax_impl import private

PROGRAM = Path(__file__).with_name("flax_without.py")
MISSING = ("enable_x64", "typeof", "interpreters.mlir.ShardingContext")


@lru_cache
def results(*names: str) -> dict[str, Any]:
    return json.loads(printed("-W", "ignore", PROGRAM, *names, timeout=200, JAX_PLATFORMS="cpu"))


@pytest.mark.needs("jax>=0.8", "older ones lack some of the names")
def test_without_all_of_it() -> None:
    assert results(*MISSING) == results()


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
@pytest.mark.needs("jax>=0.8", "older ones lack some of the names")
def test_without_one(name: str) -> None:
    assert results(name) == results()


def test_nothing_else_asks_jax_in_private() -> None:
    young = re.compile(r"jax\._src|jax\.extend|jax\.interpreters|jax\.enable_x64|jax\.typeof|\"enable_x64\"")
    folder = Path(rmsnorm.__file__).parent
    texts = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert [name for name, text in texts.items() if young.search(text)] == ["flax_impl/private.py"]


def test_no_number_is_an_argument_of_what_jax_compiles_by_itself() -> None:
    """JAX 0.7 makes it 32 bits if the lowering is not inside of enable_x64: see rounding.where."""
    number = re.compile(r"-?[0-9.e*-]+")
    calls = [
        (path.name, ast.unparse(node), [ast.unparse(value) for value in node.args])
        for path in Path(private.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("jnp.where", "jnp.clip", "jnp.select")
    ]
    assert calls
    assert not [call for *call, values in calls if any(map(number.fullmatch, values))]
