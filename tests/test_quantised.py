"""RMSNorm followed by quantisation: the golden against mpmath, and against what kernels were reported to return."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf
from quantisers import (
    ADDING,
    BF16,
    E5M2,
    EPS,
    F32,
    FLOOR_OF_AITER,
    FP4,
    INT8_ROW,
    MX8,
    NV8,
    REFERENCES,
    STATIC_1,
    UNIT,
    UNIT_EPS,
    VLLM,
    call_options,
    ones_times,
    preset,
    random_row,
    result,
    same,
)

from rmsnorm import Quantisation
from rmsnorm.specification.quantisation import QUANTISATIONS

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", QUANTISATIONS)
def test_the_codes_and_scales_are_those_of_mpmath(name, seed):
    x, r, gain = random_row(name, seed)
    options = call_options(name) | ({} if r is None else {"residual": r})
    q, scales, *_ = result(name, x, gain, float(EPS), **options)
    rows = [
        [mpf(float(v)) for v in np.zeros_like(x)] if a is None else [mpf(float(v)) for v in a] for a in (x, r, gain)
    ]
    with mp.workprec(400):
        want_q, want_s = REFERENCES[name](*rows)
    assert scales.ravel().tolist() == [float(s) for s in want_s]
    assert q.tolist() == [float(v) for v in want_q]


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_a_batch_is_its_rows_and_h_is_what_is_stored(name):
    rows = [random_row(name, seed) for seed in range(6)]
    x, gain = np.stack([row[0] for row in rows]).reshape(2, 3, 64), rows[0][2]
    r = np.stack([row[1] for row in rows]).reshape(2, 3, 64) if name in ADDING else None
    options = call_options(name)
    got = result(name, x, gain, 1e-3, **options, residual=r)
    assert len(got) == 2 + (r is not None) + (name == "te.nvfp4")
    if name == "te.nvfp4":
        return  # its rows share a scale
    for i in np.ndindex(2, 3):
        alone = result(name, x[i], gain, 1e-3, **options, residual=None if r is None else r[i])
        for many, one in zip(got, alone, strict=True):
            assert np.array_equal(many[i] if many.ndim else many, one)
    if r is not None and name != "aiter.int8":
        assert got[-1].tolist() == (x.astype(np.float64) + r.astype(np.float64)).astype(x.dtype).astype(float).tolist()


@pytest.mark.parametrize(("row", "eps"), [(UNIT, 0.0), (UNIT_EPS, 0.25)])
@pytest.mark.parametrize("signs", [1, -1])
def test_a_unit_row_drives_the_quantiser_through_the_gain(row, eps, signs):
    """Whose 1 / rho is 1, so that y is x times the gain."""
    gain = np.arange(1, 9) / 8
    q, _ = result("flashinfer.static", signs * np.float32(row), gain.astype(np.float32), eps, static_scale=1)
    want = (signs * np.float32(row) * gain.astype(np.float32)).astype(ml_dtypes.float8_e4m3fn)  # both exact in float32
    assert q.tolist() == want.astype(float).tolist()


# Reported disagreements: a call, the code or scale of one element, and one field that changes it.

ROW_TWO = [-0.5625, -1.375, 0.0625, 1.875, -0.5, 1.5625, -0.4375, 1.25]
ROW_ONE = [1.5, -1.4375, 0.3125, 0.875, 1.375, 0.125, -0.5, -0.75]
ROW_GAIN = [-1.625, 1.4375, -1.875, 0.1875, -1.625, -0.8125, -0.0625, -0.3125]


def with_gain(row, index, value):
    gain = np.ones(8)
    gain[index] = value
    return np.array(row).astype(BF16), gain.astype(BF16)


WITNESSES = {  # name: (a quantisation, x and gain, options,
    #                       which output, index, its number, a change, the number then)
    "R(y), TensorRT-LLM 14464": (VLLM, with_gain(UNIT, 2, 109 / 128), STATIC_1,
        0, 2, 1.0, {"round_norm": False, "round_gain": False}, 1.125),
    "two roundings, vLLM 49639": (VLLM, with_gain(ROW_TWO, 0, 0.84375), STATIC_1,
        0, 0, -0.40625, {"round_norm": False}, -0.4375),
    "one rounding": (preset("flashinfer.static"), with_gain(ROW_ONE, 4, 0.609375), STATIC_1,
        0, 4, 0.8125, {"round_gain": True}, 0.875),
    "gain before rho, FlashInfer FP4": (
        preset("flashinfer.static", round_gain=True), with_gain(ROW_GAIN, 3, 0.6796875), STATIC_1,
        0, 3, 0.109375, {"order": "gain_first"}, 0.1015625,
    ),
    "tie 304": (VLLM, ones_times(304.0), STATIC_1,
        0, 0, 320.0, {"rounding": "half_down"}, 288.0),
    "division, A=3.0625": (preset("vllm.dynamic_fp8"), ones_times(3.0625, 2.734375), {},
        0, 1, 384.0, {"apply": "y * (1 / s)"}, 416.0),
    "division, A=3.875": (preset("vllm.dynamic_fp8"), ones_times(3.875, 2.90625), {},
        0, 1, 352.0, {"apply": "y * (1 / s)"}, 320.0),
    "division, int8": (INT8_ROW, ones_times(3.765625, 1.8828125), {},
        0, 1, 64.0, {"apply": "y * (1 / s)"}, 63.0),
    "division, FP4": (FP4, ones_times(0.0239257794), {"static_scale": 7 / 512},
        0, 0, 1.5, {"apply": "y * (1 / s)"}, 2.0),
    "float32 quotient": (preset("vllm.dynamic_fp8"), ones_times(2.03125, 1.5234375), {},
        0, 1, 320.0, {"round_scaled": "none"}, 352.0),
    "rounded after the scale, FlashInfer 4160": (VLLM, ones_times(1.078125, dtype=BF16), {"static_scale": 0.01},
        0, 0, 104.0, {"round_scaled": "bfloat16"}, 112.0),
    "the same of an odd size": (VLLM, ones_times(1.078125, dtype=BF16, n=9), {"static_scale": 0.01},
        0, 0, 104.0, {"round_scaled": "bfloat16"}, 112.0),
    "E5M2 at 448, FlashInfer 2639": (E5M2, ones_times(1000.0), STATIC_1,
        0, 0, 1024.0, {"qmax": 448.0, "qmin": -448.0}, 448.0),
    "E8M0 and the unrounded scale": (MX8, ones_times(300.0), {},
        0, 0, 288.0, {"quantise_with": "unrounded"}, 448.0),
    "E8M0 ceil": (MX8, ones_times(300.0), {},
        0, 0, 288.0, {"scale_round": "ceil"}, 144.0),
    "amax 0 in the formats of a scale": (MX8, ones_times(*[0.0] * 8), {},
        1, 0, 2.0**-127, {"scale_format": "float32", "scale_round": "half_even"}, 0.0),
    "amax below 1/512, vLLM": (preset("vllm.dynamic_fp8"), ones_times(*[2.0**-10] * 8), {},
        0, 0, 224.0, {"scale_floor": 0.0}, 448.0),
    "amax below 1e-4, DeepGEMM": (preset("vllm.dynamic_fp8", scale_floor=0.0), ones_times(*[1e-5] * 8), {},
        0, 0, 448.0, {"amax_floor": 1e-4}, 44.0),
    "amax 0 without a floor": (preset("aiter.int8"), ones_times(*[0.0] * 8), {},
        1, 0, FLOOR_OF_AITER, {"amax_floor": 0.0}, 0.0),
    "int8 127.6, OPUS": (preset("onnx.qdq"), ones_times(127.6), STATIC_1,
        0, 0, 127.0, {"overflow": "wrap"}, -128.0),
    "int8 -128": (preset("onnx.qdq"), ones_times(-200.0), STATIC_1,
        0, 0, -128.0, {"qmin": -127.0}, -127.0),
    "int8 0.5": (preset("onnx.qdq"), ones_times(0.5), STATIC_1,
        0, 0, 0.0, {"rounding": "half_away"}, 1.0),
    "int8 -126.5": (preset("onnx.qdq"), ones_times(-126.5), STATIC_1,
        0, 0, -126.0, {"rounding": "half_away"}, -127.0),
    "int8 truncated, aiter 4637": (preset("onnx.qdq"), ones_times(1.75), STATIC_1,
        0, 0, 2.0, {"rounding": "truncate"}, 1.0),
    "NaN in the gain": (VLLM, ones_times(math.nan), STATIC_1,
        0, 0, 448.0, {"nan": "zero"}, 0.0),
    "NaN in amax": (preset("vllm.dynamic_fp8"), ones_times(math.nan, 3.5), {},
        1, 0, 2.0**-7, {"amax_nan": "keep"}, math.nan),
    "infinity": (VLLM, ones_times(-math.inf), STATIC_1,
        0, 0, -448.0, {"overflow": "nan"}, math.nan),
    "E4M3 or E5M2": (VLLM, ones_times(300.0), STATIC_1,
        0, 0, 288.0, {"element": "e5m2"}, 320.0),
    "scale in float16, llama.cpp": (preset("llama.q8_0", block=8), ones_times(3.0), {},
        1, 0, float(np.float16(3 / 127)), {"scale_format": "float32"}, float(F32(3) / F32(127))),
    "E4M3 448 or 240": (VLLM, ones_times(300.0), STATIC_1,
        0, 0, 288.0, {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0}, 240.0),
    "E4M3FNUZ 240 or vLLM's 224": (
        VLLM.replace(element="e4m3fnuz", qmax=240.0, qmin=-240.0), ones_times(300.0), STATIC_1,
        0, 0, 240.0, {"qmax": 224.0, "qmin": -224.0}, 224.0,
    ),
    "scale by division": (preset("vllm.dynamic_fp8"), ones_times(3.0), {},
        1, 0, float(F32(3) / F32(448)), {"scale": "amax * (1 / qmax)"}, float(F32(3) * (F32(1) / F32(448)))),
    "row or block": (MX8, ones_times(256.0, *[1.0] * 15, n=16), {},
        0, 8, 256.0, {"block": 16}, 1.0),
    "1 + gain in bfloat16, vLLM 53203": (
        preset("flashinfer.static", offset="exact"), ones_times(2.0**-4 + 2.0**-9, dtype=BF16), STATIC_1,
        0, 0, 1.125, {"offset": "rounded"}, 1.0,
    ),
    "1 + gain": (preset("flashinfer.static", offset="exact"), ones_times(0.5), STATIC_1,
        0, 0, 1.5, {"offset": "none"}, 0.5),
    "s_b 0, FlashInfer or TE": (preset("flashinfer.fp4", block=8), ones_times(*[2.0**-12] * 8), {"global_scale": 1.0},
        0, 0, 0.0, {"zero_scale": "largest"}, 6.0),
    "s_b 0 and y 0, TensorRT-LLM": (NV8, ones_times(*[0.0] * 8), {"global_scale": 1.0},
        0, 0, 6.0, {"zero_scale": "largest"}, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", WITNESSES)
def test_a_reported_disagreement_is_decided_and_its_field_decides_it(name):
    quantisation, (x, gain), options, output, index, want, changes, then = WITNESSES[name]
    assert same(result(quantisation, x, gain, **options)[output].ravel()[index], want)
    assert same(result(quantisation.replace(**changes), x, gain, **options)[output].ravel()[index], then)


def large_residual():
    """Of which T keeps less than the sum has."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, 4096)).astype(BF16), (30 * rng.standard_normal((4, 4096))).astype(BF16)


