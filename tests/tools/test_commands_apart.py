"""Commands work in a process of their own: what a target does to it is a sentence, and none outlives the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from programs import finished

NORM = """
import os, sys, time
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
OWN = ("own.py:norm", "--framework", "numpy")


def ended(folder: Path, *arguments: Any, line: str = "", limit: float | None = None) -> Any:
    (folder / "own.py").write_text(NORM.format(line=line))
    start = ["-m", "rmsnorm"] if limit is None else ["-c", SOON, limit]
    return finished(*start, *arguments, cwd=folder, timeout=120, PYTHONPATH=os.pathsep.join(sys.path))


HANGS = "while True: pass"
TIMES = "its process did not answer within {} seconds"


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("os._exit(0)", "crashed", "its process ended with exit status 0"),
        ("os.abort()", "crashed", "its process was ended by SIGABRT"),
        (HANGS, "hung", TIMES.format(3600)),
    ],
)
def test_a_target_that_ends_its_process_or_hangs_is_no_success(
    line: str, status: str, words: str, tmp_path: Path
) -> None:
    limit = 6 if line == HANGS else None
    start = "3600.0\n" if limit else ""
    done = ended(tmp_path, "check", *OWN, "--json", "a.json", line=line, limit=limit)
    assert done.returncode == 1
    assert done.stdout == f"{start}own.py:norm was not compared: {words}\n"
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    assert (backend["status"], backend["message"]) == (status, words)
    done = ended(tmp_path, "identify", *OWN, "--time-limit", "2", line=line, limit=limit)
    assert done.returncode == 1
    assert f"is not recognised: {TIMES.format(302) if limit else words}" in done.stdout


def test_what_a_target_prints_is_not_in_the_report(tmp_path: Path) -> None:
    done = ended(tmp_path, "identify", *OWN, "--json", line="print('words'); os.write(1, b'bytes')")
    assert (done.returncode, json.loads(done.stdout)["kind"]) == (0, "rmsnorm")
    assert "words" in done.stderr
    assert "bytes" in done.stderr


def test_a_pipe_that_is_closed_and_a_mistake_end_as_in_one_process(tmp_path: Path) -> None:
    assert ended(tmp_path, "check", "own.py:nothing").returncode == 2
    command = f"{sys.executable} -m rmsnorm check {' '.join(OWN)} --dtype float32; echo $? >&2"
    done = subprocess.run(
        ["sh", "-c", f"({command}) | true"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert re.fullmatch("asking own.py:norm: .*\n1\n", done.stderr)


def test_a_backend_that_crashes_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, rmsnorm.parity.backends as backends\n"
        "every = backends.open_backend\n"
        "def opened(key, device):\n"
        "    return every(key, device) if key == 'numpy' else os.kill(os.getpid(), signal.SIGKILL)\n"
        "backends.open_backend = opened\n"
    )
    words = ["--backend", "torch", "--backend", "numpy", "--variant", "t5", "--dtype", "float32", "--json", "a.json"]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = finished("-m", "rmsnorm", "selftest", *words, cwd=tmp_path, timeout=120, PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    assert "PyTorch crashed: its process was ended by SIGKILL\n" in done.stdout
    assert "NumPy held: all" in done.stdout
    document = json.loads((tmp_path / "a.json").read_text())
    assert {record["backend"] for record in document["records"]} == {"numpy"}


def waited(condition: Any, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not in {seconds} s")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked for its status


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_identify(tmp_path: Path, number: int) -> None:
    (tmp_path / "own.py").write_text(NORM.format(line="open('pid', 'w').write(str(os.getpid())); time.sleep(100)"))
    process = subprocess.Popen(
        [sys.executable, "-m", "rmsnorm", "identify", *OWN, "--time-limit", "90"], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    pid = tmp_path / "pid"
    worker = int(waited(lambda: pid.exists() and pid.read_text()))
    assert worker != process.pid
    assert is_alive(worker)
    process.send_signal(number)
    out, errors = process.communicate(timeout=30)
    waited(lambda: not is_alive(worker), 10)
    assert out == ""
    assert errors.startswith("asking own.py:norm: ")
    assert errors.count("\n") == 1
