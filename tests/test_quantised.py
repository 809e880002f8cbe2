"""RMSNorm followed by quantisation: the golden against mpmath, its ties and special values, and what is refused."""

from __future__ import annotations

import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from mpmath import mp, mpf
from quantisers import BF16, EPS, F32, REFERENCES, call_options, ones_times, preset, random_row, result, same

from rmsnorm.numpy_impl import allowed, rms_norm_quantised
from rmsnorm.specification.quantisation import QUANTISATIONS

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")
FLOOR_OF_AITER = float(F32(1e-10) * (F32(1) / F32(127)))
VLLM, MX8 = preset("vllm.static"), preset("torchao.mx", block=8)
FP4 = preset("onnx.qdq", element="e2m1fn", qmax=6.0, qmin=-6.0)
NV8 = preset("trtllm.add_nvfp4", block=8)
FNUZ = VLLM.replace(element="e4m3fnuz", qmax=240.0, qmin=-240.0)
INT8 = preset("onnx.qdq")
STATIC_1 = {"static_scale": 1.0}


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_the_outputs_are_those_of_mpmath_row_by_row(name):
    rows, gain = [random_row(name, seed)[:2] for seed in range(6)], random_row(name, 0)[2]
    for call in [[row] for row in rows] if name == "te.nvfp4" else [rows]:  # whose rows share a scale
        x, r = (None if a[0] is None else np.stack(a)[None] for a in zip(*call, strict=True))
        q, scales, *rest = result(name, x, gain, float(EPS), residual=r, **call_options(name))
        for i in np.ndindex(q.shape[:2]):
            terms = (x[i], np.zeros(64) if r is None else r[i], gain)
            with mp.workprec(400):
                want_q, want_s = REFERENCES[name](*([mpf(float(v)) for v in term] for term in terms))
            assert np.ravel(scales[i] if scales.ndim else scales).tolist() == [float(s) for s in want_s]
            assert q[i].tolist() == [float(v) for v in want_q]
        assert len(rest) == (r is not None) + (name == "te.nvfp4")
        if r is not None:
            total = x.astype(np.float64) + r.astype(np.float64)
            h = total.astype(BF16)
            if name == "aiter.int8":  # which truncates
                h = np.where(np.abs(h.astype(np.float64)) > np.abs(total), np.nextafter(h, BF16(0)), h)
            assert rest[-1].tolist() == h.astype(np.float64).tolist()


# What no preset has: the gain where x and rho are 1, one field, and an output and its element without and with it.
CHOICES = [
    (INT8, (127.6,), {"overflow": "wrap"}, (0, 0), 127, -128),
    (INT8, (-200.0,), {"qmin": -127.0}, (0, 0), -128, -127),
    (FNUZ, (300.0,), {"qmax": 224.0, "qmin": -224.0}, (0, 0), 240, 224),
    (MX8, (300.0,), {"quantise_with": "unrounded"}, (0, 0), 288, 448),
    (preset("vllm.dynamic_fp8"), (2.0**-10,) * 8, {"scale_floor": 0.0}, (0, 0), 224, 448),
    (preset("vllm.dynamic_fp8", scale_floor=0.0), (1e-5,) * 8, {"amax_floor": 1e-4}, (0, 0), 448, 44),
    (preset("vllm.dynamic_fp8"), (math.nan, 3.5), {"amax_nan": "keep"}, (1, 0), 2.0**-7, math.nan),
    (preset("flashinfer.static", round_scaled="float32"), (107.9,), {"round_scaled": "bfloat16"}, (0, 0), 104, 112),
    (preset("flashinfer.static"), (0.5,), {"offset": "exact"}, (0, 0), 0.5, 1.5),
    (preset("flashinfer.static", offset="exact"), (2.0**-4 + 2.0**-9,), {"offset": "rounded"}, (0, 0), 1.125, 1),
    (preset("flashinfer.fp4", block=8), (2.0**-12,) * 8, {"zero_scale": "largest"}, (0, 0), 0, 6),
    (NV8, (0.0,) * 8, {"zero_scale": "largest"}, (0, 0), 6, 0),
]


@pytest.mark.parametrize(("quantisation", "gain", "changes", "place", "want", "then"), CHOICES)
def test_a_field_decides_a_code(quantisation, gain, changes, place, want, then):
    output, index = place
    dtype = BF16 if np.array_equal(np.array(gain).astype(BF16).astype(float), gain) else F32
    for own, number in ((quantisation, want), (quantisation.replace(**changes), then)):
        outputs = result(own, *ones_times(*gain, dtype=dtype), **dict.fromkeys(call_options(own), 1.0))
        assert same(outputs[output].ravel()[index], number)


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


