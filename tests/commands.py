"""The command ``rmsnorm``, called in the process of a test: a process of its own takes a second to start."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from rmsnorm.cli import app


def rmsnorm(*arguments: Any, path: Path | None = None, typed: bytes | None = None, **environment: str) -> Result:
    """What ``rmsnorm`` with these arguments prints, and its exit status. An exception that no user sees is raised.

    A target is asked in this process, where it is imported from the folder ``path`` first.
    """
    folders, modules = [*sys.path], {*sys.modules}
    if path is not None:
        sys.path.insert(0, str(path))
    try:
        return command(app, *arguments, path=path, typed=typed, **environment)
    finally:
        sys.path[:] = folders
        for name in {"own", "norms", "elsewhere", "elsewhere.norms"} - modules:
            sys.modules.pop(name, None)  # the next test has another one of that name


def command(
    program: Any, *arguments: Any, path: Path | None = None, typed: bytes | None = None, **environment: str
) -> Result:
    """The same of another program, whose processes import from the folder ``path`` first."""
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = CliRunner().invoke(program, list(map(str, arguments)), input=typed, env={"COLUMNS": "200", **environment})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
