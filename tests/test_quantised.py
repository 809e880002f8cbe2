"""RMSNorm followed by quantisation: the golden against mpmath and in special cases, and what check_quantised says."""

from __future__ import annotations

import math
import re
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf

from rmsnorm import Quantisation
from rmsnorm.numpy_impl import rms_norm_quantised
from rmsnorm.parity import check_quantised, quantised
from rmsnorm.specification.quantisation import FORMATS, QUANTISATIONS

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")
BF16, F32 = ml_dtypes.bfloat16, np.float32
EPS, STATIC, GLOBAL = (mpf(float(F32(number))) for number in (1e-3, 0.013, 371.3))

preset = Quantisation.get


def result(quantisation, x, gain=None, eps=0.0, static=1.0, g=1.0, **options):
    """Each output as float64, for the scales that the quantisation needs."""
    own = Quantisation.get(quantisation)
    options |= {"static_scale": static} if own.block == "static" else {}
    options |= {"global_scale": g} if own.global_scale == "given" else {}
    outputs = rms_norm_quantised(np.asarray(x), gain, eps=eps, quantisation=own, **options)
    return [np.asarray(output).astype(np.float64) for output in outputs]


def of_gain(quantisation, *values, n=8, dtype=F32, **options):
    """The outputs for x of ones: so y, before it is rounded, is the gain, and 1 after these values."""
    return result(quantisation, np.ones(n, dtype), np.append(values, np.ones(n - len(values))).astype(dtype), **options)


def near(value, precision=24, least=-126, largest=mp.inf):
    """Rounded to nearest, ties to even, with saturation."""
    if value == 0:
        return value
    step = mpf(2) ** (max(int(mp.floor(mp.log(abs(value), 2))), least) - precision + 1)
    return max(min(mp.nint(value / step) * step, largest), -largest)


bf16 = partial(near, precision=8)
e4m3, e2m1 = partial(near, precision=4, least=-6, largest=448), partial(near, precision=2, least=0, largest=6)
ADDING = {"vllm.static", "vllm.dynamic_fp8", "flashinfer.static", "trtllm.add_nvfp4", "aiter.int8"}
TWICE, ONCE, NEVER = (  # how often y is rounded, of h, rho and the gain
    lambda h, rho, gain: bf16(bf16(h / rho) * gain), lambda h, rho, gain: bf16(h / rho * gain),
    lambda h, rho, gain: h / rho * gain)  # fmt: skip
# y; the block; the scale of amax and g; the code of y, its scale and g.
REFERENCES = {
    "vllm.static": (TWICE, 64, lambda a, g: STATIC, lambda v, s, g: e4m3(near(v * near(1 / s)))),
    "vllm.dynamic_fp8": (TWICE, 64, lambda a, g: max(near(a / 448), near(mpf(1) / (448 * 512))),
                         lambda v, s, g: e4m3(near(v / s))),
    "flashinfer.static": (NEVER, 64, lambda a, g: STATIC, lambda v, s, g: e4m3(v * near(1 / s))),
    "flashinfer.fp4": (lambda h, rho, gain: bf16(h * gain) / rho, 16,
                       lambda a, g: e4m3(near(near(g * near(a)) * near(mpf(1) / 6))),
                       lambda v, s, g: e2m1(v * near(g * near(1 / s)))),
    "trtllm.add_nvfp4": (ONCE, 16, lambda a, g: e4m3(near(g * near(a * near(mpf(1) / 6)))),
                         lambda v, s, g: e2m1(near(v * near(1 / near(s * near(1 / g)))))),
    "te.mxfp8": (ONCE, 32, lambda a, g: mp.ldexp(1, int(mp.ceil(mp.log(near(a * near(mpf(1) / 448)), 2)))),
                 lambda v, s, g: e4m3(v / s)),
    "te.nvfp4": (ONCE, 16, lambda a, g: e4m3(near(a * near(g * near(mpf(1) / 6)))),
                 lambda v, s, g: e2m1(near(v * near(1 / near(s * near(1 / g)))))),
    "torchao.mx": (ONCE, 32, lambda a, g: mp.ldexp(1, int(mp.floor(mp.log(a, 2))) - 8), lambda v, s, g: e4m3(v / s)),
    "aiter.int8": (NEVER, 64, lambda a, g: near(near(a) * near(mpf(1) / 127)), lambda v, s, g: int(v * near(1 / s))),
    "llama.q8_0": (lambda h, rho, gain: near(near(h / rho) * gain), 32, lambda a, g: near(a / 127),
                   lambda v, s, g: mp.sign(v) * mp.floor(abs(near(v * near(1 / s))) + mpf(1) / 2)),
    "onnx.qdq": (TWICE, 64, lambda a, g: STATIC, lambda v, s, g: max(min(mp.nint(near(v / s)), 127), -128)),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISATIONS)
