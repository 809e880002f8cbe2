"""The tables of docs/how-close.md: a few cells, computed again."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-close.md").read_text(encoding="utf-8")
TABLES = runpy.run_path(str(ROOT / "tools" / "how_close.py"))


def test_cells_of_the_page_are_what_the_intervals_say() -> None:
    for variant, dtype, n in (("standard", "float32", 64), ("llama", "bfloat16", 768), ("standard", "float16", 4096)):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {dtype} | {variant} |"))
        assert TABLES["widths"](variant, dtype, n, exact=False) in row
    assert TABLES["widths"]("standard", "bfloat16", 64, "dscale", 1024, exact=True) in PAGE


def test_what_a_wide_tolerance_lets_pass() -> None:
    suite = TABLES["SUITES"][2]
    assert TABLES["counted"](suite) == (40, 18, 0)
    assert "| the same | float32 | 40 | 18 | 0 |" in PAGE