# bfloat16 rows of 4096 with a residual of scale 30: the share of codes that a field changes, measured in a kernel
SHARES = {
    "values_read": ("sum", 0.013, 0.015), "statistic_reads": ("sum", 0.0005, 0.004),
    "residual_rounding": ("truncate", 0.02, 0.05),
}  # fmt: skip


@pytest.mark.parametrize("field", SHARES)
def test_the_rounding_of_the_sum_changes_its_share_of_codes(field):
    x, residual = large_residual()
    change, low, high = SHARES[field]
    options = {"static_scale": 1 / 64, "residual": residual}
    q, other = (result(p, x, **options)[0] for p in (VLLM, VLLM.replace(**{field: change})))
    assert low < np.mean(q != other) < high


def test_a_truncated_residual_is_biased():
    x, residual = large_residual()
    exact = x.astype(np.float64) + residual.astype(np.float64)
    bias = {}
    for rounding in ("nearest", "truncate"):
        *_, h = result(VLLM.replace(residual_rounding=rounding), x, residual=residual, static_scale=1.0)
        assert np.all(np.abs(h - exact) <= np.abs(exact) * 2.0**-7)  # an ulp at most: no bound of one call sees it
        bias[rounding] = np.mean((np.abs(h) - np.abs(exact)) / np.abs(exact))
    assert abs(bias["nearest"]) < 2e-5  # 1e-3 of |error| / sqrt(16384) numbers
    assert -0.0035 < bias["truncate"] < -0.002


