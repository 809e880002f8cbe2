"""docs/mismatches.md is run from top to bottom, and prints what it says it prints."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "mismatches.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
SNIPPET = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
REPORTED = (
    "33133",
    "1132",
    "simple_stories_train",
    "spd/issues/625",
    "21234",
    "pull/364",
    "301",
    "52104",
    "2821",
    "157345",
    "173039",
    "142848",
    "42325",
    "25920",
    "48271",
    "6859",
    "2041",
    "2114",
)


@pytest.mark.parametrize("section", SECTIONS[1:], ids=lambda section: section.splitlines()[0])
def test_a_section_prints_what_it_says(section, capsys):
    space = {"__name__": "mismatches"}
    for package in ("torch", "transformers", "flax", "keras"):
        if package in section + SECTIONS[0] and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for code, printed in [*SNIPPET.findall(SECTIONS[0]), *SNIPPET.findall(section)]:
        exec(compile(code, "docs/mismatches.md", "exec"), space)
        assert capsys.readouterr().out == printed
    assert "```python" in section or "benchmarks/compare.py" in section


def test_every_report_is_there():
    assert [word for word in REPORTED if word not in PAGE] == []


def test_the_counts_of_the_page_are_those_of_the_version_they_name(monkeypatch):
    """docs/identify.md is written by docs/norms.py; here its total is compared with the classes in the source."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.syspath_prepend(ROOT / "docs")
    from norms import find

    page = (ROOT / "docs" / "identify.md").read_text()
    version = re.search(r"^# The RMSNorms of transformers (\S+)$", page, re.MULTILINE)
    assert version is not None
    if version.group(1) != transformers.__version__:
        pytest.skip(f"the page is of {version.group(1)}, {transformers.__version__} is installed")
    rows = [int(count) for count in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    refused = int(re.search(r"^Not called: (\d+)\.$", page, re.MULTILINE).group(1))
    named, others = find("transformers")
    assert f"{sum(rows)} classes are RMSNorm" in page
    assert f"Each of the {len(rows)} rows" in page
    assert len(named) <= sum(rows) + refused <= len(named) + len(others)
