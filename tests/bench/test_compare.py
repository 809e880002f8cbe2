"""``benchmarks/compare.py``: a worker for each backend, its outcome, and what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import compare
import numpy as np
import pytest
from commands import command
from rich.console import Console
from timing import files, report
from timing.backends import BACKENDS
from timing.measure import LEAST_TURNS
from timing.problem import OPS
from timing.run import BenchRun, run

from rmsnorm.specification.frameworks import FRAMEWORKS


def _python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise RuntimeError('no library')", "crashed", "exit status 1; RuntimeError: no library"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed", "signal 9; no output"),
        ("print('chatter'); print(3); print('{\"status\": \"done\"}')", "done", ""),
        ('print(\'{"status": "absent", "message": "pip install it"}\')', "absent", "pip install it"),
        ("import time; time.sleep(600)", "hung", "no output for 2 s after 0 cells"),
    ],
)
def test_the_outcome_of_a_worker_is_reported(code, status, message):
    patience = 2.0 if status == "hung" else 60.0  # of the others Python may start slowly on a busy machine
    state = run("numpy", _python(code), asked=0, patience=patience)
    assert (state.status, state.message) == (status, message)


def test_results_that_are_lost_are_no_run_of_fewer():
    code = 'print(\'{"records": []}\'); print(\'{"status": "done"}\')'
    assert [run("numpy", _python(code), asked=asked).status for asked in (1, 2)] == ["done", "crashed"]


_bench = partial(command, compare.app)


SMALL = ("--dtype", "float32", "--seconds", "0", "--threads", "1", "--json")


@pytest.mark.parametrize("backend", [pytest.param(b, marks=[pytest.mark.slow] * (b != "numpy")) for b in BACKENDS])
def test_every_backend_times_a_small_shape(backend, tmp_path):
    """Its layers, eager and compiled, each with its gradients."""
    layers = (FRAMEWORKS[backend].layers,) if backend in FRAMEWORKS else ()
    missing = [package for package in (*BACKENDS[backend].packages, *layers) if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed; pip install '.[{BACKENDS[backend].extra}]'")
    op = "fwd" if backend.startswith("keras-") else "fwd+bwd"  # compiling takes long; the rest is shared
    done = _bench(
        "--backend", backend, "--op", op, "--shape", "3x40", *SMALL, tmp_path / "b.json",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="0",
        TORCHDYNAMO_DISABLE=str(int(backend == "keras-torch")),  # as with PyTorch's own layers, and compiled there
        JAX_NUMPY_DTYPE_PROMOTION="standard",  # Flax's own layers do not run under the strict one of the tests
    )  # fmt: skip
    assert done.exit_code == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "b.json").read_text())
    assert [(run["name"], run["status"], run["cores"]) for run in document["backends"]] == [(backend, "done", 1)]
    records = {record["candidate"]: record for record in document["records"]}
    assert {"ours", "built-in", "LayerNorm", "copy", "copy into"} <= set(records)
    for name, record in records.items():
        if name.endswith("compiled") and record["status"] == "failed":
            continue  # no C++ compiler on this machine
        assert record["status"] == "timed", record
        assert record["timing"]["turns"] >= LEAST_TURNS
        if name.startswith("ours"):
            assert tuple(record["bits"]) == OPS[op]
            assert record["bits"]["y"] > 0.9, "one rounding of float32 arithmetic: few differ"
            assert min(record[ratio] for ratio in ("speedup", "layer_norm_speedup", "over_copy")) > 0
    if backend in ("torch", "flax"):
        assert min(records[name]["saved_bytes"] for name in ("ours", "built-in")) >= 3 * 40 * 4, "x at least"


RECORD = {
    "op": "fwd", "shape": [32, 768], "dtype": "bfloat16", "variant": "torch", "candidate": "ours", "ours": True,
    "status": "timed", "detail": "", "bits": {"y": 0.99999}, "max_ulp": {"y": 1.0}, "first_call": 0.5,
    "timing": {"median": 2e-5, "p20": 1e-5, "p80": 4e-5, "turns": 5, "calls": 50}, "peak_bytes": None,
    "saved_bytes": None, "moved_bytes": 98304, "speedup": 1234.5, "layer_norm_speedup": 1.5, "over_copy": 2.25,
    "over_copy_into": 0.5, "gb_per_s": 4.9152, "others": 0.02,
}  # fmt: skip
WRONG = {
    **RECORD, "status": "wrong", "detail": "y has parity ratio 9", "timing": None, "gb_per_s": None, "others": None,
}  # fmt: skip


def _runs():
    slower = {**RECORD, "others": 1.25, "timing": {**RECORD["timing"], "median": 4e-5}, "gb_per_s": 2.4576}
    sizes = [{**record, "shape": [64, 768], "moved_bytes": 196608} for record in (RECORD, slower)]
    names = ((slower, "built-in jit"), (sizes[1], "built-in jit"), (RECORD, "copy"), (RECORD, "copy into"))
    records = [RECORD, sizes[0], *({**record, "candidate": name, "ours": False} for record, name in names), WRONG]
    done = BenchRun("torch", "done", version="9.9", device="a machine", cells=2, records=records)
    return [done, BenchRun("tf", "absent", "pip install it")]


def test_the_table_says_what_was_measured():
    console = Console(width=report.WIDTH, file=io.StringIO())
    printer = report.Printer(console)
    printer(_runs()[:1])
    printer(_runs()[:1])  # a message without records prints nothing
    printer.end(_runs())
    shown = " ".join(console.file.getvalue().split())
    assert shown.count("PyTorch 9.9 on a machine") == 1
    assert "fwd 32x768 bf16 ours 0.0200 1234 1.50 2.25 99.9 1 0.500" in shown
    assert "ours wrong, fwd 32x768 bf16: y has parity ratio 9" in shown
    assert "TensorFlow absent: pip install it" in shown
    assert "other processes used up to 1.2 cores; measure again on a quiet machine: fwd 32x768 bf16" in shown


def test_json_and_the_summary_have_every_record_and_the_machine(tmp_path):
    files.write_json(_runs(), {"seconds": 2.0}, tmp_path / "bench.json")
    files.write_summary(_runs(), {"seconds": 2.0}, tmp_path / "bench.jsonl")
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["settings"] == {"seconds": 2.0}
    assert document["records"] == [{"backend": "torch", **record} for record in _runs()[0].records]
    assert [entry["status"] for entry in document["backends"]] == ["done", "absent"]
    assert document["environment"]["versions"]["numpy"] == np.__version__
    assert {"date", "python", "system", "processor", "cores"} <= set(document["environment"])
    head, *lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert head["environment"].pop("date") >= document["environment"].pop("date")
    assert head == {name: value for name, value in document.items() if name != "records"}
    assert len(lines) == len(document["records"])
    first = {"backend": "torch", **RECORD, "bits": {"y": 0.99999}, "speedup": 1234.0, "gb_per_s": 4.915}
    first["timing"] = {name: value for name, value in RECORD["timing"].items() if name != "calls"}
    assert lines[0] == {name: value for name, value in first.items() if value not in (None, "")}
    assert {"timing", "gb_per_s", "others"}.isdisjoint(lines[-1]), "wrong, and not timed"
    assert (lines[-1]["status"], lines[-1]["detail"]) == ("wrong", "y has parity ratio 9")


def test_the_committed_results_are_whole_summaries():
    (path,) = (Path(compare.__file__).parent / "results").glob("[cg]pu-*.jsonl")
    heads, records = [], []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        (heads if "environment" in line else records).append(line)  # the first line of a run
    assert all({"rmsnorm", "environment", "settings", "backends"} == set(head) for head in heads)
    assert all(record["status"] == "timed" and record["timing"]["median"] > 0 for record in records)
    assert {record["backend"] for record in records} == {b["name"] for head in heads for b in head["backends"]}


def test_ours_that_is_wrong_exits_with_1(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import rmsnorm.numpy_impl.fast as fast\n"
        "true = fast.rms_norm\n"
        "fast.rms_norm = lambda *args, **options: true(*args, **options) * (1 + 1e-2)\n"
    )
    done = _bench("--backend", "numpy", "--op", "fwd", "--shape", "4x64", "--dtype", "float32", "--seconds", "0",
                  path=tmp_path)  # fmt: skip
    assert done.exit_code == 1, done.stderr
    assert "ours wrong, fwd 4x64 f32: y" in done.stdout


def test_a_backend_that_is_asked_for_and_absent_exits_with_2(tmp_path):
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError('no jax', name='jax')\n")
    asked = _bench("--backend", "flax", "--op", "fwd", "--shape", "2x8", *SMALL, tmp_path / "b.json", path=tmp_path)
    assert asked.exit_code == 2
    assert "pip install '.[flax]'" in asked.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("sent", "status"), [("SIGINT", "stopped"), ("SIGKILL", "running")])
def test_every_cell_is_printed_and_in_the_files_at_once(sent, status, tmp_path):
    """Where the user stops it or the machine is taken away before the end."""
    command = [sys.executable, compare.__file__, "--backend", "numpy", "--shape", "8x8", "--seconds", "5"]
    process = subprocess.Popen(
        [*command, "--json", "b.json", "--summary", "b.jsonl"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stderr.readline() == "numpy 1/4\n"
    process.send_signal(getattr(signal, sent))
    _, _, cell, *rows = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == (1 if sent == "SIGINT" else -signal.SIGKILL)
    assert cell == "fwd 8x8 f32"
    assert [row[:12].strip() for row in rows[:5]] == ["ours", "built-in", "LayerNorm", "copy", "copy into"]
    document = json.loads((tmp_path / "b.json").read_text())
    assert [run["status"] for run in document["backends"]] == [status]
    assert len(document["records"]) == 5
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 6
