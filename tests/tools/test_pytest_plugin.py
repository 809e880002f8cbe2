"""The fixture `rmsnorm_parity` in a user's project, which is the one that docs/checking.md and its workflow show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from programs import finished
from snippets import ROOT, snippets

QUIET = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def loaded(folder: Path, *arguments: str) -> set[str]:
    (folder / "test_empty.py").write_text("def test_nothing():\n    pass\n")
    (folder / "conftest.py").write_text(
        "import json, pathlib, sys\n\n"
        "def pytest_unconfigure():\n"
        "    pathlib.Path('loaded.json').write_text(json.dumps(sorted(sys.modules)))\n"
    )
    done = finished(*QUIET, "--collect-only", *arguments, cwd=folder, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return set(json.loads((folder / "loaded.json").read_text()))


def test_a_session_that_does_not_use_it_loads_nothing(tmp_path: Path) -> None:
    with_it, without = loaded(tmp_path, "-p", "rmsnorm.parity.pytest_plugin"), loaded(tmp_path)
    ours = {name for name in with_it - without if not name.startswith("rmsnorm")}
    assert not {name.split(".")[0] for name in ours} & {"numpy", "ml_dtypes", "rich", "torch", "jax", "tensorflow"}
    parity = {name for name in with_it if name.startswith("rmsnorm.parity")}
    assert parity == {"rmsnorm.parity", "rmsnorm.parity.pytest_plugin"}
    assert "numpy" in loaded(tmp_path, "-p", "rmsnorm.parity.checking"), "the test can see what is loaded"


FEW = """
from rmsnorm.parity import asking

every = asking.circumstances
asking.circumstances = lambda *levels, **options: every(*levels, **options)[::30]  # all of them take seconds
"""
MISTAKES = """

def test_mistaken(rmsnorm_parity):
    rmsnorm_parity(my_norm, variant="lama")


def test_mistaken_option(rmsnorm_parity):
    rmsnorm_parity(my_norm, dtype="float32")
"""


def test_a_users_project(tmp_path: Path) -> None:
    """pytest loads the plugin by its entry point. A failure shows the report without a traceback, in JUnit too."""
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    (tmp_path / "conftest.py").write_text(FEW)
    for snippet in snippets(ROOT / "docs" / "checking.md")[:2]:
        path = tmp_path / snippet.split()[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(snippet)
    install, test = re.findall(r"- run: (?:pip|python) (.*)", (ROOT / "examples" / "ci.yml").read_text())
    assert install.startswith("install")
    done = finished(*test.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'tests="1"' in (tmp_path / "parity.xml").read_text()
    norm = tmp_path / "my_norm.py"
    norm.write_text(norm.read_text().replace("1e-6", "1e-5"))
    path.write_text(path.read_text() + MISTAKES)
    done = finished(*test.split(), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 failed" in done.stdout
    for output in (done.stdout, (tmp_path / "parity.xml").read_text()):
        assert "my_norm:my_norm is not llama: eps is 1e-05, llama has 1e-06" in output
        assert "mend: take eps 1e-06" in output
        assert " y: at (" in output
    assert "did you mean 'llama'?" in done.stdout
    assert "rmsnorm_parity: got an unexpected keyword argument 'dtype', expected some of variant, " in done.stdout
    assert "During handling" not in done.stdout, "one failure has one message"
    assert "rmsnorm/" not in done.stdout.replace("rmsnorm/parity/pytest_plugin", ""), "no traceback through rmsnorm"
    assert "rmsnorm_parity(my_norm" not in done.stdout, "nor one through the test"
