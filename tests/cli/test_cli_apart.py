"""Commands work in a process of their own: what a target does to that is a sentence and exit status 1."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NORM = """
import os, sys
import numpy as np

def norm(x, weight):
    {line}
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)).astype(x.dtype)
"""
SOON = (  # the command, with another time limit
    "import sys, rmsnorm.targets.apart as apart\nrun, before = apart.subprocess.run, sys.argv.pop(1)\n"
    "def sooner(*how, timeout, **more):\n    print(timeout)\n    return run(*how, timeout=float(before), **more)\n"
    "apart.subprocess.run = sooner\n"
    "from rmsnorm.cli import main\nmain()"
)


def ended(
    folder: Path, *arguments: Any, line: str = "", limit: float | None = None
) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(NORM.format(line=line))
    start = ["-m", "rmsnorm"] if limit is None else ["-c", SOON, str(limit)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=120,
        env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [("os._exit(0)", "its process ended with exit status 0"), ("os.abort()", "its process was ended by SIGABRT")],
)
def test_a_target_that_ends_its_process_is_no_success(line: str, words: str, tmp_path: Path) -> None:
    options = ("own.py:norm", "--framework", "numpy")
    done = ended(tmp_path, "check", *options, "--json", "a.json", line=line)
    assert (done.returncode, done.stdout) == (1, f"own.py:norm was not compared: {words}\n")
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    assert (backend["status"], backend["message"]) == ("crashed", words)
    done = ended(tmp_path, "identify", *options, "--json", line=line)
    assert (done.returncode, json.loads(done.stdout)["defects"]) == (1, [words])


def test_a_target_that_hangs_is_ended(tmp_path: Path) -> None:
    options = ("own.py:norm", "--framework", "numpy")
    done = ended(tmp_path, "check", *options, "--json", "a.json", line="while True: pass", limit=6)
    assert done.returncode == 1
    assert done.stdout == "3600.0\nown.py:norm was not compared: its process did not answer within 3600 seconds\n"
    assert json.loads((tmp_path / "a.json").read_text())["backends"][0]["status"] == "hung"
    done = ended(tmp_path, "identify", *options, "--time-limit", "2", line="while True: pass", limit=6)
    assert done.returncode == 1
    assert "is not recognised: its process did not answer within 302 seconds" in done.stdout


def test_what_a_target_prints_is_not_in_the_report(tmp_path: Path) -> None:
    line = "print('words'); os.write(1, b'bytes')"
    done = ended(tmp_path, "identify", "own.py:norm", "--framework", "numpy", "--json", line=line)
    assert (done.returncode, json.loads(done.stdout)["kind"]) == (0, "rmsnorm")
    assert "words" in done.stderr
    assert "bytes" in done.stderr


def test_a_pipe_that_is_closed_and_a_mistake_end_as_in_one_process(tmp_path: Path) -> None:
    ended(tmp_path, "variants")
    command = f"{sys.executable} -m rmsnorm check own.py:norm --framework numpy --dtype float32; echo $? >&2"
    done = subprocess.run(
        ["sh", "-c", f"({command}) | true"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert re.fullmatch("asking own.py:norm: .*\n1\n", done.stderr)
    assert ended(tmp_path, "check", "own.py:nothing").returncode == 2


def test_a_backend_that_crashes_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, rmsnorm.parity.backends as backends\n"
        "every = backends.open_backend\n"
        "def opened(key, device):\n"
        "    return every(key, device) if key == 'numpy' else os.kill(os.getpid(), signal.SIGKILL)\n"
        "backends.open_backend = opened\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = ["selftest", "--backend", "torch", "--backend", "numpy", "--variant", "t5", "--dtype", "float32"]
    done = subprocess.run(
        [sys.executable, "-m", "rmsnorm", *words, "--json", "a.json"], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "PyTorch crashed: its process was ended by SIGKILL\n" in done.stdout
    assert "NumPy held: all" in done.stdout
    document = json.loads((tmp_path / "a.json").read_text())
    assert {record["backend"] for record in document["records"]} == {"numpy"}
