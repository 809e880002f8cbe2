"""For mkdocs: pages from files and commands of the repository, a page for each linked file, formulas and tables."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r"<!-- include (?P<path>\S+) -->\n")
PRINTED = re.compile(r"<!-- output of python (?P<arguments>.+) -->\n")
LISTED = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n?")
FORMULA = re.compile(r"^\$\$\n(?P<tex>.+?)\n\$\$$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<path>[^)#\s]+)(?: '(?P<name>\w+)')?(?P<rest>[^)]*)\)")
TEXT = re.compile(r">[^<]+<")
NUMBER = re.compile(r"(?<=[>\s])\d[\d.]*e-\d+(?=[<\s,;:).])")  # which a browser breaks behind the hyphen
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
STYLE = (
    "body { margin: 1rem; font: 15px/1.5 system-ui, sans-serif } pre { overflow-x: auto } :target { background: #ff8 }"
)
linked: set[Path] = set()


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    folder = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def included(match: re.Match[str]) -> str:
        nonlocal folder
        folder = ROOT
        return (ROOT / match["path"]).read_text(encoding="utf-8")

    def link(match: re.Match[str]) -> str:
        """A link to a file of the repository leads to a page that shows it, at the definition of the name."""
        path = match["path"]
        if "://" in path or (target := (folder / path).resolve()).is_relative_to(config["docs_dir"]):
            return match[0] if folder != ROOT else match[0].replace("(docs/", "(")
        if not target.is_file():
            raise FileNotFoundError(f"{page.file.src_uri}: there is no {path}")
        linked.add(target)
        name = target.relative_to(ROOT).as_posix()
        address = posixpath.relpath(f"source/{name}.html", page.url or ".") + _anchor(target, match["name"])
        title = f"{name}: {match['name']}" if match["name"] else name
        return f'<a href="{address}" title="{title}">{match["text"]}</a>'

    markdown = PRINTED.sub(lambda match: _printed(match["arguments"]), INCLUDED.sub(included, markdown))
    return LINK.sub(link, FORMULA.sub(lambda match: _formula(match["tex"]), markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Each cell knows its column, which narrow screens write before it (docs/site.css)."""
    if re.search(r"<blockquote>\s*<blockquote>", html):
        raise ValueError("an example of a docstring became quotations: docs/docstrings.py must put it under Examples")

    def labelled(match: re.Match[str]) -> str:
        heads = [re.sub("<.*?>", "", head) for head in re.findall(r"<th(?: [^>]*)?>(.*?)</th>", match[0], re.DOTALL)]
        cells = iter(heads * match[0].count("<tr>"))
        return re.sub(r"<td", lambda _: f'<td data-label="{escape(next(cells), quote=True)}"', match[0])

    html = TEXT.sub(lambda match: NUMBER.sub(r'<span class="number">\g<0></span>', match[0]), html)
    return TABLE.sub(labelled, html)


def on_post_build(*, config: Any, **_: Any) -> None:
    for path in sorted(linked):
        page = Path(config["site_dir"]) / "source" / f"{path.relative_to(ROOT).as_posix()}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(source(path), encoding="utf-8")


def source(path: Path) -> str:
    """A page that shows a file: Markdown as such, everything else line by line."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import guess_lexer_for_filename

    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    style = HtmlFormatter(linespans="line")
    if path.suffix == ".md":
        import markdown

        body = markdown.markdown(text, extensions=["tables", "fenced_code"])
    else:
        body = highlight(text, guess_lexer_for_filename(path.name, text), style)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}\n{style.get_style_defs()}</style></head>\n<body><h1>{name}</h1>\n{body}</body></html>\n"
    )


def _anchor(path: Path, name: str | None) -> str:
    if name is None:
        return ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(rf"\s*(?:async )?(?:def|class) {name}\b", line):
            return f"#line-{number}"
    raise ValueError(f"{path.relative_to(ROOT)} does not define {name}")


def _printed(arguments: str) -> str:
    """What a command prints, without its heading and without lists of commands, whose sentences typer cuts."""
    command = [sys.executable, *arguments.split()]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.partition("\n")[2]
    return LISTED.sub("", printed)


def _formula(tex: str) -> str:
    """MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    return convert(tex, display="block")
