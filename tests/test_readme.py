"""The README: it is short, and its snippets run."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from snippets import run, snippets

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = snippets(ROOT / "README.md")


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippets_run(snippet, capsys, tmp_path, monkeypatch):
    """Each one alone: a reader copies one of them."""
    monkeypatch.chdir(tmp_path)
    run(snippet, {"__name__": "readme"}, tmp_path)
    printed = capsys.readouterr().out
    if "The square" in snippet or "overflows" in snippet:
        assert printed.startswith("tensor(1., ")
        assert "tensor(0., " in printed


def test_it_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 120, "move a part of it to a page of docs/, and link to that"


def test_lines_that_do_not_run_here_stand_on_the_pages_that_say_more():
    """The commands and the user's test: tests run those pages."""
    lines = re.findall(r"^ {4} *((?:rmsnorm|def|rmsnorm_parity)\b.*?) *(?:#.*)?$", README, re.MULTILINE)
    names = ("coming-from.md", "porting.md", "ci.md")
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in names)
    assert len(lines) == 8
    assert [line for line in lines if line not in pages] == []


def test_the_two_commands_are_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_links_of_a_release_are_addresses():
    """A package index shows the README without the repository."""
    spec = importlib.util.spec_from_file_location("links", ROOT / ".github" / "links.py")
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    released = links.absolute(README, "https://host/owner/rmsnorm", "v1")
    assert "](https://host/owner/rmsnorm/raw/v1/docs/images/torch.svg)" in released
    assert not re.findall(r"\]\((?!https?://)([^)]+)\)", released)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text() + links.urls("https://host/owner/rmsnorm"))
    assert table["project"]["urls"]["Source"] == "https://host/owner/rmsnorm"
    assert {"Documentation", "Changelog"} < set(table["project"]["urls"])


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "rmsnorm" / "py.typed").is_file()
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()
