"""RMSNorm followed by quantisation: the golden against mpmath, and against what kernels were reported to return."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf

from rmsnorm import Quantisation
from rmsnorm.numpy_impl import allowed, rms_norm_quantised
from rmsnorm.specification.quantisation import QUANTISATIONS

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")
BF16 = ml_dtypes.bfloat16
UNIT = [1.75, 1.5, 1.25, 0.75, 0.5, 0.5, 0.25, 0.0]  # with eps 0 its mean square is exactly 1, in any order of the sum
UNIT_EPS = [1.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.0]  # the same with eps 1/4
ROUNDED = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14), "e4m3": (4, -6), "e2m1": (2, 0)}


def preset(name, **changes):
    return Quantisation.get(name).replace(**changes)


def result(quantisation, x, gain=None, eps=0.0, **options):
    """Each output as float64."""
    outputs = rms_norm_quantised(np.asarray(x), gain, eps=eps, quantisation=quantisation, **options)
    return [np.asarray(output).astype(np.float64) for output in outputs]


def ones_times(*values, dtype=np.float32, n=8):
    """x of ones and a gain: so y, before it is rounded, is the gain."""
    gain = np.ones(n)
    gain[: len(values)] = values
    return np.ones(n, dtype), gain.astype(dtype)


# A second implementation: each preset written out by itself, in mpmath.


def near(value, name):
    """Rounded to nearest, ties to even."""
    precision, least = ROUNDED[name]
    if value == 0:
        return value
    step = mpf(2) ** (max(int(mp.floor(mp.log(abs(value), 2))), least) - precision + 1)
    return mp.nint(value / step) * step


def f32(value):
    return near(value, "float32")


def e4m3(value):
    return max(min(near(value, "e4m3"), mpf(448)), mpf(-448))


def e2m1(value):
    return max(min(near(value, "e2m1"), mpf(6)), mpf(-6))


def divided(values, statistic):
    rho = mp.sqrt(mp.fsum(v * v for v in statistic) / len(statistic) + EPS)
    return [v / rho for v in values]


def blocks_of(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


def llama_order(h, gain, dtype):
    return [near(near(v, dtype) * g, dtype) for v, g in zip(divided(h, h), gain, strict=True)]


def one_rounding(h, gain, dtype="bfloat16"):
    return [near(v * g, dtype) for v, g in zip(divided(h, h), gain, strict=True)]


def vllm_static(x, r, gain):
    h = [near(a + b, "bfloat16") for a, b in zip(x, r, strict=True)]
    inverse = f32(1 / STATIC)
    return [e4m3(f32(y * inverse)) for y in llama_order(h, gain, "bfloat16")], [STATIC]


def vllm_dynamic(x, r, gain):
    y = llama_order([a + b for a, b in zip(x, r, strict=True)], gain, "bfloat16")
    s = max(f32(max(map(abs, y)) / 448), f32(mpf(1) / (448 * 512)))
    return [e4m3(f32(v / s)) for v in y], [s]


def flashinfer_static(x, r, gain):
    h = [a + b for a, b in zip(x, r, strict=True)]
    return [e4m3(v * g * f32(1 / STATIC)) for v, g in zip(divided(h, h), gain, strict=True)], [STATIC]


def flashinfer_fp4(x, r, gain):
    y = divided([near(v * g, "bfloat16") for v, g in zip(x, gain, strict=True)], x)
    q, scales = [], []
    for block in blocks_of(y, 16):
        s = e4m3(f32(f32(GLOBAL * f32(max(map(abs, block)))) * f32(mpf(1) / 6)))
        q += [e2m1(v * f32(GLOBAL * f32(1 / s))) for v in block]
        scales.append(s)
    return q, scales


def trtllm_add_nvfp4(x, r, gain):
    q, scales = [], []
    for block in blocks_of(one_rounding([a + b for a, b in zip(x, r, strict=True)], gain), 16):
        s = e4m3(f32(GLOBAL * f32(max(map(abs, block)) * f32(mpf(1) / 6))))
        q += [e2m1(f32(v * f32(1 / f32(s * f32(1 / GLOBAL))))) for v in block]
        scales.append(s)
    return q, scales


def te_mxfp8(x, r, gain):
    q, scales = [], []
    for block in blocks_of(one_rounding(x, gain), 32):
        s = mpf(2) ** int(mp.ceil(mp.log(f32(max(map(abs, block)) * f32(mpf(1) / 448)), 2)))
        q += [e4m3(v / s) for v in block]
        scales.append(s)
    return q, scales


def te_nvfp4(x, r, gain):
    y = one_rounding(x, gain)
    g = f32(2688 / max(map(abs, y)))
    q, scales = [], []
    for block in blocks_of(y, 16):
        s = e4m3(f32(max(map(abs, block)) * f32(g * f32(mpf(1) / 6))))
        q += [e2m1(f32(v * f32(1 / f32(s * f32(1 / g))))) for v in block]
        scales.append(s)
    return q, scales


def torchao_mx(x, r, gain):
    q, scales = [], []
    for block in blocks_of(one_rounding(x, gain), 32):
        s = mpf(2) ** (int(mp.floor(mp.log(max(map(abs, block)), 2))) - 8)
        q += [e4m3(v / s) for v in block]
        scales.append(s)
    return q, scales


def aiter_int8(x, r, gain):
    h = [a + b for a, b in zip(x, r, strict=True)]
    y = [v * g for v, g in zip(divided(h, h), gain, strict=True)]
    s = f32(f32(max(map(abs, y))) * f32(mpf(1) / 127))
    return [mpf(int(v * f32(1 / s))) for v in y], [s]


def llama_q8_0(x, r, gain):
    q, scales = [], []
    for block in blocks_of(llama_order(x, gain, "float32"), 32):
        d = f32(max(map(abs, block)) / 127)
        q += [mp.sign(v) * mp.floor(abs(f32(v * f32(1 / d))) + mpf(1) / 2) for v in block]
        scales.append(near(d, "float16"))
    return q, scales


def onnx_qdq(x, r, gain):
    y = llama_order(x, gain, "bfloat16")
    return [max(min(mp.nint(f32(v / STATIC)), 127), -128) for v in y], [STATIC]


REFERENCES = {
    "vllm.static": vllm_static, "vllm.dynamic_fp8": vllm_dynamic, "flashinfer.static": flashinfer_static,
    "flashinfer.fp4": flashinfer_fp4, "trtllm.add_nvfp4": trtllm_add_nvfp4, "te.mxfp8": te_mxfp8,
    "te.nvfp4": te_nvfp4, "torchao.mx": torchao_mx, "aiter.int8": aiter_int8, "llama.q8_0": llama_q8_0,
    "onnx.qdq": onnx_qdq,
}  # fmt: skip
EPS, STATIC, GLOBAL = (mpf(float(number)) for number in (1e-3, np.float32(0.013), np.float32(371.3)))
ADDING = {"vllm.static", "vllm.dynamic_fp8", "flashinfer.static", "trtllm.add_nvfp4", "aiter.int8"}


def call_options(name):
    """The scales that a call of this preset needs."""
    quantisation = Quantisation.get(name)
    static = {"static_scale": float(STATIC)} if quantisation.block == "static" else {}
    return static | ({"global_scale": float(GLOBAL)} if quantisation.global_scale == "given" else {})


def random_row(name, seed, n=64):
    rng = np.random.default_rng(seed)
    dtype = np.float32 if name == "llama.q8_0" else BF16
    size = 10.0 ** rng.uniform(-3, 2)
    x, r = ((size * rng.standard_normal(n)).astype(dtype) for _ in range(2))
    gain = (1 + 0.3 * rng.standard_normal(n)).astype(dtype)
    return x, (r if name in ADDING else None), gain


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
STATIC_1 = {"static_scale": 1.0}


def with_gain(row, index, value):
    gain = np.ones(8)
    gain[index] = value
    return np.array(row).astype(BF16), gain.astype(BF16)


VLLM = preset("vllm.static")
F32 = np.float32
FLOOR_OF_AITER = float(F32(1e-10) * (F32(1) / F32(127)))
E5M2 = VLLM.replace(element="e5m2", qmax=57344.0, qmin=-57344.0)
INT8_ROW = preset("vllm.dynamic_fp8", element="int8", qmax=127.0, qmin=-127.0)
FP4 = preset("onnx.qdq", element="e2m1fn", qmax=6.0, qmin=-6.0)
MX8 = preset("torchao.mx", block=8)
NV8 = preset("trtllm.add_nvfp4", block=8)
WITNESSES = {  # name: (a quantisation, x and gain, options,
    #                       which output, index, its number, a change, the number then)
    "R(y), TensorRT-LLM 14464": (
        VLLM, with_gain(UNIT, 2, 109 / 128), STATIC_1,
        0, 2, 1.0, {"round_norm": False, "round_gain": False}, 1.125,
    ),
    "two roundings, vLLM 49639": (
        VLLM, with_gain(ROW_TWO, 0, 0.84375), STATIC_1,
        0, 0, -0.40625, {"round_norm": False}, -0.4375,
    ),
    "one rounding": (
        preset("flashinfer.static"), with_gain(ROW_ONE, 4, 0.609375), STATIC_1,
        0, 4, 0.8125, {"round_gain": True}, 0.875,
    ),
    "gain before rho, FlashInfer FP4": (
        preset("flashinfer.static", round_gain=True), with_gain(ROW_GAIN, 3, 0.6796875), STATIC_1,
        0, 3, 0.109375, {"order": "gain_first"}, 0.1015625,
    ),
    "tie 304": (
        VLLM, ones_times(304.0), STATIC_1,
        0, 0, 320.0, {"rounding": "half_down"}, 288.0,
    ),
    "division, A=3.0625": (
        preset("vllm.dynamic_fp8"), ones_times(3.0625, 2.734375), {},
        0, 1, 384.0, {"apply": "y * (1 / s)"}, 416.0,
    ),
    "division, A=3.875": (
        preset("vllm.dynamic_fp8"), ones_times(3.875, 2.90625), {},
        0, 1, 352.0, {"apply": "y * (1 / s)"}, 320.0,
    ),
    "division, int8": (
        INT8_ROW, ones_times(3.765625, 1.8828125), {},
        0, 1, 64.0, {"apply": "y * (1 / s)"}, 63.0,
    ),
    "division, FP4": (
        FP4, ones_times(0.0239257794), {"static_scale": 7 / 512},
        0, 0, 1.5, {"apply": "y * (1 / s)"}, 2.0,
    ),
    "float32 quotient": (
        preset("vllm.dynamic_fp8"), ones_times(2.03125, 1.5234375), {},
        0, 1, 320.0, {"round_scaled": "none"}, 352.0,
    ),
    "rounded after the scale, FlashInfer 4160": (
        VLLM, ones_times(1.078125, dtype=BF16), {"static_scale": 0.01},
        0, 0, 104.0, {"round_scaled": "bfloat16"}, 112.0,
    ),
    "the same of an odd size": (
        VLLM, ones_times(1.078125, dtype=BF16, n=9), {"static_scale": 0.01},
        0, 0, 104.0, {"round_scaled": "bfloat16"}, 112.0,
    ),
    "E5M2 at 448, FlashInfer 2639": (
        E5M2, ones_times(1000.0), STATIC_1,
        0, 0, 1024.0, {"qmax": 448.0, "qmin": -448.0}, 448.0,
    ),
    "E8M0 and the unrounded scale": (
        MX8, ones_times(300.0), {},
        0, 0, 288.0, {"quantise_with": "unrounded"}, 448.0,
    ),
    "E8M0 ceil": (
        MX8, ones_times(300.0), {},
        0, 0, 288.0, {"scale_round": "ceil"}, 144.0,
    ),
    "amax 0 in the formats of a scale": (
        MX8, ones_times(*[0.0] * 8), {},
        1, 0, 2.0**-127, {"scale_format": "float32", "scale_round": "half_even"}, 0.0,
    ),
    "amax below 1/512, vLLM": (
        preset("vllm.dynamic_fp8"), ones_times(*[2.0**-10] * 8), {},
        0, 0, 224.0, {"scale_floor": 0.0}, 448.0,
    ),
    "amax below 1e-4, DeepGEMM": (
        preset("vllm.dynamic_fp8", scale_floor=0.0), ones_times(*[1e-5] * 8), {},
        0, 0, 448.0, {"amax_floor": 1e-4}, 44.0,
    ),
    "amax 0 without a floor": (
        preset("aiter.int8"), ones_times(*[0.0] * 8), {},
        1, 0, FLOOR_OF_AITER, {"amax_floor": 0.0}, 0.0,
    ),
    "int8 127.6, OPUS": (
        preset("onnx.qdq"), ones_times(127.6), STATIC_1,
        0, 0, 127.0, {"overflow": "wrap"}, -128.0,
    ),
    "int8 -128": (
        preset("onnx.qdq"), ones_times(-200.0), STATIC_1,
        0, 0, -128.0, {"qmin": -127.0}, -127.0,
    ),
    "int8 0.5": (
        preset("onnx.qdq"), ones_times(0.5), STATIC_1,
        0, 0, 0.0, {"rounding": "half_away"}, 1.0,
    ),
    "int8 -126.5": (
        preset("onnx.qdq"), ones_times(-126.5), STATIC_1,
        0, 0, -126.0, {"rounding": "half_away"}, -127.0,
    ),
    "int8 truncated, aiter 4637": (
        preset("onnx.qdq"), ones_times(1.75), STATIC_1,
        0, 0, 2.0, {"rounding": "truncate"}, 1.0,
    ),
    "NaN in the gain": (
        VLLM, ones_times(math.nan), STATIC_1,
        0, 0, 448.0, {"nan": "zero"}, 0.0,
    ),
    "NaN in amax": (
        preset("vllm.dynamic_fp8"), ones_times(math.nan, 3.5), {},
        1, 0, 2.0**-7, {"amax_nan": "keep"}, math.nan,
    ),
    "infinity": (
        VLLM, ones_times(-math.inf), STATIC_1,
        0, 0, -448.0, {"overflow": "nan"}, math.nan,
    ),
    "E4M3 or E5M2": (
        VLLM, ones_times(300.0), STATIC_1,
        0, 0, 288.0, {"element": "e5m2"}, 320.0,
    ),
    "scale in float16, llama.cpp": (
        preset("llama.q8_0", block=8), ones_times(3.0), {},
        1, 0, float(np.float16(3 / 127)), {"scale_format": "float32"}, float(F32(3) / F32(127)),
    ),
    "E4M3 448 or 240": (
        VLLM, ones_times(300.0), STATIC_1,
        0, 0, 288.0, {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0}, 240.0,
    ),
    "E4M3FNUZ 240 or vLLM's 224": (
        VLLM.replace(element="e4m3fnuz", qmax=240.0, qmin=-240.0), ones_times(300.0), STATIC_1,
        0, 0, 240.0, {"qmax": 224.0, "qmin": -224.0}, 224.0,
    ),
    "scale by division": (
        preset("vllm.dynamic_fp8"), ones_times(3.0), {},
        1, 0, float(F32(3) / F32(448)), {"scale": "amax * (1 / qmax)"}, float(F32(3) * (F32(1) / F32(448))),
    ),
    "row or block": (
        MX8, ones_times(256.0, *[1.0] * 15, n=16), {},
        0, 8, 256.0, {"block": 16}, 1.0,
    ),
    "1 + gain in bfloat16, vLLM 53203": (
        preset("flashinfer.static", offset="exact"), ones_times(2.0**-4 + 2.0**-9, dtype=BF16), STATIC_1,
        0, 0, 1.125, {"offset": "rounded"}, 1.0,
    ),
    "1 + gain": (
        preset("flashinfer.static", offset="exact"), ones_times(0.5), STATIC_1,
        0, 0, 1.5, {"offset": "none"}, 0.5,
    ),
    "s_b 0, FlashInfer or TE": (
        preset("flashinfer.fp4", block=8), ones_times(*[2.0**-12] * 8), {"global_scale": 1.0},
        0, 0, 0.0, {"zero_scale": "largest"}, 6.0,
    ),
    "s_b 0 and y 0, TensorRT-LLM": (
        NV8, ones_times(*[0.0] * 8), {"global_scale": 1.0},
        0, 0, 6.0, {"zero_scale": "largest"}, 0.0,
    ),
}  # fmt: skip


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


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


def test_ties_at_304():
    """Between 288 and 320, whose code is even; in bfloat16 what is next to it is the tie."""
    near_tie = (303.98, 304.0, 304.02)
    assert result(VLLM, *ones_times(*near_tie), **STATIC_1)[0][:3].tolist() == [288, 320, 320]
    assert result(VLLM, *ones_times(*near_tie, dtype=BF16), **STATIC_1)[0][:3].tolist() == [320, 320, 320]


@cache
def next_to(numbers):
    """Rows of which (1 + r) g / rho is within 2^-54 of a number, which float64 cannot tell, and on which side.

    rho, the root of an integer, is irrational. g is the float32 nearest to the number times rho where that is close to
    2^-30, and r, of which R(1 + r) keeps nothing, mends the rest: it is the float32 below or above that.
    """
    rows = []
    with mp.workprec(400):
        for number in numbers:
            for a, b in np.ndindex(60, 60):
                row = np.float32([1, a, b, 0])
                mean = mpf(1 + a * a + b * b) / 4
                wanted = mpf(float(number)) * mp.sqrt(mean)
                gain = F32(float(wanted))
                distance = wanted / mpf(float(gain)) - 1
                if mp.sqrt(4 * mean) == mp.nint(mp.sqrt(4 * mean)) or abs(distance) > 2.0**-30:
                    continue
                nearest = F32(float(distance))
                for r in (np.nextafter(nearest, F32(-1)), nearest, np.nextafter(nearest, F32(1))):
                    error = (1 + mpf(float(r))) * mpf(float(gain)) / wanted - 1
                    if 0 < abs(error) < 2.0**-54:
                        rows.append((row, np.float32([r, 0, 0, 0]), gain, number, error > 0))
                break
    return rows


@pytest.mark.parametrize("element", ["e4m3fn", "int8"])
@pytest.mark.parametrize("rounding", ["half_even", "half_away", "half_down", "truncate"])
def test_what_is_next_to_a_tie_is_none(element, rounding):
    """Nor is what is next to a number that number, where it is truncated."""
    numbers = np.arange(120.0)
    if element == "e4m3fn":
        numbers = np.arange(8, 127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    qmax = 448.0 if element == "e4m3fn" else 127.0
    quantisation = preset(
        "flashinfer.static", statistic_reads="stored", element=element, qmax=qmax, qmin=-qmax, rounding=rounding,
        nan="qmax",
    )  # fmt: skip
    limits = numbers[1:] if rounding == "truncate" else (numbers[1:] + numbers[:-1]) / 2
    sides = set()
    for row, r, gain, limit, is_above in next_to(tuple(limits[::5])):
        below = int(np.searchsorted(numbers, limit)) - 1
        for sign in (1, -1):
            q, *_ = result(quantisation, row, np.full(4, sign * gain), static_scale=1.0, residual=r)
            assert sign * q[0] == numbers[below + is_above]
        sides.add(((below + is_above) % 2, is_above))
    assert len(sides) == 4, "an even and an odd code on each side"


@pytest.mark.parametrize("row", [[1, 5, 1, 3], [1, 7, 1, 7], [7, 5, 1, 11]])  # of root mean square 3, 5 and 7
def test_a_tie_is_one_where_the_factors_are_no_binary_fractions(row):
    """1 / rho is not in 106 bits, and (x / rho) * gain is the middle all the same: the division comes last."""
    x = np.tile(np.float32(row), 32)
    rho = np.float32(math.sqrt(np.mean(x**2)))
    codes = np.arange(len(x)) % 126
    numbers = np.arange(127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (numbers[codes] + numbers[codes + 1]) / 2
    even = numbers[np.where(codes % 2 == 0, codes, codes + 1)]
    gain = np.where(x == 1, rho * middles, 0).astype(np.float32)
    for order in ("norm_first", "gain_first"):
        for step in (1, 2.0**-23 + 1, 1 - 2.0**-23):
            q, _ = result(preset("flashinfer.static", order=order), x, gain * np.float32(step), static_scale=1)
            beside = numbers[codes] if step < 1 else numbers[codes + 1]
            assert q[x == 1].tolist() == (even if step == 1 else beside)[x == 1].tolist()


EXPONENTS = {  # A: of floor, rceil, ceil, even and nearest in E4M3
    256.0: (0, 0, 0, 0, -1), 300.0: (0, 0, 1, 0, -1), 448.0: (0, 0, 1, 0, 0), 449.0: (0, 1, 1, 0, 0),
    511.0: (0, 1, 1, 1, 0), 512.0: (1, 1, 1, 1, 0), 600.0: (1, 1, 2, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("amax", EXPONENTS)
def test_the_modes_of_e8m0(amax):
    modes = ("floor", "rceil", "ceil", "even", "nearest")
    x, gain = ones_times(amax)
    assert tuple(np.log2(result(MX8.replace(scale_round=m), x, gain)[1][0]) for m in modes) == EXPONENTS[amax]
    x, gain = ones_times(-amax * 2.0**-30)
    scales = [
        result(MX8.replace(scale_round=m), x, np.where(gain == 1, 0, gain).astype(np.float32))[1][0] for m in modes
    ]
    assert tuple(np.log2(scales) + 30) == EXPONENTS[amax]


@pytest.mark.parametrize(
    ("amax", "mode", "exponent"),
    [
        (np.nextafter(np.float32(8), np.float32(0)), "floor", 2 - 8), (2.0**-9 * (1 + 2.0**-22), "ceil", -8 - 8),
        (2.0**-9, "ceil", -9 - 8), (0.0, "floor", -127), (1e-40, "floor", -127), (2.0**-126, "rceil", -127),
        (math.inf, "floor", 120), (math.inf, "rceil", 127), (480.0, "even", 0), (496.0, "even", 1),
    ],
)  # fmt: skip
def test_exponents_next_to_powers_of_two(amax, mode, exponent):
    """Where a logarithm in float32 is wrong, and at the ends."""
    x, gain = np.ones(8, np.float32), np.full(8, amax, np.float32)
    assert result(MX8.replace(scale_round=mode), x, gain)[1].tolist() == [2.0**exponent]


@pytest.mark.parametrize("name", [name for name, row in QUANTISATIONS.items() if row.element != "int8"])
@pytest.mark.parametrize("size", [0.0, 1e-40, 6e-38, 1e-35])
def test_tiny_rows_have_no_nan(name, size):
    """Not even where a scale is 0 or its reciprocal leaves the range."""
    x, gain = np.ones(32, np.float32), np.full(32, size, np.float32)
    gain[1:] = 0
    options = dict.fromkeys(call_options(name), 1.0)
    q, scales, *_ = result(name, x, gain, **options)
    assert not np.isnan(q).any()
    assert not np.isnan(scales).any()
    zero = 6.0 if name == "trtllm.add_nvfp4" else 0.0  # where 0 / 0 is NaN, which is 6
    assert np.all(q[1:] == zero)


@pytest.mark.parametrize(
    ("name", "scale", "code"),
    [
        ("vllm.dynamic_fp8", float(np.float32(1 / (448 * 512))), 0), ("te.mxfp8", 2.0**-127, 0), ("te.nvfp4", 0.0, 0),
        ("torchao.mx", 2.0**-127, 0), ("flashinfer.fp4", 0.0, 0), ("trtllm.add_nvfp4", 0.0, 6), ("llama.q8_0", 0.0, 0),
        ("aiter.int8", FLOOR_OF_AITER, 0),
    ],
)  # fmt: skip
def test_zeros(name, scale, code):
    q, scales, *_ = result(name, np.zeros(32, np.float32), None, 1e-6, **dict.fromkeys(call_options(name), 1.0))
    assert (set(scales.ravel()), set(q)) == ({scale}, {code})


def test_the_global_scale_of_zeros_is_one():
    assert float(result("te.nvfp4", np.zeros(32, np.float32), None, 1e-6)[2]) == 1.0


def test_only_a_scale_of_zero_has_the_reciprocal_zero():
    """And not one whose reciprocal leaves the range of float32."""
    x, gain = ones_times(*[1e-40] * 16, n=16)
    q, scales = result("flashinfer.fp4", x, gain, global_scale=3e38)
    assert scales[0] > 0
    assert set(q) == {6.0}


def test_a_zero_keeps_its_sign_but_in_fnuz_and_int8():
    x, gain = ones_times(-0.0, -1e-30)
    assert np.signbit(result(VLLM, x, gain, **STATIC_1)[0][:2]).all()
    fnuz = VLLM.replace(element="e4m3fnuz", qmax=240.0, qmin=-240.0)
    assert not np.signbit(result(fnuz, x, gain, **STATIC_1)[0][:2]).any()
    assert rms_norm_quantised(x, gain, eps=0, static_scale=1, quantisation=FP4)[0].view(np.uint8)[:2].tolist() == [8, 8]


@pytest.mark.parametrize(
    ("name", "nan", "infinity"),
    [
        ("vllm.static", 448, 448), ("vllm.dynamic_fp8", 448, 448), ("flashinfer.static", 448, 448),
        ("te.mxfp8", math.nan, 448), ("flashinfer.fp4", 6, 6), ("onnx.qdq", 0, 127),
    ],
)  # fmt: skip
def test_nan_and_infinity_in_one_column(name, nan, infinity):
    options = dict.fromkeys(call_options(name), 1.0)
    x = np.ones(32, np.float32)
    for value, want in ((math.nan, nan), (math.inf, infinity)):
        gain = np.ones(32, np.float32)
        gain[3] = value
        q = result(name, x, gain, **options)[0]
        assert same(q[3], want)
        assert not np.isnan(np.delete(q, 3)).any()
    x[3] = math.nan
    assert all(same(code, nan) for code in result(name, x, None, **options)[0]), "a NaN in x reaches the whole row"


def test_torch_keeps_nan_in_amax():
    q, scales = result("torchao.mx", np.ones(64, np.float32), np.float32([math.nan] + [1] * 63))
    assert np.isnan(scales).tolist() == [True, False]
    assert np.isnan(q).tolist() == [True] * 32 + [False] * 32


def test_subnormal_codes_are_not_flushed():
    x, gain = ones_times(2.0**-10, 2.0**-10 * (1 + 2.0**-10), 1.5 * 2.0**-9, 2.0**-7)
    assert result(VLLM, x, gain, **STATIC_1)[0][:4].tolist() == [0, 2.0**-9, 2.0**-8, 2.0**-7]


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_of_e2m1(sign):
    """All seven, to even, in a block whose largest is 6 s."""
    x, gain = ones_times(*(sign * v for v in (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))
    q, scales = result(NV8, x, gain, global_scale=1.0)
    assert scales.tolist() == [1.0]
    assert (sign * q).tolist() == [6, 0, 1, 1, 2, 2, 4, 4]
    down = result(NV8.replace(rounding="half_down"), x, gain, global_scale=1.0)[0]
    assert (sign * down).tolist() == [6, 0, 0.5, 1, 1.5, 2, 3, 4]


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1fn"])
def test_codes_without_saturation_are_those_of_a_cast_from_float32(element):
    """ml_dtypes rounds float32 once; its overflow is NaN or infinity, and saturates in e2m1."""
    cast = getattr(ml_dtypes, ("float4_" if element == "e2m1fn" else "float8_") + element)
    largest = float(ml_dtypes.finfo(cast).max)
    every = np.arange(2 ** (4 if element == "e2m1fn" else 8)).astype(np.uint8).view(cast).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    above = np.float32(largest) * np.float32([1, 1.03, 1.035714, 1.0357143, 1.04, 1.0714, 1.0715, 1.1, 2])
    numbers = np.concatenate(
        [every, middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, -9), above, -above]
    )
    numbers = np.float32(numbers)
    quantisation = VLLM.replace(
        element=element, qmax=largest, qmin=-largest, round_norm=False, round_gain=False,
        overflow="saturate" if element == "e2m1fn" else "nan",
    )  # fmt: skip
    q, _ = rms_norm_quantised(np.ones_like(numbers), numbers, eps=0, static_scale=1, quantisation=quantisation)
    assert q.dtype == cast
    want = numbers.astype(cast)
    different = (q.view(np.uint8) != want.view(np.uint8)) & ~(np.isnan(q.astype(float)) & np.isnan(want.astype(float)))
    assert not different.any(), numbers[different]


# What a kernel may return.


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", QUANTISATIONS)
def test_the_golden_is_allowed_and_other_codes_are_not(name, seed):
    x, r, gain = random_row(name, seed)
    options = call_options(name)
    q, scales, *rest = rms_norm_quantised(x, gain, residual=r, eps=1e-3, quantisation=name, **options)
    g = rest[0] if name == "te.nvfp4" else options.get("global_scale")
    ends = {
        slack: allowed(x, gain, scales, residual=r, global_scale=g, eps=1e-3, quantisation=name, slack=slack)
        for slack in (0.0, 2.0**-20, 2.0**-6)
    }
    q = q.astype(np.float64)
    for low, high in ends.values():
        assert np.all((low <= q) & (q <= high))
    assert np.array_equal(*ends[0.0])
    narrow, wide = (np.count_nonzero(high > low) for low, high in (ends[2.0**-20], ends[2.0**-6]))
    assert narrow <= 3
    assert wide > narrow
    assert not np.all((ends[2.0**-20][0] <= 2 * q) & (2 * q <= ends[2.0**-20][1]))


def in_float32(name, x, r, gain):
    """What a kernel computes, every operation in float32: the codes and scales."""
    x, r, gain = (np.zeros_like(x, F32) if a is None else a.astype(F32) for a in (x, r, gain))
    h = (x + r).astype(BF16).astype(F32) if name == "vllm.static" else x + r
    inverse = F32(1) / np.sqrt(np.mean(h * h, dtype=F32) + F32(1e-3))
    if name.startswith("vllm"):
        y = ((h * inverse).astype(BF16).astype(F32) * gain).astype(BF16).astype(F32)
    else:
        y = h * inverse * gain
        y = y.astype(BF16).astype(F32) if name == "te.mxfp8" else y
    if name == "te.mxfp8":
        fraction, exponent = np.frexp(np.abs(y).reshape(-1, 32).max(1) * (F32(1) / F32(448)))
        scales = np.ldexp(F32(1), exponent - (fraction == 0.5)).astype(F32)
    else:
        largest = np.maximum(np.abs(y).max(keepdims=True) / F32(448), F32(1 / (448 * 512)))
        scales = largest if name == "vllm.dynamic_fp8" else F32(STATIC)
    s = np.repeat(scales, x.size // scales.size)
    v = y / s if name == "vllm.dynamic_fp8" else y * (F32(1) / s)
    return np.clip(v, F32(-448), F32(448)).astype(ml_dtypes.float8_e4m3fn), scales


@pytest.mark.parametrize("name", ["vllm.static", "flashinfer.static", "vllm.dynamic_fp8", "te.mxfp8"])
def test_a_kernel_in_float32_is_allowed(name):
    """Its 1 / rho errs by at most 64 / 2 + 4 roundings of 2^-24, h and each product of y by one more."""
    different = 0
    for seed in range(16):
        x, r, gain = random_row(name, seed)
        q, scales = in_float32(name, x, r, gain)
        options = {"residual": r, "eps": 1e-3, "quantisation": name}
        low, high = allowed(x, gain, scales, slack=40 * 2.0**-24, **options)
        q = q.astype(np.float64)
        assert np.all((low <= q) & (q <= high))
        assert np.count_nonzero(high > low) <= 3
        golden = result(name, x, gain, 1e-3, residual=r, **call_options(name))[0]
        different += np.count_nonzero(q != golden)
    assert different < 4, "of 1024 codes"


def test_a_moved_scale_is_allowed_with_its_own_codes_and_not_with_others():
    """amax one ulp of bfloat16 larger, by another order of the sum (vLLM 56117)."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal(4096).astype(BF16)
    q, scales = rms_norm_quantised(x, eps=1e-6, quantisation="vllm.dynamic_fp8")
    moved = scales * np.float32(1 + 2.0**-7)
    low, high = allowed(x, None, moved, eps=1e-6, quantisation="vllm.dynamic_fp8", slack=2.0**-22)
    consistent = (low + high) / 2
    q = q.astype(np.float64)
    assert np.mean((low <= q) & (q <= high)) < 0.95, "unmoved codes, and a scale that moved"
    low, high = allowed(x, None, scales, eps=1e-6, quantisation="vllm.dynamic_fp8", slack=2.0**-22)
    assert np.mean((low <= consistent) & (consistent <= high)) < 0.95


