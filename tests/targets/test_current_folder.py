"""The current folder has a module for a worker only where the target is one of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import rmsnorm

NORM = """import numpy as np
def norm(x):
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
"""
ASKED = ("--framework", "numpy", "--dtype", "float32")


@pytest.mark.parametrize("command", [("check", *ASKED), ("identify", "--framework", "numpy")])
def test_what_lies_beside_a_target_that_is_no_module_of_the_folder_is_not_run(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "norms.py").write_text(NORM)
    for name in ("json", "queue", "rich", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was run')\n")
    done = rmsnorm(command[0], "elsewhere/norms.py:norm", *command[1:])
    assert done.exit_code == 0, done.output
    for name in ("json", "queue", "rich", "ml_dtypes"):
        (tmp_path / f"{name}.py").unlink()
    done = rmsnorm(command[0], "elsewhere.norms:norm", *command[1:])  # a module of this folder
    assert done.exit_code == 0, done.output
