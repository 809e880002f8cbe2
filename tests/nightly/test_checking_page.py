"""docs/checking.md: its snippets in Python run unchanged in a user's project."""

import re

import pytest
from programs import printed
from snippets import ROOT, snippets

PAGE = ROOT / "docs" / "checking.md"
FILES = [snippet for snippet in snippets(PAGE) if re.match(r"# \S+\.py\n", snippet)]
OTHERS = [snippet for snippet in snippets(PAGE) if snippet not in FILES]


def words_of(line):
    """The line without its numbers, which depend on the processor."""
    return re.sub(r"[-+\d.]*\d(e[-+]?\d+)?(\+cpu)?", "#", line)


@pytest.mark.parametrize("code", OTHERS, ids=range(len(OTHERS)))
def test_a_snippet_runs(code, tmp_path):
    """Each one alone, beside the files of the page; what one prints is shown below it, but for numbers."""
    for package in ("torch", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    for snippet in FILES:
        path = tmp_path / snippet.split()[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(snippet)
    lines = [words_of(line) for line in printed("-c", code, cwd=tmp_path, COLUMNS="200").splitlines()]
    if "print(report.text)" in code:
        shown = re.search(r"(?m)(^    .*\n)+", PAGE.read_text("utf-8").split("print(report.text)")[1])[0]
        assert [line for line in shown.splitlines() if words_of(line[4:]) not in lines] == []
