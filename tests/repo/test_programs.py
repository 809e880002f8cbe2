"""The programs beside the package: each runs on something small; what the benchmark measures and judges is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import compare
import numpy as np
import pytest
from commands import command
from programs import printed
from timing.candidates import Candidate, Workbench
from timing.cell import measure
from timing.measure import LEAST_TURNS, Timing, alternate
from timing.problem import DTYPES, make
from timing.run import run

from rmsnorm import PRESETS
from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp

ROOT = Path(__file__).parents[2]
STANDARD = PRESETS["standard"]
SMALL = ("--op", "fwd+bwd", "--shape", "3x40", "--dtype", "float32", "--seconds", "0", "--threads", "1")


WRONG = (
    "import rmsnorm.numpy_impl.fast as fast\ntrue = fast.rms_norm\nfast.rms_norm = lambda *a, **o: true(*a, **o) * 1.01"
)


def test_compare_ends_with_a_status(tmp_path):
    """1 where ours is wrong, 2 where a backend that is asked for is absent."""
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError('no jax', name='jax')\n")
    wrong = command(compare.app, "--backend", "numpy", *SMALL, path=tmp_path)
    assert wrong.exit_code == 1, wrong.stderr
    assert "ours wrong, fwd+bwd 3x40 f32: y" in wrong.stdout
    absent = command(compare.app, "--backend", "flax", *SMALL, path=tmp_path)
    assert absent.exit_code == 2
    assert "pip install '.[flax]'" in absent.stdout


@pytest.mark.parametrize(("code", "status", "message"), [
    ("raise RuntimeError('no library')", "crashed", "exit status 1; RuntimeError: no library"),
    ("print('chatter'); print('{\"status\": \"done\"}')", "done", ""),
    ("import time; time.sleep(600)", "hung", "no output for 2 s after 0 cells"),
])  # fmt: skip
def test_the_outcome_of_a_worker_is_reported(code, status, message):
    patience = 2.0 if status == "hung" else 60.0  # of the others Python may start slowly on a busy machine
    state = run("numpy", [sys.executable, "-c", code], asked=0, patience=patience)
    assert (state.status, state.message) == (status, message)


def test_turns_are_fair_and_a_call_costs_what_it_costs():
    """By a clock that only calls advance; one that follows another candidate costs more, which does not count."""
    now, diary = [0.0], []

    def candidate(name, cost):
        def call():
            now[0] += cost + 8.0 * bool(diary and diary[-1] != name)
            diary.append(name)

        return call

    calls = {"small": candidate("small", 2.0**-14), "large": candidate("large", 1.0)}
    timings = alternate(calls, clock=lambda: now[0], seconds=60.0)
    assert (timings["large"].median, timings["small"].median) == (1.0, 2.0**-14)
    assert timings["small"].calls == 17, "what makes a millisecond"
    assert timings["large"].turns == timings["small"].turns >= LEAST_TURNS
    turns = [name for i, name in enumerate(diary) if i == 0 or diary[i - 1] != name]
    assert turns.count("small") > len(turns) / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_golden_is_right_and_one_wrong_element_is_wrong(dtype):
    problem = make((40, 64), dtype)
    dx, dscale, *_ = rms_norm_vjp(problem.dy, problem.x, problem.scale)
    results = {"y": rms_norm(problem.x, problem.scale), "dx": dx, "dscale": dscale}
    assert problem.judge(results, STANDARD).wrong == ""
    for quantity, right in results.items():
        near, far = right.copy(), right.copy()
        near.flat[-1] = np.nextafter(near.flat[-1], near.dtype.type(np.inf))
        far.flat[-1] = np.nan
        assert problem.judge({**results, quantity: near}, STANDARD).max_ulp[quantity] == 1.0
        for spoiled in (far, right.astype("float64"), right[..., :-1]):
            assert quantity in problem.judge({**results, quantity: spoiled}, STANDARD).wrong


def test_ours_that_is_wrong_is_named_and_not_timed():
    def right():
        return (rms_norm(problem.x, problem.scale),)

    def wrong():
        return (right()[0] * np.float32(1.001),)

    def broken():
        raise RuntimeError("no compiler\nhere")

    def time_all(calls, **_):
        return dict.fromkeys(calls, Timing(1.0, 0.0, 0.0, 1, 1))

    problem = make((8, 64), "float32")
    candidates = [
        Candidate("ours", wrong, "", STANDARD), Candidate("built-in", wrong, "", STANDARD),
        Candidate("ours", right, "jit", STANDARD), Candidate("built-in", broken, "jit", STANDARD),
    ]  # fmt: skip
    bench = Workbench("1.0", "a machine", lambda *_: candidates)
    made = measure(bench, problem, "fwd", STANDARD, seconds=1.0, time_all=time_all)
    records = {record.candidate: record for record in made}
    statuses = {name: record.status for name, record in records.items()}
    assert statuses == {"ours": "wrong", "built-in": "timed", "ours jit": "timed", "built-in jit": "failed"}
    assert "y has parity ratio" in records["ours"].detail
    assert records["built-in jit"].detail == "RuntimeError: no compiler"
    assert records["ours jit"].bits == {"y": 1.0}
    assert [name for name, record in records.items() if record.timing] == ["built-in", "ours jit"]


@pytest.mark.torch
def test_each_kernel_is_measured_and_shown_again(tmp_path):
    pytest.importorskip("torch")
    program, file = ROOT / "benchmarks/kernels.py", tmp_path / "times.jsonl"
    shown = printed(program, "--place", "L1", "--seconds", 0, "--json", file)
    machine, *records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert machine["processor"] in shown
    assert shown == printed(program, "--show", file)
    levels, kernels = {one["level"] for one in records}, {(one["kernel"], one["dtype"]) for one in records}
    assert len(records) == len(kernels) * len(levels) == 9 * len(levels) > 0


def test_a_norm_of_a_stranger_becomes_a_row():
    """What identify says, and how check of that ends."""
    pytest.importorskip("torch", reason="torch is not installed")
    (row,) = printed("tools/results.py", "torch.nn:LayerNorm", cwd=ROOT, path=ROOT).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert cells[1] == "`LayerNorm`"
    assert cells[2].startswith("LayerNorm, not RMSNorm")
    assert cells[4] == "not asked: no variant describes it"
