"""In a PyTorch without what rmsnorm asks of it in private, the results are the same."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from programs import printed

pytest.importorskip("torch")
from torch_without import MISSING

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # of the import of Inductor
PROGRAM = Path(__file__).with_name("torch_without.py")


@lru_cache
def results(*names: str) -> dict[str, Any]:
    return json.loads(printed("-W", "ignore", PROGRAM, *names, timeout=200))


@pytest.mark.costly
def test_without_all_of_it() -> None:
    assert results(*MISSING) == results()


@pytest.mark.slow
@pytest.mark.parametrize("name", MISSING)
def test_without_one(name: str) -> None:
    assert results(name) == results()


def test_nothing_else_asks_pytorch_in_private() -> None:
    """But for what Module and Function name as their own in a class that is derived from them."""
    import rmsnorm

    private = re.compile(r"torch\._|from torch\.?\S* import _|forward_ad\._|tensor\._")
    folder = Path(rmsnorm.__file__).parent / "torch_impl"
    texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert [name for name, text in texts.items() if private.search(text)] == ["private.py"]
