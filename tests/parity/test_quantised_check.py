"""``check`` with a quantisation: honest float32 kernels pass, and one wrong field is refused."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from rmsnorm import Quantisation
from rmsnorm.parity import check
from rmsnorm.quantisation import FORMATS, QUANTISATIONS

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")
F32 = np.float32


def kernel(preset, computes=None):
    """A kernel in NumPy, each operation in float32, that returns what the preset does and computes something else."""
    p, layout = computes or preset, preset

    def norm_quantised(x, scale, *, eps, residual=None, static_scale=None, global_scale=None):
        with np.errstate(all="ignore"):
            h, y = normalised(p, x, scale, residual, eps)
            rows, n = y.shape
            size = p.block if isinstance(p.block, int) else n
            reduce = np.fmax if p.amax_nan == "drop" else np.maximum
            amax = reduce.reduce(np.abs(y).reshape(rows, -1, size), axis=2, initial=F32(0))
            amax = np.maximum(amax, F32(p.amax_floor))
            g = F32(global_scale or 1)
            if p.global_scale == "amax":
                largest = amax.max(initial=0)
                g = F32(1) if largest in (0, np.inf) else min(F32(448 * p.qmax) / largest, np.finfo(F32).max)
            s, stored = (F32(static_scale),) * 2 if p.block == "static" else scales_of(p, amax, g)
            wide = s if p.block == "static" else np.repeat(s, size, axis=1)
            q = codes_of(p, quotient(p, y, wide, g))
        outputs = [q] if layout.block == "static" else [q, stored]
        return (*outputs, *([g] if layout.global_scale == "amax" else []), *([] if residual is None else [h]))

    return norm_quantised


def normalised(p, x, scale, residual, eps):
    total = x.astype(F32) if residual is None else x.astype(F32) + residual.astype(F32)
    h = total.astype(x.dtype)
    if p.residual_rounding == "truncate" and residual is not None:
        exact = x.astype(np.float64) + residual.astype(np.float64)
        over = np.abs(h.astype(np.float64)) > np.abs(exact)
        bits = f"u{h.dtype.itemsize}"
        h = (h.view(bits) - over.astype(bits)).view(x.dtype)
    read = total if p.statistic_reads == "sum" else h.astype(F32)
    inverse = F32(1) / np.sqrt(np.mean(read * read, axis=-1, keepdims=True, dtype=F32) + F32(eps))
    gain = scale.astype(F32) if p.offset == "none" else scale.astype(F32) + F32(1)
    gain = gain.astype(scale.dtype).astype(F32) if p.offset == "rounded" else gain
    y = total if p.values_read == "sum" else h.astype(F32)
    steps = [(inverse, p.round_norm), (gain, p.round_gain)]
    for factor, is_rounded in steps if p.order == "norm_first" else steps[::-1]:
        y = y * factor
        y = y.astype(x.dtype).astype(F32) if is_rounded else y
    return h, y


def scales_of(p, amax, g):
    """What y is divided by, and what is returned."""
    inverse = F32(1) / F32(p.qmax)
    s = {
        "amax / qmax": lambda: amax / F32(p.qmax),
        "amax * (1 / qmax)": lambda: amax * inverse,
        "(g * amax) * (1 / qmax)": lambda: (g * amax) * inverse,
        "g * (amax * (1 / qmax))": lambda: g * (amax * inverse),
        "amax * (g * (1 / qmax))": lambda: amax * (g * inverse),
    }[p.scale]()
    s = np.maximum(s, F32(p.scale_floor))
    if p.scale_format == "e4m3fn":
        stored = np.clip(s, 0, 448).astype(ml_dtypes.float8_e4m3fn)
    elif p.scale_format == "e8m0fnu":
        stored = exponents(p, amax, s).astype(np.uint8)
        wide = np.where(stored == 255, np.nan, np.ldexp(1.0, stored.astype(int) - 127)).astype(F32)
        return (wide if p.quantise_with == "stored" else s), stored
    else:
        stored = s.astype(p.scale_format)
    return (stored.astype(F32) if p.quantise_with == "stored" else s), stored


def exponents(p, amax, s):
    """By the bits of float32."""
    number = np.ascontiguousarray(s if p.scale_round in ("rceil", "nearest") else amax)
    bits = number.view(np.int32).astype(np.int64)
    mantissa, emax = FORMATS[p.element].mantissa, np.frexp(p.qmax)[1] - 1
    up = {
        "floor": 0, "ceil": 2**23 - 1, "rceil": 2**23 - 1, "even": 2 ** (22 - mantissa),
        "nearest": 2**23 - (int(F32(2**0.5).view(np.int32)) & (2**23 - 1)),
    }[p.scale_round]  # fmt: skip
    e = (np.where(np.isinf(number), bits, bits + up) >> 23) - (0 if number is s else emax)
    e = np.where(bits <= (2**22 if up == 2**23 - 1 else 0), 0, e)  # of what is at most 2^-127
    return np.where(np.isnan(number), 255, np.clip(e, 0, 254))


def quotient(p, y, s, g):
    if p.apply == "y / s":
        v = y / s
    else:
        factor = {
            "y * (1 / s)": lambda: F32(1) / s,
            "y * (g * (1 / s))": lambda: g * (F32(1) / s),
            "y * (1 / (s * (1 / g)))": lambda: F32(1) / (s * (F32(1) / g)),
        }[p.apply]()
        factor = np.where(s == 0, F32(0), factor) if p.zero_scale == "zero" else factor
        v = y * (np.minimum(factor, np.finfo(F32).max) if p.zero_scale == "largest" else factor)
    return v.astype(ml_dtypes.bfloat16).astype(F32) if p.round_scaled == "bfloat16" else v


def codes_of(p, v):
    nan = np.isnan(v)
    if p.element == "int8":
        v = np.where(nan, 0, np.clip(v, -(2.0**40), 2.0**40)).astype(np.float64)
        size = np.abs(v)
        whole = {
            "half_even": np.rint(size), "half_away": np.floor(size + 0.5), "half_down": np.ceil(size - 0.5),
            "truncate": np.floor(size),
        }[p.rounding] * np.sign(v)  # fmt: skip
        whole = np.clip(whole, p.qmin, p.qmax) if p.overflow == "saturate" else whole
        whole = np.where(nan, p.qmax if p.nan == "qmax" else 0, whole).astype(np.int64)
        return (whole & 255).astype(np.uint8).view(np.int8)
    dtype = getattr(ml_dtypes, ("float4_" if p.element == "e2m1fn" else "float8_") + p.element)
    bounded = np.clip(v, F32(p.qmin), F32(p.qmax)) if p.overflow == "saturate" else v
    if p.rounding != "half_even":
        every = np.arange(16 if p.element == "e2m1fn" else 256).astype(np.uint8).view(dtype).astype(np.float64)
        every = np.append(np.unique(np.abs(every[np.isfinite(every)])), np.inf)
        low = np.searchsorted(every, np.where(nan, 0, np.abs(bounded)), side="right") - 1
        middle = (every[low] + every[low + 1]) / 2
        size = np.abs(bounded)
        above = {"half_away": size >= middle, "half_down": size > middle, "truncate": size < 0}[p.rounding]
        bounded = np.where(nan, bounded, np.copysign(every[low + above], bounded)).astype(F32)
    if p.nan != "nan":
        bounded = np.where(nan, F32(p.qmax if p.nan == "qmax" else 0), bounded)
    return bounded.astype(dtype)


def refused(preset, function, **options):
    report = check(function, quantisation=preset, framework="numpy", **options)
    assert not report.passed
    return report


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_an_honest_kernel_passes(name):
    report = check(kernel(Quantisation.get(name)), quantisation=name, framework="numpy")
    assert report.passed, report.text
    counts = report.counts
    assert counts.get("wrong", 0) == 0
    assert counts.get("tie", 0) < counts["rows"]  # aiter: 126 or 127 for the largest of a row
    assert counts["rows"] > 100


PAIRS = list(zip(QUANTISATIONS, [*list(QUANTISATIONS)[1:], "vllm.static"], strict=True))


@pytest.mark.parametrize(("asked", "computed"), PAIRS)
def test_another_preset_is_named(asked, computed):
    report = refused(asked, kernel(Quantisation.get(computed)), dtypes="bfloat16")
    assert report.instead == (computed,), report.text
    assert f"it is {computed}" in report.text


MUTANTS = [
    ("vllm.static", {"element": "e5m2"}), ("vllm.static", {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0}),
    ("vllm.static", {"qmax": 240.0, "qmin": -240.0}), ("vllm.dynamic_fp8", {"qmax": 240.0, "qmin": -240.0}),
    ("onnx.qdq", {"qmin": -127.0}), ("aiter.int8", {"qmin": -127.0, "overflow": "saturate"}),
    ("torchao.mx", {"block": 16}), ("te.nvfp4", {"block": 32}), ("vllm.dynamic_fp8", {"block": 32}),
    ("vllm.static", {"residual_rounding": "truncate"}), ("aiter.int8", {"residual_rounding": "nearest"}),
    ("vllm.static", {"statistic_reads": "sum"}), ("vllm.dynamic_fp8", {"statistic_reads": "stored"}),
    ("flashinfer.static", {"statistic_reads": "stored"}), ("vllm.static", {"values_read": "sum"}),
    ("vllm.dynamic_fp8", {"values_read": "stored"}), ("flashinfer.static", {"values_read": "stored"}),
    ("flashinfer.fp4", {"order": "norm_first"}), ("te.mxfp8", {"order": "gain_first"}),
    ("vllm.static", {"round_norm": False}), ("te.mxfp8", {"round_norm": True}),
    ("vllm.static", {"round_gain": False}), ("flashinfer.static", {"round_gain": True}),
    ("vllm.static", {"offset": "exact"}), ("aiter.int8", {"amax_floor": 0.0}),
    ("vllm.dynamic_fp8", {"amax_floor": 1e-4}), ("torchao.mx", {"amax_nan": "drop"}),
    ("vllm.dynamic_fp8", {"amax_nan": "keep"}), ("vllm.dynamic_fp8", {"scale": "amax * (1 / qmax)"}),
    ("aiter.int8", {"scale": "amax / qmax"}), ("vllm.dynamic_fp8", {"scale_floor": 0.0}),
    ("vllm.dynamic_fp8", {"scale_floor": 1e-10}), ("llama.q8_0", {"scale_format": "float32"}),
    ("torchao.mx", {"scale_round": "rceil"}), ("torchao.mx", {"scale_round": "ceil"}),
    ("torchao.mx", {"scale_round": "even"}), ("torchao.mx", {"scale_round": "nearest"}),
    ("te.mxfp8", {"scale_round": "floor"}), ("te.mxfp8", {"scale_round": "ceil"}),
    ("te.mxfp8", {"scale_round": "nearest"}), ("te.mxfp8", {"scale_round": "even"}),
    ("flashinfer.fp4", {"global_scale": "amax"}), ("te.nvfp4", {"global_scale": "given"}),
    ("torchao.mx", {"quantise_with": "unrounded"}), ("te.mxfp8", {"quantise_with": "unrounded"}),
    ("llama.q8_0", {"quantise_with": "stored"}), ("trtllm.add_nvfp4", {"quantise_with": "unrounded"}),
    ("vllm.static", {"apply": "y / s"}), ("vllm.dynamic_fp8", {"apply": "y * (1 / s)"}),
    ("onnx.qdq", {"apply": "y * (1 / s)"}), ("te.nvfp4", {"apply": "y * (g * (1 / s))"}),
    ("flashinfer.fp4", {"zero_scale": "infinity"}), ("flashinfer.fp4", {"zero_scale": "largest"}),
    ("trtllm.add_nvfp4", {"zero_scale": "largest"}), ("te.nvfp4", {"zero_scale": "zero"}),
    ("vllm.static", {"round_scaled": "bfloat16"}),
    ("flashinfer.static", {"round_scaled": "bfloat16"}), ("vllm.static", {"rounding": "half_down"}),
    ("vllm.static", {"rounding": "half_away"}), ("vllm.dynamic_fp8", {"rounding": "truncate"}),
    ("flashinfer.static", {"rounding": "half_down"}), ("flashinfer.fp4", {"rounding": "half_down"}),
    ("onnx.qdq", {"rounding": "half_away"}), ("onnx.qdq", {"rounding": "truncate"}),
    ("aiter.int8", {"rounding": "half_even"}), ("llama.q8_0", {"rounding": "half_even"}),
    ("onnx.qdq", {"overflow": "wrap"}), ("vllm.static", {"overflow": "nan"}), ("vllm.static", {"nan": "nan"}),
    ("vllm.static", {"nan": "zero"}), ("te.mxfp8", {"nan": "qmax"}), ("flashinfer.fp4", {"nan": "zero"}),
    ("onnx.qdq", {"nan": "qmax"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), MUTANTS)
def test_one_wrong_field_is_refused(name, changes):
    preset = Quantisation.get(name)
    full = {"qmax": 57344.0, "qmin": -57344.0} if changes.get("element") == "e5m2" else {}
    if changes == {"global_scale": "amax"}:
        full = {"scale": "amax * (g * (1 / qmax))"}
    dtype = "float32" if name == "llama.q8_0" else "bfloat16"
    refused(preset, kernel(preset, preset.replace(**changes, **full)), dtypes=dtype)


def test_every_field_has_a_mutant():
    fields = {field.name for field in dataclasses.fields(Quantisation)} - {"name", "source"}
    assert fields == {next(iter(changes)) for _, changes in MUTANTS}
