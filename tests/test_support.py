"""docs/support.md agrees with docs/support.toml, and every test that it names exists."""

import ast
import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("support", ROOT / "docs" / "support.py")
support = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(support)


def test_the_page_is_what_is_generated():
    assert (ROOT / "docs" / "support.md").read_text() == support.page(), "run python docs/support.py"


def test_every_test_that_is_named_exists():
    named = {
        test
        for features in tomllib.loads((ROOT / "docs" / "support.toml").read_text()).values()
        for cells in features.values()
        for backend in support.BACKENDS
        for test in support.tests(cells.get(backend))
    }
    assert len(named) > 50
    for test in named:
        path, *names = test.split("::")
        body = ast.parse((ROOT / "tests" / path).read_text()).body
        for name in names:
            matches = [node for node in body if getattr(node, "name", None) == name.split("[")[0]]
            assert matches, f"docs/support.toml names {test}, which does not exist"
            body = matches[0].body


def test_every_cell_is_yes_or_says_why_not():
    for features in tomllib.loads((ROOT / "docs" / "support.toml").read_text()).values():
        for feature, cells in features.items():
            assert set(cells) <= {*support.BACKENDS, "beyond"}, feature
            assert set(cells.get("beyond", [])) <= set(cells), feature
            for cell in (cells[backend] for backend in support.BACKENDS if backend in cells):
                assert "::" in cell or len(cell) > len("no: a reason"), feature
