"""Which tests a change needs first: the tests of each part of the package, and what git says is different.

The table of parts in CONTRIBUTING.md says which part stands on which. `selection.py` decides how many cases of each
test run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_ROW = re.compile(r"^\| (?P<names>`[^|]+`) \|[^|]+\|(?P<allowed>[^|]*)\|$", re.MULTILINE)
_ROWS = [
    (re.findall(r"`(\w+)`", row["names"]), set(re.findall(r"`(\w+)`", row["allowed"])))
    for row in _ROW.finditer((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
]
ALLOWED = {names[0]: allowed for names, allowed in _ROWS}  # what each part may import, the lowest part first
PART = {name: names[0] for names, _ in _ROWS for name in names}  # by file or folder of the package

_OF_EVERY_FRAMEWORK = [
    *("tests/test_interface.py", "tests/test_numbers.py", "tests/test_gate.py", "tests/test_fuzz.py"),
    *("tests/test_l2_norm.py", "tests/test_engines.py", "tests/test_hard_cases.py", "tests/test_signatures.py"),
    "tests/layers",
    "tests/test_private.py",
]
# The files and folders of tests of each part, those that are likely to notice most first.
TESTS = {
    "specification": ["tests/specification", "tests/test_interface.py", "tests/test_imports.py", "tests/targets"],
    "files": [
        "tests/identify/test_checkpoint.py",
        "tests/nematus/test_hostile_files.py",
        "tests/nematus/test_damaged_files.py",
        "tests/cli",
    ],
    "gpu": ["tests/gpu"],
    "cpu": [
        *("tests/cpu", "tests/torch_impl/test_torch.py", "tests/torch_impl/test_torch_rows.py"),
        *("tests/test_numbers.py", "tests/test_gate.py", "tests/test_engines.py", "tests/test_explain.py"),
    ],
    "numpy_impl": ["tests/numpy_impl", *_OF_EVERY_FRAMEWORK, "tests/test_quantised.py"],
    "torch_impl": ["tests/torch_impl", *_OF_EVERY_FRAMEWORK],
    "flax_impl": ["tests/flax_impl", *_OF_EVERY_FRAMEWORK],
    "tf_impl": ["tests/tf_impl", *_OF_EVERY_FRAMEWORK],
    "accuracy": ["tests/parity", "tests/identify", "tests/test_numbers.py", "tests/test_accuracy_page.py"],
    "targets": ["tests/targets", "tests/identify"],
    "identify": ["tests/identify", "tests/parity/test_zoo.py"],
    "parity": ["tests/parity", "tests/test_quantised.py", "tests/test_quantised_formats.py"],
    "conversion": ["tests/conversion"],
    "nematus": ["tests/nematus"],
    "explaining": ["tests/test_explain.py"],
    "rmsnorm": ["tests/test_imports.py", "tests/test_interface.py", "tests/test_signatures.py"],
    "cli": ["tests/cli", "tests/test_readme.py"],
    # Beside the package:
    "benchmarks": ["tests/bench", "tests/test_results.py"],
    "experiments": ["tests/experiments", "tests/test_experiments"],
    "docs": [
        *("tests/test_docs.py", "tests/test_readme.py", "tests/test_accuracy_page.py", "tests/test_support.py"),
        *("tests/parity/test_ci_page.py", "tests/nematus/test_porting_page.py"),
    ],
}


def part_of(path: str) -> str | None:
    """The part that a file of the repository belongs to, as ``cpu`` for ``rmsnorm/cpu/launch.py``."""
    first, _, rest = path.partition("/")
    if first == "rmsnorm":
        return PART.get(rest.partition("/")[0].removesuffix(".py"), "rmsnorm")
    return "docs" if path == "README.md" else first if first in TESTS else None


@dataclass(frozen=True)
class Change:
    """What a change touches."""

    files: frozenset[str]  # from the root of the repository; folders, too

    @property
    def touched(self) -> list[str]:
        return sorted({part for path in self.files if (part := part_of(path))})

    @property
    def above(self) -> list[str]:
        """The parts that stand directly on those; the pages stand on every part of the package."""
        touched = set(self.touched)
        parts = [part for part, allowed in ALLOWED.items() if allowed & touched and part not in touched]
        return [*parts, *(["docs"] if touched & set(ALLOWED) and "docs" not in touched else [])]

    def relation(self, test: str, framework: str) -> str:
        """Of a test in this file, of one framework or "": "changed", "above" for what stands on that, or "other"."""
        if test in self.files or self._helps(test) or any(_tests(part, test, framework) for part in self.touched):
            return "changed"
        return "above" if any(_tests(part, test, framework) for part in self.above) else "other"

    def _helps(self, test: str) -> bool:
        """Whether the test imports or starts a file of tests/ that changed, or a conftest.py of its folder did."""
        helpers = [Path(path) for path in self.files if path.startswith("tests/") and path.endswith(".py")]
        nearest = [path.parent for path in helpers if path.name == "conftest.py" and path.parent != Path("tests")]
        if Path(test).parent in nearest:
            return True
        names = "|".join(re.escape(path.stem) for path in helpers if not path.stem.startswith(("test_", "conftest")))
        return bool(names) and bool(re.search(rf"(import|from) ({names})\b|\b({names})\.py", _text(test)))


@cache
def _text(test: str) -> str:
    return (ROOT / test).read_text(encoding="utf-8")


def _tests(part: str, test: str, framework: str) -> bool:
    """Whether it is a test of the part; a case of one framework tests no implementation of another one."""
    other = framework != "" and part.endswith("_impl") and part != f"{framework}_impl"
    return not other and any(test.startswith(start) for start in TESTS[part])


def _git(root: Path, *arguments: str) -> list[str]:
    """The lines of the answer; none where git, the repository or what is asked for is missing."""
    try:
        answer = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.splitlines()


def commit(root: Path = ROOT) -> str | None:
    """The name of the commit; None where the folder is not the root of a repository, as that of an sdist."""
    top = _git(root, "rev-parse", "--show-toplevel")
    return next(iter(_git(root, "rev-parse", "HEAD")), None) if top and Path(top[0]) == root.resolve() else None


def since_main(root: Path = ROOT) -> Change | None:
    """What differs from where this branch left main, or, on main, from its commit before; None where git cannot say."""
    head = commit(root)
    bases = _git(root, "merge-base", "HEAD", "main") or _git(root, "merge-base", "HEAD", "origin/main")
    if bases == [head]:
        bases = _git(root, "rev-parse", "--verify", "-q", "HEAD~1")
    if not head or not bases:
        return None
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return Change(frozenset([*_git(root, "diff", "--name-only", "--no-renames", bases[0]), *new]))


def of(paths: Iterable[str]) -> Change:
    """The change of these paths, which a comma may join."""
    names = frozenset(name.strip().strip("/") for text in paths for name in text.split(",") if name.strip())
    for name in names:
        if not (ROOT / name).exists():
            raise ValueError(f"--changed names {name!r}, expected files or folders from the root of the repository")
    return Change(names)
