"""For mkdocs: pages from files and commands of the repository, links to its files, and formulas."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r"<!-- include (?P<path>\S+) -->\n")
PRINTED = re.compile(r"<!-- output of python (?P<arguments>.+) -->\n")
LISTED = re.compile(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n?")  # lists of commands, whose sentences typer cuts
FORMULA = re.compile(r"^\$\$\n(?P<tex>.+?)\n\$\$$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    from latex2mathml.converter import convert

    is_included = INCLUDED.match(markdown) is not None
    folder = ROOT if is_included else Path(config["docs_dir"]) / Path(page.file.src_uri).parent
    markdown = INCLUDED.sub(lambda match: (ROOT / match["path"]).read_text(encoding="utf-8"), markdown)
    markdown = FORMULA.sub(lambda match: convert(match["tex"], display="block"), markdown)
    markdown = PRINTED.sub(lambda match: _printed(match["arguments"]), markdown)
    return LINK.sub(lambda match: _link(match, folder, Path(config["docs_dir"]), page.file.src_uri), markdown)


def _link(match: re.Match[str], folder: Path, docs: Path, page: str) -> str:
    """A link to a page stays; one to a file of the repository becomes the name of the file."""
    target = (folder / match["path"]).resolve()
    if not target.exists():
        raise FileNotFoundError(f"{page}: there is no {match['path']}")
    if target.is_relative_to(docs):
        own = (docs / page).parent
        return f"[{match['text']}]({os.path.relpath(target, own)}{match['anchor'] or ''})"
    return f"{match['text']} (`{target.relative_to(ROOT).as_posix()}`)"


def _printed(arguments: str) -> str:
    """What a command prints, without its heading."""
    command = [sys.executable, *arguments.split()]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return LISTED.sub("", printed.partition("\n")[2])
