"""benchmarks/kernels.py measures every kernel of a level, and shows what it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parents[2] / "benchmarks/kernels.py"


def _run(*arguments: object) -> str:
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_each_kernel_is_measured_and_shown_again(tmp_path: Path) -> None:
    file = tmp_path / "times.jsonl"
    shown = _run("--place", "L1", "--seconds", 0, "--json", file)
    machine, *records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert machine["processor"] in shown
    assert shown == _run("--show", file)
    levels = {record["level"] for record in records}
    kernels = {(record["kernel"], record["dtype"]) for record in records}
    assert levels
    assert len(records) == 9 * len(levels)
    assert len(kernels) == 9
    assert {tuple(record["ns"]) for record in records} == {("ours", "copy", "LayerNorm"), ("ours", "copy")}
