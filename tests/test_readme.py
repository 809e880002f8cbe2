"""The README: its snippets run, and what it says of other files is so."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from commands import rmsnorm
from snippets import commands, run, snippets, stands_for

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


def test_replace_prints_what_stands_below_it(capsys, tmp_path):
    (snippet,) = [snippet for snippet in SNIPPETS if "dry_run" in snippet]
    run(snippet, {"__name__": "readme"}, tmp_path)
    assert capsys.readouterr().out.splitlines() == re.findall("^# (.*)$", snippet, re.MULTILINE)


def test_identify_prints_the_lines_that_stand_here():
    """Some lines of many: each of them is printed."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    ((arguments, lines),) = commands(README)
    printed = rmsnorm(*arguments, COLUMNS="1000").stdout.splitlines(keepends=True)
    for line in lines.splitlines():
        assert any(map(stands_for(line).fullmatch, printed)), line


def test_lines_that_do_not_run_here_stand_on_the_pages_that_say_more():
    """The commands and the user's test: tests run those pages."""
    lines = re.findall(r"^ {4} *((?:rmsnorm|def|rmsnorm_parity)\b.*?) *(?:#.*)?$", README, re.MULTILINE)
    pages = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("porting.md", "ci.md"))
    assert len(lines) == 3
    assert [line for line in lines if line not in pages] == []


def test_the_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    floors = [*project["dependencies"], *extras["torch"], *extras["tf"], *extras["flax"]]
    lowest = {"Python": project["requires-python"].removeprefix(">="), **dict(line.split(">=") for line in floors)}
    named = re.search("It needs (.*?), or newer", README).group(1).replace(" and ", ", ").split(", ")
    packages = {"NumPy": "numpy", "PyTorch": "torch", "Keras": "keras", "TensorFlow": "tensorflow", "JAX": "jax"}
    titles = {"Python": "Python", **packages, "Flax": "flax"}
    assert named == [f"{title} {lowest[name]}" for title, name in titles.items()]


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
    assert "](https://host/owner/rmsnorm/blob/v1/docs/gpu.md)" in released
    assert not re.findall(r"\]\((?!https?://)([^)]+)\)", released)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text() + links.urls("https://host/owner/rmsnorm"))
    assert table["project"]["urls"]["Source"] == "https://host/owner/rmsnorm"
    assert {"Documentation", "Changelog"} < set(table["project"]["urls"])


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "rmsnorm" / "py.typed").is_file()
    assert "Typing :: Typed" in (ROOT / "pyproject.toml").read_text()
