"""The notebooks run, and print what their files show, but for times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("path", sorted(DOCS.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
def test_a_notebook_runs(path, capsys, monkeypatch):
    """The code that was run last is the code in the file."""
    for package in ("torch", "transformers", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    for cell in cells:
        exec(compile("".join(cell["source"]), "notebook", "exec"), names)
        shown = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        heads = [[line.split(":")[0] for line in text.splitlines()] for text in (capsys.readouterr().out, shown)]
        assert heads[0] == heads[1]
