"""The kit itself: its golden, bounds, cases and comparison, without any target."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from wrong_equations import CASES, data_of

from rmsnorm import PRESETS
from rmsnorm.accuracy.bounds import LANES, QUANTITIES, bound, error_of
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.parity.cases import Outcome, make
from rmsnorm.parity.equations import Steps, lost
from rmsnorm.parity.judge import Expected, compare, expect, golden, judge
from rmsnorm.specification import dtypes


def test_judging_catches_what_is_not_a_value() -> None:
    data = data_of("vector standard", "float32")
    right = {name: [value] for name, value in golden(data).items()}

    def verdicts(written: tuple[str, ...] = (), **changes: Any) -> Any:
        return {v.quantity: v for v in judge(lambda _: Outcome({**right, **changes}, written), data)}

    assert all(verdict.passed for verdict in verdicts().values())
    assert verdicts(dx=[])["dx"].detail == "not computed"
    assert verdicts(dx=[right["dx"][0][None]])["dx"].detail == "got f32[1, 64], want f32[64]"
    assert not verdicts(jvp=[right["jvp"][0], right["jvp"][0] + 1])["jvp"].passed, "the worse of two counts"
    nan = right["y"][0].copy()
    nan[3] = np.nan
    assert verdicts(y=[nan])["y"].parity_ratio == math.inf
    assert "at (3,) got nan" in verdicts(y=[nan])["y"].detail
    assert {v.detail for v in verdicts(("x", "scale")).values()} == {"inputs written to: x, scale"}

    def raises(_: Any) -> Any:
        raise RuntimeError("out of luck")

    assert {v.detail for v in judge(raises, data)} == {"RuntimeError: out of luck"}


def test_ulps_counts_representable_numbers() -> None:
    for dtype in dtypes.FLOATS:
        one = np.ones(1, dtype)
        above = (one.view(f"u{one.itemsize}") + 1).view(dtype)
        assert ulps(one, above) == ulps(-one, -above) == 1
    tiny, nan = np.nextafter(np.zeros(1), 1.0), np.full(1, np.nan)
    assert (ulps(tiny, -tiny), ulps(nan, nan), ulps(nan, tiny)) == (2, 0, np.inf)


def test_every_bound_follows_from_the_derivation() -> None:
    data, half = data_of("rows standard", "float32"), data_of("rows standard", "bfloat16")
    n = k = 48
    inverse, roots = math.sqrt(k) / 2 + 5, math.sqrt(len(data.x))
    assert bound("y", data.call, "float32") == 2 + inverse + 4
    assert bound("dx", data.call, "float32") == 2 + 2 * inverse + math.sqrt(n) + 8
    assert bound("dscale", data.call, "float32") == 2 + inverse + roots + 2
    assert bound("dbias", data.call, "float32") == 2 + roots
    assert bound("y", half.call, "bfloat16") == pytest.approx(2 + (inverse + 4) * 2**-16, abs=0)
    free, llama = data_of("rows nematus", "bfloat16"), data_of("rows llama", "bfloat16")
    assert bound("y", free.call, "bfloat16") == bound("y", data.call, "float32")
    assert bound("y", llama.call, "bfloat16") == pytest.approx(6 + (inverse + 4) * 2**-16, abs=0)
    with pytest.raises(KeyError, match="no such"):
        bound("no such", data.call, "float32")
    assert {name for name in QUANTITIES if bound(name, data.call, "float32") >= 2} == set(QUANTITIES)
    # Automatic differentiation may round what the formulas do not.
    for data, extra in ((llama, {"dx": 2, "dscale": 2, "y": 0}), (half, {"dx": 1, "dscale": 0, "y": 0})):
        for name, roundings in extra.items():
            ours, another = (bound(name, data.call, "bfloat16", automatic=automatic) for automatic in (False, True))
            assert another - ours == pytest.approx(roundings)


@pytest.mark.parametrize("variant", PRESETS)
def test_the_sum_of_term_sizes_is_at_least_the_result(variant: str) -> None:
    data = data_of(f"rows {variant}", "float64")
    units = term_sizes(data.x, data.scale, data.bias, dy=data.dy, tangents=data.tangents, **data.options)
    for name, value in golden(data).items():
        assert np.all(np.abs(value) <= units[name] * (1 + 1e-12)), name
        assert units[name].shape == value.shape


@pytest.mark.parametrize(("variant", "case"), [("llama", "rows"), ("standard", "rows"), ("llama", "gain f32")])
def test_an_element_may_differ_beside_a_tie_alone(variant: str, case: str) -> None:
    """By whichever number the statistic may carry it to, however many do; and no element elsewhere."""
    data = make(dataclasses.replace(CASES[case], shape=(24, 768)), variant, "float16")
    want = expect(data, ["y"])["y"]
    steps = Steps(data, {"inverse": lambda s, inverse: inverse * (1 + 0.9 * error_of("y", data.call))})
    beside = steps.y.astype(want.value.dtype)
    (verdict,) = compare(Outcome({"y": [beside]}), {"y": want})
    assert verdict.passed, verdict.detail
    assert verdict.max_ulp > (0 if want.value.dtype == "float16" else 1000)
    elsewhere = want.value.copy()
    is_half = want.value.dtype == "float16"
    sure = np.argwhere(want.low == want.high if is_half else np.ones(want.value.shape))
    elsewhere[tuple(sure[len(sure) // 2])] *= 1 + 2.0**-10
    for several in ([elsewhere], [elsewhere, beside]):  # however far off the one is that passes
        (verdict,) = compare(Outcome({"y": several}), {"y": want})
        assert not verdict.passed


def test_what_a_sum_loses_beside_an_outlier_is_predicted() -> None:
    """One square after the other; eight lanes lose an eighth."""
    data = make(dataclasses.replace(CASES["wide"], shape=(1, 16381)), "standard", "float32")
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


def test_a_wrong_element_of_repeated_rows_is_found_where_it_is() -> None:
    """They are compared in pieces: of 280,000 elements, one in a late piece between two smaller errors."""
    value = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    order = np.arange(70_000) % 3
    want = dataclasses.replace(
        Expected.around(value, np.full(value.shape, 2.0**-24), 2.0), order=order, lead=(2, 35_000)
    )
    got = value[order].reshape(want.shape)
    assert compare(Outcome({"y": [got]}), {"y": want})[0].passed
    got[0, 5, 1] *= np.float32(1.001)
    got[1, 30_000, 3] *= np.float32(2)
    got[1, 34_999, 2] *= np.float32(1.001)
    (found,) = compare(Outcome({"y": [got]}), {"y": want})
    assert (found.passed, found.bit_identical) == (False, 1 - 3 / got.size)
    assert found.detail.startswith(f"at (1, 30000, 3) got {float(got[1, 30_000, 3])!r}, want ")
