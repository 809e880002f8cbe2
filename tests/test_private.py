"""What rmsnorm asks of a framework in private stands in one file, so that another version can lack it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rmsnorm

FOLDER = Path(rmsnorm.__file__).parent
# What only private.py of the framework may write, and what only that file of all the package.
PRIVATE = {
    "torch": (r"torch\._|from torch\.?\S* import _|forward_ad\._|tensor\._", r"(?!)"),
    "tf": (r"(?:tf|keras|tensor|x)\._|pfor_converter", r"tensorflow\.python|keras\.src"),
    "flax": (r"(?!)", r"jax\._src|jax\.extend|jax\.interpreters|jax\.enable_x64|jax\.typeof|\"enable_x64\""),
}


@pytest.mark.parametrize("framework", PRIVATE)
def test_nothing_else_asks_in_private(framework: str) -> None:
    """But for what Module and Function of PyTorch name as their own in a class that is derived from them."""
    texts = {path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in FOLDER.rglob("*.py")}
    own = f"{framework}_impl/"
    here, anywhere = PRIVATE[framework]
    for pattern, start in ((f"{here}|{anywhere}", own), (anywhere, "")):
        asking = [name for name, text in texts.items() if name.startswith(start) and re.search(pattern, text)]
        assert asking == [f"{own}private.py"] or pattern == "(?!)"