# the share of E4M3 codes that differ from vLLM's order, s = 1/64, D = 4096
ORDERS = {
    "one rounding": ({"round_norm": False}, 0.012, 0.02),
    "float32": ({"round_norm": False, "round_gain": False}, 0.028, 0.038),
    "gain first": ({"round_norm": False, "order": "gain_first"}, 0.028, 0.040),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_changes_its_share_of_codes(name):
    rng = np.random.default_rng(1)
    x, gain = rng.standard_normal((4, 4096)).astype(BF16), (1 + 0.1 * rng.standard_normal(4096)).astype(BF16)
    changes, low, high = ORDERS[name]
    q, other = (result(p, x, gain, static_scale=1 / 64)[0] for p in (VLLM, VLLM.replace(**changes)))
    assert low < np.mean(q != other) < high


def test_a_global_scale_is_given_or_that_of_the_array():
    x, _, gain = random_row("te.nvfp4", 0)
    q, scales, g = result("te.nvfp4", x, gain, 1e-3)
    given = preset("te.nvfp4", global_scale="given")
    assert [out.tolist() for out in result(given, x, gain, 1e-3, global_scale=float(g))] == [
        q.tolist(),
        scales.tolist(),
    ]
    assert result(given, x, gain, 1e-3, global_scale=1.0)[1].tolist() != scales.tolist()


def test_every_field_has_a_witness():
    """That fails when the field changes, alone or with its other end."""
    seen = {tuple(sorted(row[6])) for row in WITNESSES.values()}
    fields = {field.name for field in dataclasses.fields(Quantisation)} - {"name", "source"}
    alone = {names[0] for names in seen if len(names) == 1} | set(SHARES)
    assert fields - alone == {"qmax", "global_scale"}
    assert ("qmax", "qmin") in seen
