"""The benchmark, without a clock of its own: what is judged, in which order, how numbers are made of turns."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from timing.candidates import Candidate, Workbench
from timing.cell import measure
from timing.measure import LEAST_TURNS, Timing, alternate, used_by_others
from timing.problem import DTYPES, OPS, make

from rmsnorm import PRESETS
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp

STANDARD = PRESETS["standard"]


class Machine:
    """A clock that only calls advance, and a diary of them."""

    def __init__(self):
        self.now, self.diary = 0.0, []

    def candidate(self, name, cost, after_another=0.0):
        def call():
            self.now += cost + (after_another if self.diary and self.diary[-1] != name else 0.0)
            self.diary.append(name)

        return call

    def time(self, costs, after_another=0.0, **options):
        candidates = {name: self.candidate(name, cost, after_another) for name, cost in costs.items()}
        return alternate(candidates, clock=lambda: self.now, **options)


def test_every_round_gives_each_a_turn_in_an_order_drawn_from_the_seed():
    def order(seed):
        machine = Machine()
        machine.time({"a": 1.0, "b": 1.0, "c": 1.0}, seconds=60.0, seed=seed)
        turns = machine.diary[6:]  # a warm-up and an estimate of each come first
        assert turns[::2] == turns[1::2], "a turn is a call that is not timed and one that is"
        return turns[::2]

    first = order(0)
    rounds = [tuple(first[i : i + 3]) for i in range(0, len(first), 3)]
    assert len(rounds) == 10, "sixty seconds are ten rounds of three turns of two"
    assert all(sorted(entry) == ["a", "b", "c"] for entry in rounds)
    assert len(set(rounds)) > 2, "not the same order again and again"
    assert order(0) == first
    assert order(1) != first


def test_a_call_costs_what_it_costs_and_small_calls_are_timed_together():
    machine = Machine()
    timings = machine.time({"small": 2.0**-14, "large": 1.0}, seconds=0.0)
    assert timings["large"] == Timing(1.0, 1.0, 1.0, LEAST_TURNS, 1)
    assert (timings["small"].median, timings["small"].calls) == (2.0**-14, 17), "what makes a millisecond"
    assert machine.diary.count("small") == 2 + LEAST_TURNS * 2 * 17


def test_the_effect_of_the_candidate_before_is_not_counted():
    costs = {"a": 1.0, "b": 2.0}
    assert Machine().time(costs, after_another=8.0, seconds=0.0) == Machine().time(costs, seconds=0.0)


def test_waiting_for_the_device_is_counted():
    machine = Machine()
    waits = {"seconds": 0.0, "synchronise": lambda: setattr(machine, "now", machine.now + 4.0)}
    assert machine.time({"a": 1.0}, **waits)["a"].median == 5.0


def test_what_others_do_meanwhile_is_seen(tmp_path, monkeypatch):
    seconds = {"now": 10.0, "own": 1.0}
    monkeypatch.setattr("time.perf_counter", lambda: seconds["now"])
    stat = tmp_path / "stat"  # in hundredths of a second, idle and waiting too
    stat.write_text("cpu  100 100 100 7000 700 100 100 100 0 0\ncpu0 1 1\n")
    others = used_by_others(stat, lambda: seconds["own"])
    seconds.update(now=12.0, own=2.0)
    stat.write_text("cpu  200 150 150 9000 900 100 100 200 0 0\ncpu0 1 1\n")
    assert others() == (3.0 - 1.0) / 2.0
    assert np.isnan(used_by_others(tmp_path / "none")())


def test_a_result_is_gone_before_the_next_call():
    alive = []

    def call():
        assert not alive or alive[-1]() is None
        result = np.zeros(1)
        alive.append(weakref.ref(result))
        return result

    alternate({"a": call}, seconds=0.0)
    assert len(alive) > 2 * LEAST_TURNS


@pytest.mark.parametrize("variant", PRESETS.values(), ids=PRESETS)
def test_the_right_dscale_is_the_goldens(variant, monkeypatch):
    """float64 sums of 300 terms err by less than a hundredth of an f32 ulp of the terms: one bit apart at most."""
    monkeypatch.setattr("timing.problem._SAMPLE", 70 * 96)  # four blocks and a part of one
    problem = make((3, 100, 96), "float32")
    want = rms_norm_vjp(problem.dy, problem.x, problem.scale, variant=variant)[1]
    got, unit = problem.right_result(variant, "dscale")
    assert got.dtype == want.dtype
    assert np.all(np.abs(got - want) <= 2.0**-23 * unit)
    assert np.mean(ulps(got, want) == 0) > 0.9


def right(problem):
    gradients = rms_norm_vjp(problem.dy, problem.x, problem.scale)
    return {"y": rms_norm(problem.x, problem.scale), "dx": gradients[0], "dscale": gradients[1]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_golden_is_right_and_a_neighbour_of_it_is_counted(dtype):
    problem = make((4, 33), dtype)
    results = right(problem)
    accuracy = problem.judge(results, STANDARD)
    assert (accuracy.wrong, set(accuracy.max_ulp.values())) == ("", {0.0})
    y = results["y"]
    y[1, 2] = np.nextafter(y[1, 2], y.dtype.type(np.inf))
    accuracy = problem.judge(results, STANDARD)
    assert (accuracy.wrong, accuracy.max_ulp["y"], accuracy.bits["y"]) == ("", 1.0, 1 - 1 / (4 * 33))


@pytest.mark.parametrize("quantity", OPS["fwd+bwd"])
@pytest.mark.parametrize("spoil", ["one element", "nan", "dtype", "shape"])
def test_one_wrong_element_is_wrong(quantity, spoil):
    problem = make((40, 64), "float32")
    results = right(problem)
    if spoil in ("one element", "nan"):
        results[quantity].flat[-1] += np.nan if spoil == "nan" else 0.01
    else:
        results[quantity] = results[quantity].astype("float64") if spoil == "dtype" else results[quantity][..., :-1]
    assert quantity in problem.judge(results, STANDARD).wrong


def test_another_place_of_the_rounding_is_wrong_though_every_element_is_a_neighbour():
    problem = make((64, 128), "bfloat16")
    y = rms_norm(problem.x, problem.scale, variant="llama")
    accuracy = problem.judge({"y": y}, STANDARD)
    assert accuracy.max_ulp["y"] <= 2
    assert "y is right in" in accuracy.wrong


def _cell(candidates, op="fwd"):
    """A cell of made-up candidates, and what was timed in it: a second for the first, two for the next, ..."""
    timed = []

    def time_all(calls, **options):
        timed.extend(calls)
        return {name: Timing(float(i + 1), 0.0, 0.0, 1, 1) for i, name in enumerate(calls)}

    bench = Workbench("1.0", "a machine", lambda problem, op, variant: candidates(problem))
    records = measure(bench, make((8, 64), "float32"), op, STANDARD, seconds=1.0, time_all=time_all)
    return {record.candidate: record for record in records}, timed


def test_ours_that_is_wrong_is_named_and_not_timed_and_another_that_is_wrong_is():
    def candidates(problem):
        def wrong():
            return (rms_norm(problem.x, problem.scale) * np.float32(1.001),)

        def broken():
            raise RuntimeError("no compiler\nhere")

        return [
            Candidate("ours", wrong, "", STANDARD),
            Candidate("ours", lambda: (rms_norm(problem.x, problem.scale),), "jit", STANDARD),
            Candidate("built-in", wrong, "", STANDARD),
            Candidate("built-in", broken, "compiled", STANDARD),
            Candidate("copy", lambda: problem.x.copy()),
        ]

    records, timed = _cell(candidates)
    assert timed == ["ours jit", "built-in", "copy"]
    assert records["ours"].status == "wrong"
    assert "y has parity ratio" in records["ours"].detail
    assert records["ours"].timing is None
    assert (records["ours jit"].status, records["ours jit"].bits) == ("timed", {"y": 1.0})
    assert records["built-in"].status == "timed"
    assert records["built-in"].max_ulp["y"] > 1000
    failed = records["built-in compiled"]
    assert (failed.status, failed.detail) == ("failed", "RuntimeError: no compiler")


def test_ratios_are_to_the_layers_run_likewise_and_to_the_copies():
    def candidates(problem):
        def right():
            return (rms_norm(problem.x, problem.scale),)

        layers = [
            Candidate(kind, right, mode, STANDARD, peak=lambda: 7)
            for kind in ("ours", "built-in", "LayerNorm")
            for mode in ("", "jit")
        ]
        return [*layers, *(Candidate(name, lambda: problem.x.copy()) for name in ("copy", "copy into"))]

    records, _ = _cell(candidates)  # 1 to 8 seconds
    speedups = [(record.speedup, record.layer_norm_speedup) for record in records.values()]
    assert speedups[:4] == [(3 / 1, 5 / 1), (4 / 2, 6 / 2), (None, 5 / 3), (None, 6 / 4)]
    assert speedups[4:] == [(3 / 5, None), (4 / 6, None), (None, None), (None, None)]
    assert records["ours jit"].over_copy == 2 / 7
    assert records["ours jit"].over_copy_into == 2 / 8
    assert records["copy"].over_copy is None
    assert records["ours"].bandwidth == 2 * 8 * 64 * 4 / 1.0 / 1e9
    assert (records["ours"].peak_bytes, records["ours"].saved_bytes) == (7, None)
