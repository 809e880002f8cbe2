"""The command ``rmsnorm``, called in the process of a test: a process of its own takes a second to start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from rmsnorm.cli import app


def rmsnorm(*arguments: Any, path: Path | None = None, typed: bytes | None = None, **environment: str) -> Result:
    """What ``rmsnorm`` with these arguments prints, and its exit status. An exception that no user sees is raised.

    Its workers are processes, which import from the folder ``path`` first.
    """
    return command(app, *arguments, path=path, typed=typed, **environment)


def command(
    program: Any, *arguments: Any, path: Path | None = None, typed: bytes | None = None, **environment: str
) -> Result:
    """The same of another program."""
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = CliRunner().invoke(program, list(map(str, arguments)), input=typed, env={"COLUMNS": "200", **environment})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done
