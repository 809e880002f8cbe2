"""Python programs that tests start, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def finished(
    *arguments: Any, timeout: float = 300.0, path: Path | None = None, cwd: Path | None = None, **changes: str | None
) -> subprocess.CompletedProcess[str]:
    """How ``python ARGUMENTS`` ended, and what it printed.

    It imports from the folder ``path`` first, and ``changes`` are variables of its environment; None removes one.
    """
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment, check=False,
    )  # fmt: skip


def printed(*arguments: Any, **options: Any) -> str:
    """What ``python ARGUMENTS`` prints, which has to succeed."""
    done = finished(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