# The specification.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"element": "fp8"}, ValueError, "element is 'fp8', expected 'e4m3fn', 'e5m2'"),
        ({"round_norm": 1}, TypeError, "round_norm is 1 .int., expected a bool; use True or False"),
        ({"qmax": "448"}, TypeError, "qmax is '448' .str., expected a number; pass a float"),
        ({"qmax": 449}, ValueError, "qmax is 449, expected a number of e4m3fn above 0, at most 448; pass 448"),
        ({"qmax": 447}, ValueError, "qmax is 447, expected a number of e4m3fn"),
        ({"qmin": -128}, ValueError, "qmin is -128, expected -448; change it together with qmax"),
        ({"block": 0}, ValueError, "block is 0, expected 'static', 'row' or a number of elements; pass 16 or 32"),
        ({"block": 1.5}, TypeError, "block is 1.5 .float., expected 'static'"),
        ({"amax_floor": -1}, ValueError, "amax_floor is -1, expected a finite number >= 0; pass 0 for none"),
        ({"scale_round": "floor"}, ValueError, "scale_round is 'floor', expected half_even for a scale in float32"),
        ({"scale_format": "e8m0fnu"}, ValueError, "scale_round is 'half_even', expected floor or ceil or rceil"),
        ({"block": 16, "global_scale": "given"}, ValueError, "scale is .*, expected one with g, which .*; change"),
        ({"apply": "y * (g * (1 / s))"}, ValueError, "apply is .*, expected one without g, which global_scale decides"),
        ({"overflow": "wrap"}, ValueError, "overflow is 'wrap', expected saturate or nan for e4m3fn"),
        ({"colour": "red"}, ValueError, "field is 'colour', expected 'name', 'element'"),
    ],
)  # fmt: skip
def test_a_field_out_of_its_domain_is_refused(changes, error, message):
    with pytest.raises(error, match=f"^Quantisation.*: {message}"):
        VLLM.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quantisation": "vllm.dynamic"}, ValueError, "did you mean 'vllm.dynamic_fp8'"),
        ({"quantisation": None}, TypeError, "quantisation is None .NoneType., expected a name or a Quantisation"),
        ({"static_scale": None}, ValueError, "static_scale is None, expected a number for this quantisation; pass it"),
        ({"static_scale": -1.0}, ValueError, "static_scale is -1.0, expected one number > 0"),
        ({"static_scale": [1.0, 2.0]}, ValueError, "static_scale is .1.0, 2.0., expected one number > 0"),
        ({"global_scale": 1.0}, ValueError, "global_scale is 1.0, expected None for this quantisation; leave it out"),
        ({"x": np.ones(8)}, TypeError, "x has dtype float64, expected float16, bfloat16 or float32; cast it first"),
        ({"scale": np.ones(7, np.float32)}, ValueError, "scale has shape"),
        ({"eps": -1.0}, ValueError, "eps is -1.0, expected a finite number >= 0"),
        ({"eps": None}, TypeError, "eps is None"),
        ({"quantisation": "te.mxfp8", "static_scale": None}, ValueError, "8, expected a multiple of the 32"),
    ],
)  # fmt: skip
def test_a_call_is_refused(changes, error, message):
    call = {"x": np.ones(8, np.float32), "quantisation": "vllm.static", "static_scale": 1.0, **changes}
    with pytest.raises(error, match=f"^rms_norm_quantised: .*{message}"):
        rms_norm_quantised(**call)


