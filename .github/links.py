"""Before a release: links of README.md and the URLs of the project, which a package index needs in full.

python .github/links.py https://github.com/OWNER/rmsnorm v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def absolute(readme: str, url: str, tag: str) -> str:
    """The README with its relative links, and those of pictures, as addresses.

    >>> absolute("![a](docs/a.svg) [b](docs/b.md) [c](https://d)", "https://h/o/r", "v1")
    '![a](https://h/o/r/raw/v1/docs/a.svg) [b](https://h/o/r/blob/v1/docs/b.md) [c](https://d)'
    """

    def link(match: re.Match[str]) -> str:
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({url}/{kind}/{tag}/{match['path']})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^]]*)\]\((?!https?:|#)(?P<path>[^)]+)\)", link, readme)


def urls(url: str) -> str:
    """The section of pyproject.toml."""
    entries = {"Documentation": f"{url}/tree/main/docs", "Changelog": f"{url}/blob/main/CHANGELOG.md",
               "Source": url, "Issues": f"{url}/issues"}  # fmt: skip
    return "\n[project.urls]\n" + "".join(f'{name} = "{address}"\n' for name, address in entries.items())


if __name__ == "__main__":
    root, (url, tag) = Path(__file__).parents[1], sys.argv[1:]
    readme, project = root / "README.md", root / "pyproject.toml"
    readme.write_text(absolute(readme.read_text(encoding="utf-8"), url, tag), encoding="utf-8")
    project.write_text(project.read_text(encoding="utf-8") + urls(url), encoding="utf-8")
