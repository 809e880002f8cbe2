"""The kit tests itself: it rejects every mutant and accepts the same code without the mistake."""

import dataclasses
import itertools
import math

import differences
import numpy as np
import pytest
from mutants import FAULTS, MUTANTS

from rmsnorm import PRESETS
from rmsnorm.accuracy.bounds import LANES, QUANTITIES, bound, error_of
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.parity.backends import open_backend
from rmsnorm.parity.cases import CASES, make, select
from rmsnorm.parity.equations import EQUATIONS, Steps, candidate, lost
from rmsnorm.parity.judge import Outcome, compare, expect, golden, judge
from rmsnorm.specification import dtypes

BY_NAME = {case.name: case for case in CASES}


def _data(mutant, dtype):
    return [make(BY_NAME[case], variant, dtype) for case, variant in mutant.pairs if dtype in BY_NAME[case].dtypes]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.fault}: {mutant.story}")
def test_every_mutant_is_rejected_wherever_its_mistake_is_visible(mutant):
    assert mutant.dtypes
    for dtype in mutant.dtypes:
        verdicts = list(itertools.chain.from_iterable(judge(mutant.implementation, d) for d in _data(mutant, dtype)))
        failed = [verdict for verdict in verdicts if not verdict.passed]
        assert failed, f"{mutant.fault} passed in {dtype}"
        assert not any("Error" in verdict.detail for verdict in failed), failed[0].detail


@pytest.mark.slow
def test_without_a_mistake_the_mutants_code_passes():
    pairs = {(pair, dtype) for mutant in MUTANTS for pair in mutant.pairs for dtype in mutant.dtypes}
    for (case, variant), dtype in sorted(pairs):
        if dtype in BY_NAME[case].dtypes:
            failed = [v for v in judge(candidate, make(BY_NAME[case], variant, dtype)) if not v.passed]
            assert not failed, (case, variant, dtype, failed)