@pytest.mark.parametrize("seed", range(6))
def test_the_outputs_are_those_of_mpmath(name, seed):
    rng, dtype = np.random.default_rng(seed), F32 if name == "llama.q8_0" else BF16
    x, r = ((10.0 ** rng.uniform(-3, 2) * rng.standard_normal(64)).astype(dtype) for _ in range(2))
    gain = (1 + 0.3 * rng.standard_normal(64)).astype(dtype)
    r = r if name in ADDING else None
    q, scales, *rest = result(name, x, gain, float(EPS), float(STATIC), float(GLOBAL), residual=r)
    y_of, size, scale_of, code_of = REFERENCES[name]
    with mp.workprec(400):
        h = [mpf(float(a)) + mpf(float(b)) for a, b in zip(x, np.zeros(64) if r is None else r, strict=True)]
        read = [bf16(v) for v in h] if name == "vllm.static" else h
        rho = mp.sqrt(mp.fsum(v * v for v in read) / 64 + EPS)
        y = [y_of(v, rho, mpf(float(g))) for v, g in zip(read, gain, strict=True)]
        g = near(2688 / max(map(abs, y))) if name == "te.nvfp4" else GLOBAL
        own = [scale_of(max(map(abs, y[i : i + size])), g) for i in range(0, 64, size)]
        assert q.tolist() == [float(code_of(v, own[i // size], g)) for i, v in enumerate(y)]
        assert scales.ravel().tolist() == [float(near(s, 11, -14) if name == "llama.q8_0" else s) for s in own]
    assert len(rest) == (r is not None) + (name == "te.nvfp4")
    if r is not None:
        total = x.astype(float) + r.astype(float)
        stored = total.astype(BF16).astype(float)
        beyond = (np.abs(stored) > np.abs(total)) & (name == "aiter.int8")  # which truncates
        toward_zero = np.nextafter(stored.astype(BF16), BF16(0)).astype(float)
        assert rest[-1].tolist() == np.where(beyond, toward_zero, stored).tolist()


VLLM, MX8, NV8 = preset("vllm.static"), *(preset(a).replace(block=8) for a in ("torchao.mx", "trtllm.add_nvfp4"))
FNUZ = VLLM.replace(element="e4m3fnuz", qmax=240.0, qmin=-240.0)
FLASH, DYNAMIC, INT8 = preset("flashinfer.static"), preset("vllm.dynamic_fp8"), preset("onnx.qdq")
# What no preset has: the gain where x and rho are 1, one field, and an output and its element without and with it.
CHOICES = [
    (INT8, (127.6,), {"overflow": "wrap"}, 0, 0, 127, -128),
    (FNUZ, (300.0,), {"qmax": 224.0, "qmin": -224.0}, 0, 0, 240, 224),
    (DYNAMIC, (math.nan, 3.5), {"amax_nan": "keep"}, 1, 0, 2.0**-7, math.nan),
    (FLASH.replace(round_scaled="float32"), (107.9,), {"round_scaled": "bfloat16"}, 0, 0, 104, 112),
    (FLASH, (0.5,), {"offset": "exact"}, 0, 0, 0.5, 1.5),
    (FLASH.replace(offset="exact"), (2.0**-4 + 2.0**-9,), {"offset": "rounded"}, 0, 0, 1.125, 1),
    (NV8, (6.0, 3.5), {"rounding": "half_down"}, 0, 1, 4, 3),
    (VLLM, (math.nan,), {"nan": "nan"}, 0, 0, 448, math.nan),
    (preset("te.mxfp8").replace(block=8), (math.nan,), {"nan": "zero"}, 0, 0, math.nan, 0),
]  # fmt: skip


@pytest.mark.parametrize(("quantisation", "gain", "changes", "output", "index", "want", "then"), CHOICES)
def test_a_field_decides_a_code(quantisation, gain, changes, output, index, want, then):
    dtype = BF16 if np.array_equal(np.array(gain).astype(BF16).astype(float), gain) else F32
    for own, number in ((quantisation, want), (quantisation.replace(**changes), then)):
        got = of_gain(own, *gain, dtype=dtype)[output].ravel()[index]
        assert got == number or (math.isnan(got) and math.isnan(number))


def test_a_tie_is_one_where_the_factors_are_no_binary_fractions_and_what_is_next_to_it_is_none():
    """1 / rho is not in 106 bits, and (x / rho) * gain is the middle all the same: the division comes last."""
    numbers = np.arange(127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    for row, rho in (([1, 5, 1, 3], 3), ([1, 7, 1, 7], 5), ([7, 5, 1, 11], 7)):
        x = np.tile(F32(row), 32)
        codes = np.arange(len(x)) % 126
        gain = np.where(x == 1, rho * (numbers[codes] + numbers[codes + 1]) / 2, 0).astype(F32)
        for order in ("norm_first", "gain_first"):
            # 1 + r is rounded to 1 where it is stored, and what it adds to y is below the resolution of float64
            for side, r in ((0, 0.0), (1, 2.0**-60), (-1, -(2.0**-60))):
                q, *_ = result(FLASH.replace(order=order), x, gain, residual=np.where(x == 1, F32(r), F32(0)))
                up = codes % 2 == 1 if side == 0 else np.full(len(x), side > 0)
                assert q[x == 1].tolist() == numbers[codes + up][x == 1].tolist()


EXPONENTS = {  # of floor, rceil, ceil, even and nearest in E4M3, for amax
    256.0: (0, 0, 0, 0, -1), 300.0: (0, 0, 1, 0, -1), 448.0: (0, 0, 1, 0, 0), 449.0: (0, 1, 1, 0, 0),
    511.0: (0, 1, 1, 1, 0), 512.0: (1, 1, 1, 1, 0), 600.0: (1, 1, 2, 1, 0), 480.0: (0, 1, 1, 0, 0),
    496.0: (0, 1, 1, 1, 0), 2.0**-9: (-17, -17, -17, -17, -18), 0.0: (-127,) * 5, 8 - 2.0**-21: (-6, -5, -5, -5, -6),
    2.0**-9 * (1 + 2.0**-22): (-17, -17, -16, -17, -18), 1e-40: (-127,) * 5, math.inf: (120, 127, 120, 120, 127),
}  # fmt: skip


@pytest.mark.parametrize("amax", EXPONENTS)
def test_the_modes_of_e8m0(amax):
    for mode, exponent in zip(("floor", "rceil", "ceil", "even", "nearest"), EXPONENTS[amax], strict=True):
        assert np.log2(of_gain(MX8.replace(scale_round=mode), *[amax] * 8)[1]) == [exponent]


OF_ZERO = {  # the scale and the code
    "vllm.dynamic_fp8": (float(F32(1 / (448 * 512))), 0), "te.mxfp8": (2.0**-127, 0), "te.nvfp4": (0.0, 0),
    "torchao.mx": (2.0**-127, 0), "flashinfer.fp4": (0.0, 0), "trtllm.add_nvfp4": (0.0, 6), "llama.q8_0": (0.0, 0),
    "aiter.int8": (float(F32(1e-10) * (F32(1) / F32(127))), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ZERO)
def test_zeros_and_tiny_rows_give_no_nan(name):
    scale, code = OF_ZERO[name]
    q, scales, *g = result(name, np.zeros(32, F32), eps=1e-6)
    assert (set(scales.ravel()), set(q), g) == ({scale}, {code}, [1.0] if name == "te.nvfp4" else [])
    for size in (1e-40, 6e-38, 1e-35):  # where a scale is 0 or its reciprocal leaves the range
        q, scales, *_ = result(name, np.ones(32, F32), F32([size] + [0] * 31))
        assert not np.isnan([*q, *scales.ravel()]).any()
        assert set(q[1:]) == {code}
    assert set(of_gain("flashinfer.fp4", *[1e-40] * 16, n=16, g=3e38)[0]) == {6}, "of a scale above 0"
    for shape in ((0, 32), (2, 0)):
        q, scales = rms_norm_quantised(np.zeros(shape, F32), quantisation="te.mxfp8")
        assert (q.shape, scales.shape) == (shape, (shape[0], shape[1] // 32))


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn"])
def test_codes_without_saturation_are_those_of_a_cast_from_float32(element):
    """ml_dtypes rounds float32 once; its overflow is NaN or infinity, and saturates in e2m1. A zero keeps its sign."""
    cast = np.dtype(FORMATS[element].dtype)
    largest, overflow = FORMATS[element].largest, "saturate" if element == "e2m1fn" else "nan"
    every = np.arange(2 ** (4 if element == "e2m1fn" else 8)).astype(np.uint8).view(cast).astype(F32)
    every = np.sort(every[np.isfinite(every)])
    middles, above = (every[1:] + every[:-1]) / 2, F32(largest) * F32([1, 1.03, 1.035714, 1.0357143, 1.04, 1.0714, 2])
    beside = [np.nextafter(middles, F32(end)) for end in (9, -9)]
    numbers = np.concatenate([every, middles, *beside, above, -above, F32([0.0, -0.0, -1e-30])])
    quantisation = FLASH.replace(element=element, qmax=largest, qmin=-largest, overflow=overflow)
    q, _ = rms_norm_quantised(np.ones_like(numbers), numbers, eps=0, static_scale=1, quantisation=quantisation)
    got, want = q.astype(F32), numbers.astype(cast).astype(F32)
    assert q.dtype == cast
    assert np.array_equal(got, want, equal_nan=True)
    assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0]))


WRONG = [
    ({"qmax": 447}, "qmax is 447, expected a number of e4m3fn above 0, at most 448; pass 448"),
    ({"block": 0}, "block is 0, expected 'static', 'row' or a number of elements; pass 16 or 32"),
    ({"block": 8, "scale_format": "e8m0fnu"}, "scale_round is 'half_even', expected floor or ceil or"),
    ({"overflow": "wrap"}, "overflow is 'wrap', expected saturate or nan for element 'e4m3fn'"),
    ({"quantisation": "vllm.dynamic"}, "did you mean 'vllm.dynamic_fp8'"),
    ({"static_scale": None}, "static_scale is None, expected a number for this quantisation; pass it"),
    ({"global_scale": 1.0}, "global_scale is 1.0, expected None for this quantisation; leave it out"),
    ({"x": np.ones(8)}, "x has dtype float64, expected float16, bfloat16 or float32; cast it first"),
    ({"quantisation": "te.mxfp8", "static_scale": None}, "8, expected a multiple of the 32"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_a_field_out_of_its_domain_and_a_wrong_call_are_refused(changes, message):
    call = {"x": np.ones(8, F32), "quantisation": "vllm.static", "static_scale": 1.0}
    is_call = {*changes} <= {*call, "global_scale"}  # a field has that name too, and never alone
    error = TypeError if "dtype" in message else ValueError
    with pytest.raises(error, match=f"^{'rms_norm_quantised' if is_call else 'Quantisation'}.*{message}"):
        rms_norm_quantised(**call | changes) if is_call else VLLM.replace(**changes)


def kernel(asked, error=0.0, **changes):
    """A function that returns what the preset does, by the golden with other fields and 1 / rho too small by error."""
    preset, p = Quantisation.get(asked), Quantisation.get(asked).replace(**changes)

    def norm(x, scale, *, eps, residual=None, static_scale=1.0, global_scale=1.0):
        known = {"static_scale": static_scale} if p.block == "static" else {}
        known |= {"global_scale": global_scale} if p.global_scale == "given" else {}
        eps = eps if eps == 0.25 else eps * (1 + 2 * error)  # where 1 / rho is exactly 1
        q, scales, *more = rms_norm_quantised(x, scale, residual=residual, eps=eps, quantisation=p, **known)
        g = [more[0] if p.global_scale == "amax" else np.float32(1)] * (preset.global_scale == "amax")
        return (q, *([scales] if preset.block != "static" else []), *g, *(more[-1:] if residual is not None else []))

    return norm


def judged(function, name, *, is_searched=False, dtypes="bfloat16", framework="numpy", **options):
    """Its report, without what it is instead unless that is asked for, which takes several times as long."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_searched:
            patch.setattr(quantised, "QUANTISATIONS", {})
            patch.setattr(quantised, "_neighbours", lambda preset: ())
        return check_quantised(function, name, framework=framework, dtypes=dtypes, **options)


@pytest.mark.parametrize(("place", "name"), [*enumerate(QUANTISATIONS)])
@pytest.mark.parametrize("error", [2.0**-22, -(2.0**-22)])
def test_a_kernel_passes_whose_inverse_rms_is_that_of_float32(place, name, error):
    report = judged(kernel(name, error), name, dtypes=("float32", "float16", "bfloat16")[place % 3])
    assert report.passed, report.text


FAULTS = {  # each choice once, in a preset without it
    "vllm.static": [
        {"element": "e5m2", "qmax": 57344.0, "qmin": -57344.0}, {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0},
        {"qmax": 240.0, "qmin": -240.0}, {"residual_rounding": "truncate"}, {"statistic_reads": "sum"},
        {"values_read": "sum"}, {"round_norm": False}, {"round_gain": False}, {"offset": "exact"}, {"apply": "y / s"},
        {"round_scaled": "bfloat16"}, {"rounding": "half_down"}, {"overflow": "nan"}, {"nan": "nan"}, {"nan": "zero"}],
    "vllm.dynamic_fp8": [
        {"block": 32}, {"amax_floor": 2.0**-8}, {"amax_nan": "keep"}, {"scale": "amax * (1 / qmax)"},
        {"scale_floor": 0.0}, {"scale_floor": 1e-10}, {"apply": "y * (1 / s)"}],
    "flashinfer.static": [{"statistic_reads": "stored"}, {"values_read": "stored"}, {"round_gain": True}],
    "flashinfer.fp4": [
        {"order": "norm_first"}, {"zero_scale": "infinity"}, {"zero_scale": "largest"},
        {"global_scale": "amax", "scale": "amax * (g * (1 / qmax))"}],
    "te.mxfp8": [{"order": "gain_first"}, {"round_norm": True}, {"scale_round": "floor"}, {"nan": "qmax"}],
    "te.nvfp4": [{"global_scale": "given"}, {"apply": "y * (g * (1 / s))"}, {"zero_scale": "zero"}],
    "torchao.mx": [
        {"block": 16}, {"amax_nan": "drop"}, {"quantise_with": "unrounded"}, {"scale_round": "rceil"},
        {"scale_round": "even"}, {"scale_round": "nearest"}],  # and ceil below
    "aiter.int8": [
        {"residual_rounding": "nearest"}, {"amax_floor": 0.0}, {"scale": "amax / qmax"}, {"error": 2.0**-17}],
    "llama.q8_0": [{"scale_format": "float32"}, {"quantise_with": "stored"}, {"rounding": "half_even"}],
    "onnx.qdq": [{"qmin": -127.0}, {"rounding": "half_away"}, {"rounding": "truncate"}, {"overflow": "wrap"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), [(name, changes) for name in FAULTS for changes in FAULTS[name]])
def test_one_wrong_choice_is_refused(name, changes):
    assert not judged(kernel(name, **changes), name, dtypes="float32" if name == "llama.q8_0" else "bfloat16").passed


@pytest.mark.parametrize(("asked", "computed", "changes", "message"), [
    ("flashinfer.static", "vllm.static", {}, "it is vllm.static"),
    ("torchao.mx", "torchao.mx", {"scale_round": "ceil"}, "it is torchao.mx with scale_round='ceil'"),
    ("vllm.static", "vllm.static", {"rounding": "truncate", "nan": "zero"}, "it is no preset, nor vllm.static but"),
])  # fmt: skip
def test_the_report_says_what_it_is_instead(asked, computed, changes, message):
    report = judged(kernel(computed, **changes), asked, is_searched=True)
    assert message in report.text.splitlines()[0]


def test_the_fixture(rmsnorm_parity):
    assert rmsnorm_parity(kernel("torchao.mx"), quantisation="torchao.mx", dtypes="bfloat16").label == "torchao.mx"
    with pytest.raises(pytest.fail.Exception, match=r"is not torchao\.mx"):
        rmsnorm_parity(lambda x, scale, *, eps: x, quantisation="torchao.mx", dtypes="bfloat16", framework="numpy")


def pairs(q):
    """Two codes of E2M1 in a byte, the first in its low half."""
    return q.view(np.uint8)[:, ::2] | (q.view(np.uint8)[:, 1::2] << 4)


# What a function returns of x and the right outputs of a preset; what the report says, empty where it passes.
LAYOUTS = [
    ("vllm.static", lambda x, q, *h: (q.view(np.uint8), *h), ""),
    ("vllm.static", lambda x, q, *h: (q, *(np.nextafter(a, a.dtype.type(9)) for a in h)), r"h: at \(0, 0\) it is"),
    ("vllm.static", lambda x, q, *h: (np.where(q == 0, abs(q), q), *h), "q: at .* it is 0.0, expected -0.0"),
    ("vllm.dynamic_fp8", lambda x, q, s, *h: (q, s[:, 0], *h), ""),
    ("vllm.dynamic_fp8", lambda x, q, s, *h: (q, np.nextafter(s, np.float32(9)), *h), "scales: at .* it is"),
    ("vllm.dynamic_fp8", lambda x, q, s, *h: (q, s.astype(float), *h), r"scales is f64\[2, 1\], expected f32"),
    ("flashinfer.fp4", lambda x, q, s, *h: (pairs(q), s.view(np.uint8), *h), ""),
    ("flashinfer.fp4", lambda x, q, s, *h: (pairs(q[:, ::-1])[:, ::-1], s, *h), "q: at"),
    ("torchao.mx", lambda x, q, s, *h: (q, s.T, *h), r"scales is .*\[32, 2\], expected .*, or its codes in uint8"),
    ("torchao.mx", lambda x, q, s, *h: q, "1 outputs, expected q, scales; write an adapter that returns these"),
    ("torchao.mx", lambda x, q, s, *h: (x.fill(0), q, s, *h)[1:], "inputs written to: x"),
    ("torchao.mx", lambda x, q, s, *h: 1 // 0, "ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "message"), LAYOUTS)
def test_what_a_function_may_return(name, layout, message):
    def norm(x, scale, *, eps, residual=None, static_scale=1.0, global_scale=1.0):
        options = {"eps": eps, "residual": residual, "static_scale": static_scale, "global_scale": global_scale}
        return layout(x, *kernel(name)(x, scale, **options))

    report = judged(norm, name)
    assert (report.passed, bool(re.search(message, report.details))) == (not message, True), report.details


def test_what_it_cannot_call_is_refused_and_what_it_does_not_compare_is_named():
    with pytest.raises(ValueError, match=r"^check_quantised: function is .*, expected a function f.x, scale, \*, eps"):
        check_quantised(lambda x, scale, *, static_scale: x, "vllm.static")
    with pytest.raises(ValueError, match=r"^check_quantised: .* takes no argument 'static_scale', expected some of x"):
        check_quantised(lambda x, scale, *, eps: x, "vllm.static")
    report = judged(lambda x, scale, *, eps, static_scale: kernel("onnx.qdq")(x, scale, eps=eps)[0], "onnx.qdq")
    assert "not compared: h: it takes no argument residual" in report.text


@pytest.mark.parametrize("slack", [0.0, 2.0**-21])
def test_tensors_of_torch_with_its_float8(slack):
    """No framework need be named. With ``slack`` an approximate reciprocal may have both codes of a tie."""
    torch = pytest.importorskip("torch")

    def in_torch(x, scale, *, eps, static_scale, residual=None):
        h = x if residual is None else x + residual
        wide = h.float()
        y = (wide * (1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps))).to(x.dtype) * scale
        v = y.float() * (1 / (torch.tensor(static_scale) * (1 + slack / 2)))
        q = torch.where(v.isnan(), 448.0, v).clamp(-448, 448).to(torch.float8_e4m3fn)
        return q if residual is None else (q, h)

    options = {"framework": None, "dtypes": "float16"}
    report = judged(in_torch, "vllm.static", reciprocal_slack=slack, **options)
    assert (report.passed, report.run.name, report.run.device) == (True, "torch", "cpu"), report.text
    assert report.text.splitlines()[0].startswith(f"{__name__}:test_tensors_of_torch_with_its_float8")
    assert slack == 0 or not judged(in_torch, "vllm.static", **options).passed
