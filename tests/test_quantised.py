"""RMSNorm followed by quantisation: the golden against mpmath, and against what kernels were reported to return."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf

from rmsnorm import Quantisation
from rmsnorm.numpy_impl import allowed, rms_norm_quantised
from rmsnorm.quantisation import QUANTISATIONS

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
    rows = [[mpf(float(v)) for v in np.zeros_like(x)] if a is None else [mpf(float(v)) for v in a] for a in (x, r, gain)]
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
E5M2 = VLLM.replace(element="e5m2", qmax=57344.0, qmin=-57344.0)
INT8_ROW = preset("vllm.dynamic_fp8", element="int8", qmax=127.0, qmin=-127.0)
FP4 = preset("onnx.qdq", element="e2m1fn", qmax=6.0, qmin=-6.0)
MX8 = preset("torchao.mx", block=8)
NV8 = preset("trtllm.add_nvfp4", block=8)
WITNESSES = {  # name: (a quantisation, x and gain, options, output, index, its number, the change, the number then)
    "R(y), TensorRT-LLM 14464": (VLLM, with_gain(UNIT, 2, 109 / 128), STATIC_1, 0, 2, 1.0, {"round_norm": False, "round_gain": False}, 1.125),
    "two roundings, vLLM 49639": (VLLM, with_gain(ROW_TWO, 0, 0.84375), STATIC_1, 0, 0, -0.40625, {"round_norm": False}, -0.4375),
    "one rounding": (preset("flashinfer.static"), with_gain(ROW_ONE, 4, 0.609375), STATIC_1, 0, 4, 0.8125, {"round_gain": True}, 0.875),
    "gain before rho, FlashInfer FP4": (preset("flashinfer.static", round_gain=True), with_gain(ROW_GAIN, 3, 0.6796875), STATIC_1, 0, 3, 0.109375, {"order": "gain_first"}, 0.1015625),
    "tie 304": (VLLM, ones_times(304.0), STATIC_1, 0, 0, 320.0, {"rounding": "half_down"}, 288.0),
    "division, A=3.0625": (preset("vllm.dynamic_fp8"), ones_times(3.0625, 2.734375), {}, 0, 1, 384.0, {"apply": "y * (1 / s)"}, 416.0),
    "division, A=3.875": (preset("vllm.dynamic_fp8"), ones_times(3.875, 2.90625), {}, 0, 1, 352.0, {"apply": "y * (1 / s)"}, 320.0),
    "division, int8": (INT8_ROW, ones_times(3.765625, 1.8828125), {}, 0, 1, 64.0, {"apply": "y * (1 / s)"}, 63.0),
    "division, FP4": (FP4, ones_times(0.0239257794), {"static_scale": 7 / 512}, 0, 0, 1.5, {"apply": "y * (1 / s)"}, 2.0),
    "float32 quotient": (preset("vllm.dynamic_fp8"), ones_times(3.0625, 2.734375), {}, 0, 1, 384.0, {"round_scaled": "none"}, 416.0),
    "rounded after the scale, FlashInfer 4160": (VLLM, ones_times(1.078125, dtype=BF16), {"static_scale": 0.01}, 0, 0, 104.0, {"round_scaled": "bfloat16"}, 112.0),
    "the same of an odd size": (VLLM, ones_times(1.078125, dtype=BF16, n=9), {"static_scale": 0.01}, 0, 0, 104.0, {"round_scaled": "bfloat16"}, 112.0),
    "E5M2 at 448, FlashInfer 2639": (E5M2, ones_times(1000.0), STATIC_1, 0, 0, 1024.0, {"qmax": 448.0, "qmin": -448.0}, 448.0),
    "E8M0 and the unrounded scale": (MX8, ones_times(300.0), {}, 0, 0, 288.0, {"quantise_with": "unrounded"}, 448.0),
    "E8M0 ceil": (MX8, ones_times(300.0), {}, 0, 0, 288.0, {"scale_round": "ceil"}, 144.0),
    "amax 0 in the formats of a scale": (MX8, ones_times(*[0.0] * 8), {}, 1, 0, 2.0**-127, {"scale_format": "float32", "scale_round": "half_even"}, 0.0),
    "amax below 1/512, vLLM": (preset("vllm.dynamic_fp8"), ones_times(*[2.0**-10] * 8), {}, 0, 0, 224.0, {"scale_floor": 0.0}, 448.0),
    "amax below 1e-4, DeepGEMM": (preset("vllm.dynamic_fp8", scale_floor=0.0), ones_times(*[1e-5] * 8), {}, 0, 0, 448.0, {"amax_floor": 1e-4}, 44.0),
    "amax 0 without a floor": (preset("aiter.int8"), ones_times(*[0.0] * 8), {}, 1, 0, float(np.float32(1e-10) * (np.float32(1) / np.float32(127))), {"amax_floor": 0.0}, 0.0),
    "int8 127.6, OPUS": (preset("onnx.qdq"), ones_times(127.6), STATIC_1, 0, 0, 127.0, {"overflow": "wrap"}, -128.0),
    "int8 -128": (preset("onnx.qdq"), ones_times(-200.0), STATIC_1, 0, 0, -128.0, {"qmin": -127.0}, -127.0),
    "int8 0.5": (preset("onnx.qdq"), ones_times(0.5), STATIC_1, 0, 0, 0.0, {"rounding": "half_away"}, 1.0),
    "int8 -126.5": (preset("onnx.qdq"), ones_times(-126.5), STATIC_1, 0, 0, -126.0, {"rounding": "half_away"}, -127.0),
    "int8 truncated, aiter 4637": (preset("onnx.qdq"), ones_times(1.75), STATIC_1, 0, 0, 2.0, {"rounding": "truncate"}, 1.0),
    "NaN in the gain": (VLLM, ones_times(math.nan), STATIC_1, 0, 0, 448.0, {"nan": "zero"}, 0.0),
    "NaN in a row": (preset("vllm.dynamic_fp8"), ones_times(math.nan, 2.0), {}, 0, 1, 448.0, {"amax_nan": "keep", "nan": "zero"}, 0.0),
    "infinity": (VLLM, ones_times(-math.inf), STATIC_1, 0, 0, -448.0, {"overflow": "nan"}, math.nan),
    "E4M3 448 or 240": (VLLM, ones_times(300.0), STATIC_1, 0, 0, 288.0, {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0}, 240.0),
    "E4M3FNUZ 240 or vLLM's 224": (VLLM.replace(element="e4m3fnuz", qmax=240.0, qmin=-240.0), ones_times(300.0), STATIC_1, 0, 0, 240.0, {"qmax": 224.0, "qmin": -224.0}, 224.0),
    "scale by division": (preset("vllm.dynamic_fp8"), ones_times(3.0), {}, 1, 0, float(np.float32(3) / np.float32(448)), {"scale": "amax * (1 / qmax)"}, float(np.float32(3) * (np.float32(1) / np.float32(448)))),
    "row or block": (MX8, ones_times(256.0, *[1.0] * 15, n=16), {}, 1, 1, 2.0**-8, {"block": 16}, None),
    "1 + gain in bfloat16, vLLM 53203": (preset("flashinfer.static", offset="exact"), ones_times(2.0**-9, dtype=BF16), {"static_scale": 2.0**-9 * 1.0625}, 0, 0, 448.0, {"offset": "rounded"}, None),
    "1 + gain": (preset("flashinfer.static", offset="exact"), ones_times(0.5), STATIC_1, 0, 0, 1.5, {"offset": "none"}, 0.5),
    "s_b 0, FlashInfer or TE": (preset("flashinfer.fp4", block=8), ones_times(*[2.0**-12] * 8), {"global_scale": 1.0}, 0, 0, 0.0, {"zero_scale": "largest"}, 6.0),
    "s_b 0 and y 0, TensorRT-LLM": (NV8, ones_times(*[0.0] * 8), {"global_scale": 1.0}, 0, 0, 6.0, {"zero_scale": "largest"}, 0.0),
}  # fmt: skip
