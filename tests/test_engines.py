"""benchmarks/engines.py measures an engine and keeps one row for it; NumPy stands for the engines here."""

from __future__ import annotations

from pathlib import Path

import engines
import pytest


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(engines, "SHAPE", (8, 100))
    return tmp_path / "page.md"


def test_a_row_says_what_an_engine_computes(page: Path) -> None:
    engines.write(page, "numpy", ["older"] * (len(engines.COLUMNS) - 1))
    engines.main(["--engine", "numpy", "--page", str(page)])
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `numpy`")]
    assert len(rows) == len(engines.TABLES)
    row = [cell.strip() for line in rows for cell in line.strip("|").split(" | ")[1:]]
    cells = dict(zip(engines.COLUMNS[1:], row, strict=True))
    assert cells["identify"].startswith("the variant standard with eps 1e-05")
    assert (cells["eps"], cells["rounding"]) == ("1e-05", "after_scale")
    held, count = map(int, cells["check"].split(" of "))
    assert held == count > 40
    share, distance = cells["float32"].split(" %, ")
    assert 30 < float(share) < 100
    assert distance in ("1 ulp", "2 ulp", "3 ulp", "4 ulp")
    assert cells["rows"] == "the same bits alone and among 4,096 rows"


def test_an_engine_that_cannot_be_called_is_listed_with_its_error(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: object, weight: object) -> object:
        raise RuntimeError("no kernel\nfor this processor")

    row = [f"{name} | {name}" for name in engines.COLUMNS[1:]]
    engines.write(page, "other", row)
    other = [line for line in page.read_text().splitlines() if line.startswith("| `other`")]
    engines.write(page, "numpy", row)
    broken = engines.Engine(("numpy",), "nothing", "standard", lambda: norm)
    monkeypatch.setitem(engines.ENGINES, "numpy", broken)
    engines.main(["--engine", "numpy", "--page", str(page)])
    lines = page.read_text().splitlines()
    assert "- `numpy`: RuntimeError: no kernel for this processor" in lines
    assert [line for line in lines if line.startswith("| `")] == other, "the rows of other engines stay"


def test_a_result_that_depends_on_the_number_of_rows_is_named() -> None:
    norm = engines.ENGINES["numpy"].make()
    assert "from 7 rows on" in engines.rows(lambda x, weight: norm(x, weight) * (1 if len(x) < 7 else x.dtype.type(2)))
