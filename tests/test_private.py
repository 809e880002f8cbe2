"""Without what rmsnorm asks of a framework in private, or under an older name, the results are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from programs import printed
from without import MISSING, PACKAGES

import rmsnorm

FOLDER = Path(rmsnorm.__file__).parent
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


def failures(framework: str, *names: str) -> Any:
    pytest.importorskip(PACKAGES[framework])
    program = Path(__file__).with_name("without.py")
    said = printed("-W", "ignore", program, framework, *names, timeout=400, JAX_PLATFORMS="cpu")
    return json.loads(said.splitlines()[-1])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all", "each"])
@pytest.mark.parametrize("framework", EACH)
def test_without_all_of_it_or_one(framework: str, each: bool) -> None:
    missing = MISSING[framework]
    for names in ([name] for name in missing) if each else [missing]:
        assert failures(framework, *names) == []


@pytest.mark.parametrize("framework", PRIVATE)
def test_nothing_else_asks_in_private(framework: str) -> None:
    """But for what Module and Function of PyTorch name as their own in a class that is derived from them."""
    texts = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py")}
    own = f"{framework}_impl/"
    here, anywhere = PRIVATE[framework]
    for pattern, start in ((f"{here}|{anywhere}", own), (anywhere, "")):
        asking = [name for name, text in texts.items() if name.startswith(start) and re.search(pattern, text)]
        assert asking == [f"{own}private.py"] or pattern == "(?!)"
