"""The page on accuracy is that of the committed numbers, and the script measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import accuracy
import numpy_zoo
import pytest

ROOT = Path(__file__).parents[1]
NUMBERS = ROOT / "benchmarks/accuracy.json"


def test_the_page_is_that_of_the_numbers() -> None:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    assert accuracy.page(json.loads(NUMBERS.read_text(encoding="utf-8"))) == page


def test_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of NumPy that rounds in float32, where every row stands alone."""
    target = f"{numpy_zoo.__file__}:in_float32"
    monkeypatch.setattr(accuracy, "LAYERS", {"numpy/plain": ("numpy", target, "standard", {}, False)})
    monkeypatch.setattr(accuracy, "DTYPES", ("float32",))
    monkeypatch.setattr(accuracy, "EVERY_NUMBER", ())
    layer = accuracy.measure("numpy/plain")
    shares = [share for share, _ in layer["cells"]["float32 y"]]
    assert 0.1 < sum(shares) / len(shares) < 0.95
    assert (layer["dependences"], layer["every"]) == ([], {})
    text = accuracy.page({"date": "", "processor": "", "python": "", "layers": [layer]})
    assert f"| numpy {layer['version']}, plain | no | no | no |" in text