@pytest.mark.parametrize(
    ("element", "rounding"),
    [("e4m3fn", "half_even"), ("e4m3fn", "half_down"), ("int8", "half_away"), ("int8", "truncate")],
)
def test_what_is_next_to_a_tie_is_none(element, rounding):
    """Nor is what is next to a number that number, where it is truncated."""
    numbers = np.arange(120.0)
    if element == "e4m3fn":
        numbers = np.arange(8, 127).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    qmax = 448.0 if element == "e4m3fn" else 127.0
    quantisation = preset(
        "flashinfer.static", statistic_reads="stored", element=element, qmax=qmax, qmin=-qmax, rounding=rounding
    )
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


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_of_e2m1(sign):
    """All seven, to even, in a block whose largest is 6 s."""
    x, gain = ones_times(*(sign * v for v in (6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))
    q, scales = result(NV8, x, gain, global_scale=1.0)
    assert scales.tolist() == [1.0]
    assert (sign * q).tolist() == [6, 0, 1, 1, 2, 2, 4, 4]
    down = result(NV8.replace(rounding="half_down"), x, gain, global_scale=1.0)[0]
    assert (sign * down).tolist() == [6, 0, 0.5, 1, 1.5, 2, 3, 4]


EXPONENTS = {  # A: of floor, rceil, ceil, even and nearest in E4M3
    256.0: (0, 0, 0, 0, -1), 300.0: (0, 0, 1, 0, -1), 448.0: (0, 0, 1, 0, 0), 449.0: (0, 1, 1, 0, 0),
    511.0: (0, 1, 1, 1, 0), 512.0: (1, 1, 1, 1, 0), 600.0: (1, 1, 2, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("amax", EXPONENTS)
def test_the_modes_of_e8m0(amax):
    modes = [MX8.replace(scale_round=mode) for mode in ("floor", "rceil", "ceil", "even", "nearest")]
    for factor in (1, -(2.0**-30)):
        gain = F32([amax * factor] + [0] * 7)
        scales = [result(own, np.ones(8, np.float32), gain)[1][0] for own in modes]
        assert tuple(np.log2(scales) - np.log2(abs(factor))) == EXPONENTS[amax]


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
@pytest.mark.parametrize("size", [1e-40, 6e-38, 1e-35])
def test_tiny_rows_have_no_nan(name, size):
    """Not even where a scale is 0 or its reciprocal leaves the range."""
    q, scales, *_ = result(name, np.ones(32, F32), F32([size] + [0] * 31), **dict.fromkeys(call_options(name), 1.0))
    assert not np.isnan(q).any()
    assert not np.isnan(scales).any()
    zero = 6.0 if name == "trtllm.add_nvfp4" else 0.0  # where 0 / 0 is NaN, which is 6
    assert np.all(q[1:] == zero)


def test_only_a_scale_of_zero_has_the_reciprocal_zero():
    q, scales = result("flashinfer.fp4", *ones_times(*[1e-40] * 16, n=16), global_scale=3e38)
    assert (scales[0] > 0, set(q)) == (True, {6.0})


@pytest.mark.parametrize(
    ("name", "scale", "code"),
    [
        ("vllm.dynamic_fp8", float(np.float32(1 / (448 * 512))), 0), ("te.mxfp8", 2.0**-127, 0), ("te.nvfp4", 0.0, 0),
        ("torchao.mx", 2.0**-127, 0), ("flashinfer.fp4", 0.0, 0), ("trtllm.add_nvfp4", 0.0, 6), ("llama.q8_0", 0.0, 0),
        ("aiter.int8", FLOOR_OF_AITER, 0),
    ],
)  # fmt: skip
def test_zeros(name, scale, code):
    q, scales, *g = result(name, np.zeros(32, np.float32), None, 1e-6, **dict.fromkeys(call_options(name), 1.0))
    assert (set(scales.ravel()), set(q)) == ({scale}, {code})
    assert g == ([1.0] if name == "te.nvfp4" else [])


def test_a_zero_keeps_its_sign_but_in_fnuz_and_int8():
    x, gain = ones_times(-0.0, -1e-30)
    assert np.signbit(result(VLLM, x, gain, **STATIC_1)[0][:2]).all()
    assert not np.signbit(result(FNUZ, x, gain, **STATIC_1)[0][:2]).any()
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


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2", "e4m3fnuz", "e2m1fn"])
def test_codes_without_saturation_are_those_of_a_cast_from_float32(element):
    """ml_dtypes rounds float32 once; its overflow is NaN or infinity, and saturates in e2m1."""
    cast = getattr(ml_dtypes, ("float4_" if element == "e2m1fn" else "float8_") + element)
    largest = float(ml_dtypes.finfo(cast).max)
    every = np.arange(2 ** (4 if element == "e2m1fn" else 8)).astype(np.uint8).view(cast).astype(np.float32)
    every = np.sort(every[np.isfinite(every)])
    middles = (every[1:] + every[:-1]) / 2
    above = np.float32(largest) * np.float32([1, 1.03, 1.035714, 1.0357143, 1.04, 1.0714, 1.0715, 1.1, 2])
    beside = [np.nextafter(middles, np.float32(end)) for end in (9, -9)]
    numbers = np.concatenate([every, middles, *beside, above, -above]).astype(np.float32)
    quantisation = VLLM.replace(
        element=element, qmax=largest, qmin=-largest, round_norm=False, round_gain=False,
        overflow="saturate" if element == "e2m1fn" else "nan",
    )  # fmt: skip
    q, _ = rms_norm_quantised(np.ones_like(numbers), numbers, eps=0, static_scale=1, quantisation=quantisation)
    assert q.dtype == cast
    want = numbers.astype(cast)
    different = (q.view(np.uint8) != want.view(np.uint8)) & ~(np.isnan(q.astype(float)) & np.isnan(want.astype(float)))
    assert not different.any(), numbers[different]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"round_norm": 1}, TypeError, "round_norm is 1 .int., expected a bool; use True or False"),
        ({"qmax": 447}, ValueError, "qmax is 447, expected a number of e4m3fn above 0, at most 448; pass 448"),
        ({"qmin": -128}, ValueError, "qmin is -128, expected -448; change it together with qmax"),
        ({"block": 0}, ValueError, "block is 0, expected 'static', 'row' or a number of elements; pass 16 or 32"),
        ({"amax_floor": -1}, ValueError, "amax_floor is -1, expected a finite number >= 0; pass 0 for none"),
        ({"scale_format": "e8m0fnu"}, ValueError, "scale_round is 'half_even', expected floor or ceil or rceil"),
        ({"block": 16, "global_scale": "given"}, ValueError, "scale is .*, expected one with g, which .*; change"),
        ({"overflow": "wrap"}, ValueError, "overflow is 'wrap', expected saturate or nan for e4m3fn"),
        ({"colour": "red"}, ValueError, "field is 'colour', expected 'name', 'element'"),
        ({"quantisation": "vllm.dynamic"}, ValueError, "did you mean 'vllm.dynamic_fp8'"),
        ({"quantisation": None}, TypeError, "quantisation is None .NoneType., expected a name or a Quantisation"),
        ({"static_scale": None}, ValueError, "static_scale is None, expected a number for this quantisation; pass it"),
        ({"static_scale": [1.0, 2.0]}, ValueError, "static_scale is .1.0, 2.0., expected one number > 0"),
        ({"global_scale": 1.0}, ValueError, "global_scale is 1.0, expected None for this quantisation; leave it out"),
        ({"x": np.ones(8)}, TypeError, "x has dtype float64, expected float16, bfloat16 or float32; cast it first"),
        ({"quantisation": "te.mxfp8", "static_scale": None}, ValueError, "8, expected a multiple of the 32"),
    ],
)  # fmt: skip
def test_a_field_out_of_its_domain_and_a_wrong_call_are_refused(changes, error, message):
    call = {"x": np.ones(8, np.float32), "quantisation": "vllm.static", "static_scale": 1.0}
    is_call = {*changes} <= {*call, "global_scale"}  # a field has that name too, and never alone
    with pytest.raises(error, match=f"^{'rms_norm_quantised' if is_call else 'Quantisation'}.*{message}"):
        rms_norm_quantised(**call | changes) if is_call else VLLM.replace(**changes)


def test_allowed_refuses_scales_of_another_shape():
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"^allowed: scales has shape \(2,\), expected \(2, 1\) to match the blocks"):
        allowed(x, None, np.ones(2), slack=0.0, quantisation="te.mxfp8")
    with pytest.raises(ValueError, match=r"^allowed: slack is 1, expected a number in \[0, 1\)"):
        allowed(x, None, np.ones((2, 1)), slack=1, quantisation="te.mxfp8")


def test_empty_arrays():
    for shape in ((0, 32), (2, 0)):
        q, scales = rms_norm_quantised(np.zeros(shape, np.float32), quantisation="te.mxfp8")
        assert (q.shape, scales.shape) == (shape, (shape[0], shape[1] // 32))
