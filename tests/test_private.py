"""Without what rmsnorm asks of a framework in private, or under an older name, the results are the same."""

from __future__ import annotations

import importlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import printed

import rmsnorm
from rmsnorm.specification.frameworks import FRAMEWORKS

FOLDER = Path(rmsnorm.__file__).parent
PROGRAMS = {"torch": "torch_without.py", "tf": "tf_without.py", "flax": "flax_without.py"}  # in <key>_impl of tests
# What only private.py of the framework may write, and what only that file of all the package.
PRIVATE = {
    "torch": (r"torch\._|from torch\.?\S* import _|forward_ad\._|tensor\._", r"(?!)"),
    "tf": (r"(?:tf|keras|tensor|x)\._|pfor_converter", r"tensorflow\.python|keras\.src"),
    "flax": (r"(?!)", r"jax\._src|jax\.extend|jax\.interpreters|jax\.enable_x64|jax\.typeof|\"enable_x64\""),
}
OLD_JAX = pytest.mark.needs("jax>=0.8", "older ones lack some of the names")
EACH = [
    pytest.param("torch", marks=pytest.mark.slow), pytest.param("tf", marks=pytest.mark.slow),
    pytest.param("flax", marks=OLD_JAX),
]  # fmt: skip


def missing(framework: str) -> tuple[str, ...]:
    """The names that are asked for."""
    pytest.importorskip(FRAMEWORKS[framework].package)
    names: tuple[str, ...] = importlib.import_module(PROGRAMS[framework].removesuffix(".py")).MISSING
    return names


@lru_cache
def results(framework: str, *names: str) -> Any:
    program = Path(__file__).parent / f"{framework}_impl" / PROGRAMS[framework]
    said = printed("-W", "ignore", program, *names, timeout=200, JAX_PLATFORMS="cpu")
    return json.loads(said.splitlines()[-1])


def assert_near(got: Any, want: Any) -> None:
    """The same, but for roundings of float32 where the recipe computes in place of a kernel."""
    assert got.keys() == want.keys()
    for name, lists in want.items():
        for one, other in zip(got[name], lists, strict=True):
            np.testing.assert_allclose(one, other, rtol=2.0**-20, atol=2.0**-20, err_msg=name)


@pytest.mark.parametrize("framework", EACH)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of the import of Inductor
def test_without_all_of_it(framework: str) -> None:
    assert_near(results(framework, *missing(framework)), results(framework))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", EACH)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_without_one(framework: str) -> None:
    for name in missing(framework):
        assert_near(results(framework, name), results(framework))


@pytest.mark.parametrize("framework", PRIVATE)
def test_nothing_else_asks_in_private(framework: str) -> None:
    """But for what Module and Function of PyTorch name as their own in a class that is derived from them."""
    texts = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py")}
    own = f"{framework}_impl/"
    here, anywhere = PRIVATE[framework]
    for pattern, start in ((f"{here}|{anywhere}", own), (anywhere, "")):
        asking = [name for name, text in texts.items() if name.startswith(start) and re.search(pattern, text)]
        assert asking == [f"{own}private.py"] or pattern == "(?!)"
