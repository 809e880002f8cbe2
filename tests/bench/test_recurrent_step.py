"""``benchmarks/recurrent_step.py``: what is timed is right, and the ratios are to LayerNorm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import command
from recurrent_step import NORMS, OPS, Sizes, allowed, app, make
from timing.measure import LEAST_TURNS

from rmsnorm.nematus.numpy.recurrent import nematus_gru
from rmsnorm.specification.frameworks import FRAMEWORKS

SMALL = ("--length", "3", "--batch", "2", "--features", "4", "--state", "8", "--seconds", "0", "--threads", "1")
MODES = {"numpy": [""], "torch": [""], "tf": ["graph", "jit"], "flax": ["jit"]}


def bench(*arguments: str, path: Path) -> Any:
    return command(app, *arguments, path=path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", FRAMEWORKS)
def test_every_backend(backend: str, tmp_path: Path) -> None:
    row = FRAMEWORKS[backend]
    if row.missing:
        pytest.skip(f"{row.missing} is not installed; pip install '.[{row.extra}]'")
    done = bench("--backend", backend, *SMALL, "--json", str(tmp_path / "bench.json"), path=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "bench.json").read_text())["records"]
    assert sorted((r["mode"], r["norm"], r["op"]) for r in records) == sorted(
        (mode, norm, op) for mode in MODES[backend] for norm in NORMS for op in OPS[: 1 if backend == "numpy" else 2]
    )
    for record in records:
        layer = next(r for r in records if (r["mode"], r["op"], r["norm"]) == (record["mode"], record["op"], "layer"))
        assert record["timing"]["turns"] >= LEAST_TURNS
        assert record["speedup"] == layer["timing"]["median"] / record["timing"]["median"]
        assert 0 < record["error"] < 1e-5
    assert "LayerNorm / it" in done.stdout


def test_what_is_wrong_is_named_and_not_timed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import rmsnorm.nematus.numpy.recurrent as recurrent\n"
        "true = recurrent.nematus_gru\n"
        "def wrong(x, *args, **options):\n"
        "    return true(x, *args, **options) * (1.01 if x.dtype == 'float32' and options['norm'] == 'rms' else 1)\n"
        "recurrent.nematus_gru = wrong\n"
    )
    done = bench("--backend", "numpy", *SMALL, path=tmp_path)
    assert done.exit_code == 1, done.stderr
    assert "rms wrong, fwd 3x2x4x8 f32: off by" in done.stdout
    assert "prms wrong" not in done.stdout


def test_the_bound_is_above_roundings_and_below_another_norm() -> None:
    sizes = Sizes(20, 4, 32, 64)
    states = {}
    for norm in ("rms", "prms"):
        for dtype in ("float32", "float64"):
            task = make(sizes, norm, dtype)
            states[norm, dtype] = nematus_gru(task.x, task.h0, task.parameters, norm=task.norm)
    assert abs(states["rms", "float32"] - states["rms", "float64"]).max() < allowed(sizes, "fwd")
    assert abs(states["rms", "float64"] - states["prms", "float64"]).max() > 10 * allowed(sizes, "fwd")
    assert allowed(sizes, "fwd+bwd") == 2 * allowed(sizes, "fwd")
    assert np.abs(states["rms", "float64"]).max() <= 1


def test_an_unknown_backend_and_help() -> None:
    done = bench("--backend", "theano", path=Path("/nowhere"))
    assert done.exit_code == 2
    assert "recurrent_step.py: backend is 'theano', expected" in done.stderr
    assert "python benchmarks/recurrent_step.py --backend torch" in bench("--help", path=Path("/nowhere")).stdout
