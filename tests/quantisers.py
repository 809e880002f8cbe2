"""Each preset of a quantisation written out by itself, in mpmath."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from mpmath import mp, mpf

from rmsnorm import Quantisation
from rmsnorm.numpy_impl import rms_norm_quantised

BF16 = ml_dtypes.bfloat16
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


def in_blocks(values, size, scale, code):
    """The codes, and the scale of each block, of its largest."""
    q, scales = [], []
    for i in range(0, len(values), size):
        scales.append(scale(max(map(abs, values[i : i + size]))))
        q += [code(v, scales[-1]) for v in values[i : i + size]]
    return q, scales


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
    return in_blocks(
        y,
        16,
        lambda a: e4m3(f32(f32(GLOBAL * f32(a)) * f32(mpf(1) / 6))),
        lambda v, s: e2m1(v * f32(GLOBAL * f32(1 / s))),
    )


def trtllm_add_nvfp4(x, r, gain):
    y = one_rounding([a + b for a, b in zip(x, r, strict=True)], gain)
    return in_blocks(
        y,
        16,
        lambda a: e4m3(f32(GLOBAL * f32(a * f32(mpf(1) / 6)))),
        lambda v, s: e2m1(f32(v * f32(1 / f32(s * f32(1 / GLOBAL))))),
    )


def te_mxfp8(x, r, gain):
    return in_blocks(
        one_rounding(x, gain),
        32,
        lambda a: mpf(2) ** int(mp.ceil(mp.log(f32(a * f32(mpf(1) / 448)), 2))),
        lambda v, s: e4m3(v / s),
    )


def te_nvfp4(x, r, gain):
    y = one_rounding(x, gain)
    g = f32(2688 / max(map(abs, y)))
    return in_blocks(
        y,
        16,
        lambda a: e4m3(f32(a * f32(g * f32(mpf(1) / 6)))),
        lambda v, s: e2m1(f32(v * f32(1 / f32(s * f32(1 / g))))),
    )


def torchao_mx(x, r, gain):
    return in_blocks(
        one_rounding(x, gain), 32, lambda a: mpf(2) ** (int(mp.floor(mp.log(a, 2))) - 8), lambda v, s: e4m3(v / s)
    )


def aiter_int8(x, r, gain):
    h = [a + b for a, b in zip(x, r, strict=True)]
    y = [v * g for v, g in zip(divided(h, h), gain, strict=True)]
    s = f32(f32(max(map(abs, y))) * f32(mpf(1) / 127))
    return [mpf(int(v * f32(1 / s))) for v in y], [s]


def llama_q8_0(x, r, gain):
    y = llama_order(x, gain, "float32")
    q, scales = in_blocks(
        y, 32, lambda a: f32(a / 127), lambda v, d: mp.sign(v) * mp.floor(abs(f32(v * f32(1 / d))) + mpf(1) / 2)
    )
    return q, [near(d, "float16") for d in scales]


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


def same(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


F32 = np.float32
