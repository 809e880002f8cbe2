"""The README and the documentation: what they show runs, tables are generated, links lead somewhere, names exist."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from commands import rmsnorm
from programs import printed
from snippets import ROOT, commands, run, snippets, stands_for
from typer.main import get_command

from rmsnorm import PRESETS
from rmsnorm.cli import app
from rmsnorm.specification.families import families as families_of_models

DOCS, README = ROOT / "docs", ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINKING = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"))]
ELSEWHERE = {"checking.md", "identify.md", "porting.md"}  # pages whose snippets other tests run
PRINTED = {  # a part of what the snippets of a page print; those of other pages assert, or are programs for commands
    "README": "tensor(1., grad_fn=<SelectBackward0>) tensor(0., ",
    "layers.md": "tensor(0., ",
    "variants.md": "LlamaRMSNorm is RMSNorm: the variant llama",
    "mathematics.md": "0.707 1.0",
    "exactness.md": "of the elements are not the nearest number",
    "performance.md": "NumPy: the golden, as ",
    "coming-from.md": "2 (LayerNorm): left; it computes LayerNorm",
}
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md")) if path.name not in ELSEWHERE}
PAGES["README"] = README  # each of whose snippets stands alone


@pytest.mark.parametrize("name", [name for name, path in PAGES.items() if snippets(path)])
def test_what_a_page_shows_runs(name, capsys, tmp_path, monkeypatch):
    """One snippet after the other, in a folder that has the files of those before it; then a question's commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names, said = {"__name__": "page"}, ""
    is_readme = name == "README"
    for snippet in snippets(PAGES[name]):
        run(snippet, {"__name__": "page"} if is_readme else names, tmp_path)
        lines = capsys.readouterr().out
        said += lines
        if "dry_run" in snippet and is_readme:
            assert lines.splitlines() == re.findall("^# (.*)$", snippet, re.MULTILINE), "comments are what it prints"
    assert PRINTED.get(name, "") in said
    for arguments, shown in commands(PAGES[name].read_text(encoding="utf-8")) if name == "coming-from.md" else []:
        printed_lines = rmsnorm(*arguments).stdout
        assert stands_for(shown).fullmatch(printed_lines), f"rmsnorm {' '.join(arguments)}\n{printed_lines}"


