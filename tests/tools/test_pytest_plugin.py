"""The fixture `rmsnorm_parity` in a user's project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def _pytest(folder: Path, *arguments: str, **environment: str) -> Any:
    """Runs pytest in a user's project."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def _loaded(folder: Path, *arguments: str) -> set[str]:
    (folder / "test_empty.py").write_text("def test_nothing():\n    pass\n")
    (folder / "conftest.py").write_text(
        "import json, pathlib, sys\n\n"
        "def pytest_unconfigure():\n"
        "    pathlib.Path('loaded.json').write_text(json.dumps(sorted(sys.modules)))\n"
    )
    done = _pytest(folder, "--collect-only", *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return set(json.loads((folder / "loaded.json").read_text()))


def test_a_session_that_does_not_use_it_loads_nothing(tmp_path: Path) -> None:
    with_it = _loaded(tmp_path, "-p", "rmsnorm.parity.pytest_plugin")
    without = _loaded(tmp_path)
    ours = {name for name in with_it - without if not name.startswith("rmsnorm")}
    assert "rmsnorm.parity.pytest_plugin" in with_it
    assert not {name.split(".")[0] for name in ours} & {"numpy", "ml_dtypes", "rich", "torch", "jax", "tensorflow"}
    assert {name for name in with_it if name.startswith("rmsnorm.parity")} == {
        "rmsnorm.parity", "rmsnorm.parity.pytest_plugin",
    }  # fmt: skip
    assert "numpy" in _loaded(tmp_path, "-p", "rmsnorm.parity.checking"), "the test can see what is loaded"


PROJECT = """
import numpy as np

def mine(x, weight):
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)).astype(x.dtype)

def test_right(rmsnorm_parity):
    report = rmsnorm_parity(mine, variant="transformer_engine", framework="numpy", dtypes="float32")
    assert report.passed

def test_wrong(rmsnorm_parity):
    rmsnorm_parity(mine, variant="standard", framework="numpy", dtypes="float32")

def test_mistaken(rmsnorm_parity):
    rmsnorm_parity(mine, variant="standrad")

def test_mistaken_option(rmsnorm_parity):
    rmsnorm_parity(mine, dtype="float32")
"""


FEW = """
from rmsnorm.parity import asking

every = asking.circumstances
asking.circumstances = lambda *levels, **options: every(*levels, **options)[::8]  # all of them take seconds
"""


def test_a_users_test(tmp_path: Path) -> None:
    """pytest loads the plugin by its entry point. A failure shows the report without a traceback, in JUnit too."""
    (tmp_path / "conftest.py").write_text(FEW)
    (tmp_path / "test_mine.py").write_text(PROJECT)
    done = _pytest(tmp_path, "--junitxml", "parity.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 failed, 1 passed" in done.stdout
    text = (tmp_path / "parity.xml").read_text()
    for output in (done.stdout, text):
        assert "test_mine:mine is not standard: eps is 1e-05, standard has 1e-06" in output
        assert "mend: take eps 1e-06" in output
        assert " f32 y: at (" in output
    assert "did you mean 'standard'?" in done.stdout
    assert "rmsnorm_parity: got an unexpected keyword argument 'dtype', expected some of variant, " in done.stdout
    assert "During handling" not in done.stdout, "one failure has one message"
    assert "rmsnorm/" not in done.stdout.replace("rmsnorm/parity/pytest_plugin", ""), "no traceback through rmsnorm"
