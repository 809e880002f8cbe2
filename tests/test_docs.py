"""The documentation: its snippets and notebooks run, its tables are generated, and the site has every page."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import rmsnorm
from programs import printed
from snippets import commands, run, snippets, stands_for
from typer.main import get_command

from rmsnorm import PRESETS
from rmsnorm.cli import app
from rmsnorm.specification.families import families as families_of_models

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINKING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
ELSEWHERE = {"ci.md", "mismatches.md", "own-repository.md", "porting.md"}  # pages whose snippets other tests run
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name not in ELSEWHERE)
SNIPPETS = {path.relative_to(DOCS).as_posix(): snippets(path) for path in PAGES}
QUESTIONS = sorted((DOCS / "questions").glob("*.md"))
COMMANDS = {path.relative_to(DOCS).as_posix(): commands(path.read_text(encoding="utf-8")) for path in QUESTIONS}
PRINTED = {
    "layers.md": "tensor(0., ",
    "which.md": "LlamaRMSNorm is RMSNorm: the variant llama",
    "mathematics.md": "0.707 1.0",
    "troubleshooting.md": "there is no argument 'epsilon', expected 'normalized_shape', 'eps'",
    "exactness.md": "of the elements are not the nearest number",
    "performance.md": "NumPy: the golden, as ",
    "variants.md": "True",
    "signatures.md": "",  # it prints nothing, and asserts
    "coming-from.md": "1 (LlamaRMSNorm): now RMSNorm, variant llama, eps 1e-06",
    **dict.fromkeys(COMMANDS, ""),  # programs for commands, which print
}


@pytest.mark.parametrize("name", [name for name, texts in SNIPPETS.items() if texts])
def test_snippets_run(name, capsys, tmp_path, monkeypatch):
    """One after the other, as a reader runs them, then the commands, of which the page shows what they print."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for snippet in SNIPPETS[name]:
        run(snippet, names, tmp_path)
    assert PRINTED[name] in capsys.readouterr().out
    for arguments, shown in COMMANDS.get(name, []):
        said = rmsnorm(*arguments).stdout
        assert stands_for(shown).fullmatch(said), f"rmsnorm {' '.join(arguments)}\n{said}\nis not\n{shown}"


@pytest.mark.parametrize("path", QUESTIONS, ids=lambda path: path.stem)
def test_a_question_has_an_answer(path):
    """A right kernel and a wrong one, each with what the command says of it, and what to do."""
    text = path.read_text(encoding="utf-8")
    assert "**What to do.** " in text
    assert all(arguments[0] in ("check", "identify") and shown for arguments, shown in commands(text))
    assert len(commands(text)) == 2 or "both.py" in text, "one command for a file with both"


def test_what_stands_for_an_output():
    shown = stands_for("a  b ... d\n...\nlast\n")
    assert shown.fullmatch("a b c d\nlast\n")
    assert shown.fullmatch(" a b 1 2 d\nx\ny\nlast\n")
    assert not shown.fullmatch("a b c\nlast\n")
    assert not shown.fullmatch("a b c d\nlast\nmore\n")
    assert not shown.fullmatch("a b c d\nx last\n")


def test_every_printed_text_belongs_to_a_page():
    assert set(PRINTED) == {name for name, texts in SNIPPETS.items() if texts}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(DOCS.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive:UserWarning")
def test_notebooks_run(path, capsys, monkeypatch, tmp_path):
    """The code that was run last is the code in the file, and it prints what the file shows, but for times."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "__main__"}
    for cell in cells:
        run("".join(cell["source"]), names, tmp_path)
        shown = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
        printed = capsys.readouterr().out
        assert [line.split(":")[0] for line in printed.splitlines()] == [
            line.split(":")[0] for line in shown.splitlines()
        ]


def table(page, command):
    """The table that the command wrote into a page."""
    found = re.search(rf"<!-- {re.escape(command)} -->\n(.*?)<!-- end -->", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("docs/which.md", "docs/families.py"), ("docs/performance.md", "benchmarks/tables.py short"),
        ("docs/performance.md", "benchmarks/tables.py kernels"),
        ("docs/versions.md", "tests/versions/run.py --table"), ("README.md", "benchmarks/tables.py readme"),
        ("benchmarks/README.md", "benchmarks/tables.py all-layers"),
    ],
)  # fmt: skip
def test_tables_are_generated(page, command):
    wanted = printed(*command.split(), cwd=ROOT, timeout=60)
    assert table(page, f"python {command}") == wanted, f"put the output of `python {command}` into {page}"


def test_the_table_of_variants_is_what_the_command_prints():
    command = "rmsnorm variants --markdown"
    wanted = rmsnorm(*command.split()[1:]).stdout
    assert table("docs/variants.md", command) == wanted, f"put the output of `{command}` into docs/variants.md"


def test_the_families_are_many_and_their_variants_are_presets():
    families = families_of_models()
    assert len(families) >= 150
    assert {norm.variant for norms in families.values() for norm in norms} <= {None, *PRESETS}
    assert f"lists {len(families)} families" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_site_has_every_page():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


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


def test_functions_and_commands_that_are_named_exist():
    """Those of the first page; a framework that is not installed is left out."""
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(rmsnorm(?:\.\w+)+)`", page))
    commands = set(re.findall(r"`rmsnorm ([a-z ]+?)(?: \S+\.onnx)?`", page))
    assert len(names) >= 12
    assert len(commands) >= 8
    for name in names:
        needed = {"torch_impl": "torch", "tf_impl": "tensorflow", "flax_impl": "flax"}.get(name.split(".")[1], "numpy")
        if importlib.util.find_spec(needed) is not None:
            pkgutil.resolve_name(name)
    for words in commands:
        command = get_command(app)
        for word in words.split():
            command = command.commands[word]


def test_the_page_of_commands_has_every_command():
    def names(command, name):
        parts = getattr(command, "commands", {})
        return [full for part, inner in parts.items() for full in names(inner, f"{name} {part}")] or [name]

    page = (DOCS / "api" / "commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(rmsnorm(?: [a-z]+)+)", page, re.MULTILINE)
    assert list(dict.fromkeys(listed)) == names(get_command(app), "rmsnorm")


def test_the_site_links_to_a_definition_and_labels_cells():
    """The hooks of mkdocs: a link to a test is a page, at its line; a cell of a table has the title of its column."""
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    place = SimpleNamespace(url="numbers/", file=SimpleNamespace(src_uri="numbers.md"))

    def written(markdown):
        return hooks.on_page_markdown(markdown, page=place, config={"docs_dir": str(DOCS)})

    link = written("[x](../tests/test_docs.py 'test_pictures_are_described')")
    address, line = re.search(r'href="\.\./source/(.*)\.html#line-(\d+)"', link).groups()
    assert address == "tests/test_docs.py"
    assert Path(__file__).read_text().splitlines()[int(line) - 1] == "def test_pictures_are_described():"
    assert f'id="line-{line}"' in hooks.source(Path(__file__))
    with pytest.raises(ValueError, match="does not define test_nothing"):
        written("[x](../tests/test_docs.py 'test_nothing')")
    table = "<table><thead><tr><th></th><th>A</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>"
    assert '<td data-label="">1</td><td data-label="A">2</td>' in hooks.on_page_content(table)
    with pytest.raises(ValueError, match="became quotations"):
        hooks.on_page_content("<blockquote>\n<blockquote>\n<blockquote>\n<p>1 + 1")


def test_pictures_are_described():
    for path in DOCS.rglob("*.md"):
        for text, picture in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
            assert len(text) > 20, f"{path.name}: {picture} has no description"
            assert (path.parent / picture).is_file()