def test_the_command_of_the_readme_prints_the_lines_below_it():
    """Some lines of many: each of them is printed."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    ((arguments, lines),) = commands(TEXT)
    said = rmsnorm(*arguments, COLUMNS="1000").stdout.splitlines(keepends=True)
    assert not [line for line in lines.splitlines() if not any(map(stands_for(line).fullmatch, said))]


def test_what_stands_for_an_output():
    shown = stands_for("a  b ... d\n...\nlast\n")
    assert all(map(shown.fullmatch, ("a b c d\nlast\n", " a b 1 2 d\nx\ny\nlast\n")))
    assert not any(map(shown.fullmatch, ("a b c\nlast\n", "a b c d\nlast\nmore\n", "a b c d\nx last\n")))


def test_lines_that_do_not_run_here_stand_on_the_pages_that_say_more():
    """The commands of the README: tests run those pages."""
    lines = re.findall(r"^ {4}(rmsnorm (?!identify).*?) *(?:#.*)?$", TEXT, re.MULTILINE)
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("porting.md", "checking.md"))
    assert lines
    assert [line for line in lines if line not in pages] == []


TABLES = [
    ("docs/variants.md", "tools/families.py"), ("docs/compatibility.md", "tests/versions/run.py --table"),
    ("docs/variants.md", "rmsnorm variants --markdown"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "command"), TABLES)
def test_a_table_is_what_a_command_prints(page, command):
    is_ours = command.startswith("rmsnorm ")
    wanted = rmsnorm(*command.split()[1:]).stdout if is_ours else printed(*command.split(), cwd=ROOT, timeout=60)
    command = command if is_ours else f"python {command}"
    table = re.search(rf"<!-- {re.escape(command)} -->\n(.*?)<!-- end -->", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert table
    assert table[1] == wanted, f"put the output of `{command}` into {page}"


def test_the_families_are_many_and_their_variants_are_presets():
    families = families_of_models()
    assert {norm.variant for norms in families.values() for norm in norms} <= {None, *PRESETS}
    assert f"lists {len(families)} families" in TEXT


def test_the_versions_are_those_of_the_project():
    extras = PROJECT["optional-dependencies"]
    floors = [*PROJECT["dependencies"], *extras["torch"], *extras["tf"], *extras["flax"]]
    lowest = {"Python": PROJECT["requires-python"].removeprefix(">="), **dict(line.split(">=") for line in floors)}
    titles = {"Python": "Python", "NumPy": "numpy", "PyTorch": "torch", "Keras": "keras", "TensorFlow": "tensorflow"}
    named = re.search(r"It needs (.*?),\s+or newer", TEXT, re.DOTALL).group(1).replace(" and ", ", ").split(", ")
    titles |= {"JAX": "jax", "Flax": "flax"}
    assert named == [f"{title} {lowest[name]}" for title, name in titles.items()]


def test_commands_of_make_are_targets():
    """Those of the README, of CONTRIBUTING and of what CI runs."""
    targets = set(re.findall(r"^([\w-]+)(?: [\w-]+)*:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets |= {"docs-serve"}  # which stands beside docs
    pages = [*LINKING[:2], ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").iterdir(), *DOCS.rglob("*.md")]
    for page in pages:
        named = re.findall(r"(?:`|^ *|run: )make ([a-z][\w-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert not {*named} - targets, page
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_site_has_every_page_and_its_pictures_are_described():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    for path in DOCS.rglob("*.md"):
        for text, picture in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert text, f"{path.name}: {picture} has no description"
            assert (path.parent / picture).is_file()


def broken_links(page: Path) -> Iterator[str]:
    """Links of a page to files, headings and definitions that do not exist."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for path, anchor, name in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?(?: '(\w+)')?\)", text):
        target = (page.parent / path) if path else page
        if not target.exists():
            yield f"{page.name}: there is no file {path}"
        elif name and not re.search(rf"^ *(?:def|class) {name}\b", target.read_text(encoding="utf-8"), re.MULTILINE):
            yield f"{page.name}: {path} defines no {name}"
        elif anchor and target.parent.name != "api":  # whose headings are those of docstrings
            included = re.match("<!-- include (.*) -->", target.read_text(encoding="utf-8"))
            target = ROOT / included[1] if included else target
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
            if anchor not in slugs:
                yield f"{page.name}: {path} has no heading {anchor}"


def test_links_lead_to_files_headings_and_definitions(tmp_path):
    for page in (*LINKING, *DOCS.rglob("*.md")):
        assert not list(broken_links(page))
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](b.md) [c](#a-heading) [d](#another) [e](page.md 'nothing') [f](https://host/g)")
    assert [sentence.split(": ")[1] for sentence in broken_links(page)] == [
        "there is no file b.md", " has no heading another", "page.md defines no nothing",
    ]  # fmt: skip


def commands_of(command, name="rmsnorm"):
    parts = getattr(command, "commands", {})
    return [full for part, inner in parts.items() for full in commands_of(inner, f"{name} {part}")] or [name]


def test_functions_and_commands_that_are_named_exist():
    """Those of the first page; a framework that is not installed is left out. The page of commands has all of them."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`(rmsnorm(?:\.\w+)+)`", index)):
        needed = {"torch_impl": "torch", "tf_impl": "tensorflow", "flax_impl": "flax"}.get(name.split(".")[1], "numpy")
        if importlib.util.find_spec(needed) is not None:
            pkgutil.resolve_name(name)
    every = commands_of(get_command(app))
    page = (DOCS / "api" / "commands.md").read_text(encoding="utf-8")
    assert list(dict.fromkeys(re.findall(r"^\| `(rmsnorm(?: [a-z]+)+)", page, re.MULTILINE))) == every
    for words in set(re.findall(r"`(rmsnorm [a-z ]+?)(?: \S+\.onnx)?`", index)):
        assert any(f"{command} ".startswith(f"{words} ") for command in every), words


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_a_release_are_addresses():
    """A package index shows the README without the repository."""
    links = loaded(ROOT / ".github" / "links.py")
    released = links.absolute(TEXT, "https://host/owner/rmsnorm", "v1")
    assert "](https://host/owner/rmsnorm/blob/v1/docs/performance.md)" in released
    assert not re.findall(r"\]\((?!https?://)([^)]+)\)", released)
    table = tomllib.loads((ROOT / "pyproject.toml").read_text() + links.urls("https://host/owner/rmsnorm"))
    assert table["project"]["urls"]["Source"] == "https://host/owner/rmsnorm"
    assert {"Documentation", "Changelog"} < set(table["project"]["urls"])