def test_a_mutant_differs_from_the_honest_code_only_by_its_fault():
    assert len({(mutant.fault, mutant.story) for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.fault for mutant in MUTANTS} == set(FAULTS)
    assert {step for fault in FAULTS.values() for step in fault.changes} <= set(EQUATIONS)
    data = make(BY_NAME["rows"], "standard", "float32")
    honest = candidate(data).results["y"][0]
    assert np.array_equal(honest, candidate(data, {"gain": lambda s, gain: gain}).results["y"][0])
    assert not np.array_equal(honest, candidate(data, FAULTS["gain dropped"].changes).results["y"][0])


def test_the_golden_agrees_with_the_derivation_on_every_case_and_variant():
    _, implementation = open_backend("numpy", "cpu")
    failed = [
        (case.name, variant, dtype, verdict)
        for case, variant, dtype in select(brief=True, large=False)
        for verdict in judge(implementation, make(case, variant, dtype))
        if not verdict.passed
    ]
    assert not failed, failed[:3]


def test_the_goldens_derivatives_agree_with_differences():
    verdicts = [
        v
        for case, variant, dtype in select(types=("float64",), large=False)
        for v in differences.differences(make(case, variant, dtype))
    ]
    assert len(verdicts) > 50
    assert all(verdict.passed for verdict in verdicts), [v for v in verdicts if not v.passed]


def test_differences_notice_a_wrong_derivative(monkeypatch):
    data = make(BY_NAME["rows"], "standard", "float64")
    true = differences.rms_norm_jvp
    monkeypatch.setattr(differences, "rms_norm_jvp", lambda *args, **options: true(*args, **options) * (1 + 1e-6))
    assert [verdict.passed for verdict in differences.differences(data)] == [False, False]


def test_cases_name_every_variant_and_every_dtype():
    for brief in (False, True):
        chosen = list(select(brief=brief))
        assert {(variant, dtype) for _, variant, dtype in chosen} == set(itertools.product(PRESETS, dtypes.FLOATS))
        assert {case.name for case, _, _ in chosen} == set(BY_NAME)
        assert brief == (len(chosen) < len(list(select())) / 3)
    assert len(BY_NAME) == len(CASES)


def test_cases_are_the_same_every_time_and_can_show_mistakes():
    case = BY_NAME["rows"]
    first, second = make(case, "gemma", "float32"), make(case, "gemma", "float32")
    assert np.array_equal(first.x, second.x)
    assert first.scale is not None
    assert np.ptp(first.scale) > 1
    norms = np.linalg.norm(first.x, axis=-1)
    assert norms.max() / norms.min() > 1e3
    assert not np.array_equal(first.x, make(case, "llama", "float32").x)


def test_judging_catches_what_is_not_a_value():
    data = make(BY_NAME["vector"], "standard", "float32")
    right = {name: [value] for name, value in golden(data).items()}

    def verdicts(**changes):
        return {v.quantity: v for v in judge(lambda _: Outcome({**right, **changes}), data)}

    assert all(verdict.passed for verdict in verdicts().values())
    wide = verdicts(y=[right["y"][0].astype(np.float64)])["y"]
    assert not wide.passed
    assert wide.detail == "got f64[64], want f32[64]"
    assert verdicts(dx=[])["dx"].detail == "not computed"
    assert verdicts(dx=[right["dx"][0][None]])["dx"].detail == "got f32[1, 64], want f32[64]"
    assert not verdicts(jvp=[right["jvp"][0], right["jvp"][0] + 1])["jvp"].passed, "the worse of two counts"
    nan = right["y"][0].copy()
    nan[3] = np.nan
    assert verdicts(y=[nan])["y"].parity_ratio == math.inf
    assert "at (3,) got nan" in verdicts(y=[nan])["y"].detail

    def touches(_):
        return Outcome(right, ("x", "scale"))

    assert {v.detail for v in judge(touches, data)} == {"inputs written to: x, scale"}

    def raises(_):
        raise RuntimeError("out of luck")

    assert {v.detail for v in judge(raises, data)} == {"RuntimeError: out of luck"}


def test_ulps_counts_representable_numbers():
    for dtype in dtypes.FLOATS:
        one = np.ones(1, dtype)
        above = (one.view(f"u{one.itemsize}") + 1).view(dtype)
        assert ulps(one, above) == 1
        assert ulps(-one, -above) == 1
        assert ulps(np.zeros(1, dtype), -np.zeros(1, dtype)) == 0
    tiny = np.nextafter(np.zeros(1), 1.0)
    assert ulps(tiny, -tiny) == 2
    nan = np.full(1, np.nan)
    assert ulps(nan, nan) == 0
    assert ulps(nan, tiny) == np.inf


def test_every_bound_follows_from_the_derivation():
    data = make(BY_NAME["rows"], "standard", "float32")
    n = k = 96
    inverse = math.sqrt(k) / 2 + 5
    assert bound("y", data.call, "float32") == 2 + inverse + 4
    assert bound("dx", data.call, "float32") == 2 + 2 * inverse + math.sqrt(n) + 8
    assert bound("dscale", data.call, "float32") == 2 + inverse + math.sqrt(48) + 2
    assert bound("dbias", data.call, "float32") == 2 + math.sqrt(48)
    half = make(BY_NAME["rows"], "standard", "bfloat16")
    assert bound("y", half.call, "bfloat16") == pytest.approx(2 + (inverse + 4) * 2**-16, abs=0)
    free = make(BY_NAME["rows"], "nematus", "bfloat16")
    assert bound("y", free.call, "bfloat16") == bound("y", data.call, "float32")
    llama = make(BY_NAME["rows"], "llama", "bfloat16")
    assert bound("y", llama.call, "bfloat16") == pytest.approx(6 + (inverse + 4) * 2**-16, abs=0)
    with pytest.raises(KeyError, match="no such"):
        bound("no such", data.call, "float32")
    assert {name for name in QUANTITIES if bound(name, data.call, "float32") >= 2} == set(QUANTITIES)


@pytest.mark.parametrize("variant", PRESETS)
def test_the_sum_of_term_sizes_is_at_least_the_result(variant):
    data = make(BY_NAME["rows"], variant, "float64")
    units = term_sizes(data.x, data.scale, data.bias, dy=data.dy, tangents=data.tangents, **data.options)
    for name, value in golden(data).items():
        assert np.all(np.abs(value) <= units[name] * (1 + 1e-12)), name
        assert units[name].shape == value.shape


@pytest.mark.parametrize(("variant", "case"), [("llama", "rows"), ("standard", "rows"), ("llama", "gain f32")])
def test_an_element_may_differ_beside_a_tie_alone(variant, case):
    """By whichever number the statistic may carry it to, however many do; and no element elsewhere."""
    data = make(dataclasses.replace(BY_NAME[case], shape=(24, 768)), variant, "float16")
    want = expect(data, ["y"])["y"]
    steps = Steps(data, {"inverse": lambda s, inverse: inverse * (1 + 0.9 * error_of("y", data.call))})
    flipped = steps.y.astype(want.value.dtype)
    (verdict,) = compare(Outcome({"y": [flipped]}), {"y": want})
    assert verdict.passed, verdict.detail
    assert verdict.max_ulp > (0 if want.value.dtype == "float16" else 1000)
    elsewhere = want.value.copy()
    is_half = want.value.dtype == "float16"
    sure = np.argwhere(want.low == want.high if is_half else np.ones(want.value.shape))
    elsewhere[tuple(sure[len(sure) // 2])] *= 1 + 2.0**-10
    (verdict,) = compare(Outcome({"y": [elsewhere]}), {"y": want})
    assert not verdict.passed


def test_what_a_sum_loses_beside_an_outlier_is_predicted():
    """One square after the other; eight lanes lose an eighth."""
    data = make(dataclasses.replace(BY_NAME["wide"], shape=(1, 16381)), "standard", "float32")
    squares = data.x[0] * data.x[0]
    exact = np.sum(data.x[0].astype(np.float64) ** 2)
    of_one = 1 - float(np.cumsum(squares, dtype=np.float32)[-1]) / exact
    lanes = np.resize(squares, 16384).copy()
    lanes[16381:] = 0
    of_eight = 1 - float(np.cumsum(lanes.reshape(-1, 8), axis=0, dtype=np.float32)[-1].sum()) / exact
    (share,) = lost(data).ravel()
    assert of_one == pytest.approx(share, rel=1e-2)
    assert 2.0**-24 * 128 < of_eight < share / LANES + 2.0**-24 * 128
    bounds = [expect(data, ["y"], automatic=automatic)["y"] for automatic in (False, True)]
    assert np.all(bounds[1].unit > 1.5 * bounds[0].unit)


def test_a_product_of_another_program_may_underflow():
    """dy * gain of 2^-26 is 0 in float16, and 1/rho is 1000 there."""
    row = np.zeros((1, 4), np.float16)
    small = np.full_like(row, 2.0**-13)
    about = {"dy": small, "tangents": (None, None, None), "variant": "llama"}
    ours, other = (term_sizes(row, small[0], **about, automatic=automatic)["dx"] for automatic in (False, True))
    assert np.allclose(ours, 2.0**-26 * 1000)
    assert np.allclose(other, 2.0**-14 * 1000)
    assert np.array_equal(term_sizes(row, small[0], **about | {"variant": "standard"}, automatic=True)["dx"], ours)
