"""benchmarks/compare.py times a small shape with every backend, and keeps each cell when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec

import compare
import pytest
from commands import command
from timing.backends import BACKENDS
from timing.measure import LEAST_TURNS

from rmsnorm.specification.frameworks import FRAMEWORKS


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_times_a_small_shape(backend, tmp_path):
    """Its layers, eager and compiled, each with its gradients."""
    layers = (FRAMEWORKS[backend].layers,) if backend in FRAMEWORKS else ()
    missing = [package for package in (*BACKENDS[backend].packages, *layers) if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed; pip install '.[{BACKENDS[backend].extra}]'")
    op = "fwd" if backend.startswith("keras-") else "fwd+bwd"  # compiling takes long; the rest is shared
    done = command(
        compare.app, "--backend", backend, "--op", op, "--shape", "3x40", "--dtype", "float32", "--seconds", "0",
        "--threads", "1", "--json", tmp_path / "b.json", TORCHINDUCTOR_FORCE_DISABLE_CACHES="0",
        TORCHDYNAMO_DISABLE=str(int(backend == "keras-torch")),  # as with PyTorch's own layers, and compiled there
        JAX_NUMPY_DTYPE_PROMOTION="standard",  # Flax's own layers do not run under the strict one of the tests
    )  # fmt: skip
    assert done.exit_code == 0, done.stdout + done.stderr
    records = {record["candidate"]: record for record in json.loads((tmp_path / "b.json").read_text())["records"]}
    assert {"ours", "built-in", "LayerNorm", "copy", "copy into"} <= set(records)
    for name, record in records.items():  # a compiled one fails where there is no C++ compiler
        assert record["status"] == "timed" or (name.endswith("compiled") and record["status"] == "failed"), record
    ours = records["ours"]
    assert ours["bits"]["y"] > 0.9, "one rounding of float32 arithmetic: few differ"
    assert ours["timing"]["turns"] >= LEAST_TURNS
    assert min(ours[ratio] for ratio in ("speedup", "layer_norm_speedup", "over_copy")) > 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("sent", "status"), [("SIGINT", "stopped"), ("SIGKILL", "running")])
def test_every_cell_is_printed_and_in_the_files_at_once(sent, status, tmp_path):
    """Where the user stops it or the machine is taken away before the end."""
    program = [sys.executable, compare.__file__, "--backend", "numpy", "--shape", "8x8", "--seconds", "5"]
    process = subprocess.Popen(
        [*program, "--json", "b.json", "--summary", "b.jsonl"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stderr.readline() == "numpy 1/4\n"
    process.send_signal(getattr(signal, sent))
    assert "fwd 8x8 f32" in process.communicate(timeout=60)[0]
    assert process.returncode == (1 if sent == "SIGINT" else -signal.SIGKILL)
    document = json.loads((tmp_path / "b.json").read_text())
    assert [run["status"] for run in document["backends"]] == [status]
    assert len(document["records"]) == 5
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 6