def test_allowed_refuses_scales_of_another_shape():
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"^allowed: scales has shape \(2,\), expected \(2, 1\) to match the blocks"):
        allowed(x, None, np.ones(2), slack=0.0, quantisation="te.mxfp8")
    with pytest.raises(ValueError, match=r"^allowed: slack is 1, expected a number in \[0, 1\)"):
        allowed(x, None, np.ones((2, 1)), slack=1, quantisation="te.mxfp8")


def test_presets_have_names_and_sources():
    assert list(QUANTISATIONS) == list(REFERENCES)
    for name, row in QUANTISATIONS.items():
        assert row.name == name
        assert row.source
        assert Quantisation.get(name) is row
        assert hash(row.replace(block=row.block)) == hash(row)


def test_empty_arrays():
    for shape in ((0, 32), (2, 0)):
        q, scales = rms_norm_quantised(np.zeros(shape, np.float32), quantisation="te.mxfp8")
        assert (q.shape, scales.shape) == (shape, (shape[0], shape[1] // 32))


def test_the_page_has_the_table_of_presets():
    page = (Path(__file__).parents[1] / "docs" / "quantised.md").read_text(encoding="utf-8")
    assert re.search(r"<!-- presets -->\n(.*?)<!-- end -->", page, re.DOTALL)[1] == table()


def table():
    """The presets and the fields in which they differ from the defaults, for docs/quantised.md."""
    defaults = Quantisation(name="")
    lines = ["| preset | source | its fields, where they are not the defaults |", "| --- | --- | --- |"]
    for name, row in QUANTISATIONS.items():
        values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name not in ("name", "source")}
        changed = [f"`{key}={v!r}`" for key, v in values.items() if v != getattr(defaults, key)]
        lines.append(f"| `{name}` | {row.source} | {' '.join(changed)} |")
    return "\n".join(lines) + "\n"
