"""For mkdocs: pages that are files of the repository, and links to its files, which a site does not have."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r"<!-- include (?P<path>\S+) -->\n")
LINK = re.compile(r"(?<!!)\[(?P<text>[^]]*)\]\((?P<path>[^)#\s]+)(?P<rest>[^)]*)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    folder = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def included(match: re.Match[str]) -> str:
        nonlocal folder
        folder = ROOT
        return (ROOT / match["path"]).read_text(encoding="utf-8")

    def link(match: re.Match[str]) -> str:
        """A link that leaves the site: to the repository where its address is known, else the name of the file."""
        path = match["path"]
        if "://" in path or (target := (folder / path).resolve()).is_relative_to(config["docs_dir"]):
            return match[0] if folder != ROOT else match[0].replace("(docs/", "(")
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri}: there is no {path}")
        name = target.relative_to(ROOT).as_posix()
        url = os.environ.get("REPOSITORY_URL")
        if match["rest"] and not url:  # the name of a test
            return f'<abbr title="{name}: {match["rest"].strip()[1:-1]}">{match["text"]}</abbr>'
        return f"[{match['text']}]({url}/blob/main/{name})" if url else f"{match['text']} (`{name}`)"

    return LINK.sub(link, INCLUDED.sub(included, markdown))
