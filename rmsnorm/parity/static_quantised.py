"""Static vectors of norms that quantise: the scales, the codes, and of every code the interval of y / s that has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import ml_dtypes
import numpy as np

from rmsnorm.numpy_impl import allowed, rms_norm_quantised
from rmsnorm.parity.cases import Array
from rmsnorm.parity.quantised import largest, scales_of
from rmsnorm.parity.quantised_cases import Case, kind_of, numbers_of, quotients
from rmsnorm.parity.static import Output, Test, array_of, document, hashed, hexadecimal, output_of
from rmsnorm.specification.dtypes import HALF
from rmsnorm.specification.quantisation import Quantisation, get_quantisation

PRESETS: Final = ("vllm.dynamic_fp8", "te.mxfp8", "torchao.mx", "flashinfer.fp4", "te.nvfp4")
_N: Final = 64  # two blocks of 32, four of 16
_GLOBAL: Final = 371.25  # g, where a call has one
_F32: Final = 2.0**-24  # unit roundoff
_UNIT: Final = (1.0, -1.0, 1.0, 0.0)  # mean(x^2) is 3/4: with an eps of 1/4 y is x times the gain
_NEAR: Final = "1/rho is 1, y / s is near halfway between two codes, and s no power of two"
TESTS: Final = (
    Test("rows of very different size", "Ordinary", (4, _N), (0, 3, -6, -1)),
    Test("1/rho is 1, and y / s is halfway between two codes, or next to that", "Tie", (2, _N), eps=0.25),
    Test(_NEAR, "Tie", (2, _N), eps=0.25),
    Test("gains of zero, a block of zeros, a row of zeros", "ZeroGain", (2, _N)),
    Test("1/rho is 1, blocks of tiny and of huge y", "LargeValues", (2, _N), eps=0.25),
    Test("1/rho is 1, one gain of infinity", "Saturates", (2, _N), eps=0.25),
    Test("a row with NaN, one with infinity, one without", "NonFinite", (3, _N)),
)


def _case(test: Test, seed: int, dtype: str, preset: Quantisation) -> Case:
    shape = test.shape
    exponents = np.broadcast_to(np.resize(test.exponents, (shape[0], 1)), shape).ravel()
    x = hashed(seed, shape[0] * _N, dtype, exponents).reshape(shape)
    gain = hashed(seed + 1, _N, dtype, 1)
    j = np.arange(_N)
    if test.eps is not None:
        x[:] = np.resize(_UNIT, shape)
        x[1] *= np.asarray(-1, dtype)
    if test.comment == _NEAR:
        gain = _near_borders(preset, x, gain.dtype)
    elif test.flag == "Tie":
        numbers = np.unique(np.abs(numbers_of(preset.element)))
        numbers = numbers[numbers <= preset.qmax]
        middles = (numbers[1:] + numbers[:-1]) / 2
        step = 2.0 ** (1 - ml_dtypes.finfo(dtype).nmant)
        near = np.concatenate([middles, middles * (1 - step), middles * (1 + step)])
        gain = near[j * 37 % near.size].astype(dtype)
        gain[::16] = preset.qmax  # the largest of each block, so that its scale is 1, or that of a power of two
    elif test.flag == "ZeroGain":
        gain[::3], gain[32:], x[1] = 0, 0, 0
    elif test.flag == "LargeValues":
        gain[32:] = (gain[32:].astype(np.float32) * 2.0 ** (15 if dtype == "float16" else 60)).astype(dtype)
        gain[:32] = (gain[:32].astype(np.float32) * 2.0 ** (-12 if dtype == "float16" else -60)).astype(dtype)
    elif test.flag == "Saturates":
        gain[5] = np.inf
    elif test.flag == "NonFinite":
        x[0, 3], x[1, 5] = np.nan, np.inf
    options = {"global_scale": 1.0 if test.eps else _GLOBAL} if preset.global_scale == "given" else {}
    slack = 0.0 if test.eps else ((_N + 3) / 2 + 8) * _F32  # as that of the random rows of quantised_cases
    return Case(test.comment, x, gain, None, test.eps or 1e-6, options, slack)


def _near_borders(preset: Quantisation, x: Array, dtype: Any) -> Array:
    """Gains beside a largest one of 3.0625, where kernels were reported to differ: those nearest to a border."""
    values = np.outer(2.0 ** -np.arange(5), 1 + np.arange(128) / 128).ravel()
    known: dict[str, Any] = {"global_scale": 1.0} if preset.global_scale == "given" else {}
    _, scales, *g = rms_norm_quantised(x, np.full(_N, 3.0625, dtype), eps=0.25, quantisation=preset, **known)
    quotient = values * (float(g[0]) if g else 1.0) / float(scales.astype(np.float64).ravel()[0])
    low, high = quotients(preset)
    borders = np.unique([*low[np.isfinite(low) & (low > 0)], *high[np.isfinite(high) & (high > 0)]])
    distance = np.abs(quotient[:, None] / borders - 1).min(1)
    gain = values[np.argsort(distance, kind="stable")[:_N]].astype(dtype)
    gain[::16] = 3.0625
    return gain


def _outputs(preset: Quantisation, case: Case) -> dict[str, Output] | None:
    """None where another order of a sum could move a scale, of which the codes depend."""
    known: dict[str, Any] = {"eps": case.eps, "quantisation": preset}
    q, scales, *rest = rms_norm_quantised(case.x, case.gain, **known | case.options)
    g = float(rest[0]) if rest else case.options.get("global_scale")
    for error in (-case.slack, case.slack) if case.slack else ():
        with np.errstate(all="ignore"):
            amax = largest(preset, case, case.x, error)
            own_g = [scales_of(preset, np.fmax.reduce(amax, None), None)[1]] if rest else []
            moved, *_ = scales_of(preset, amax, g)
        if own_g != rest or not np.array_equal(moved, scales.astype(np.float32), equal_nan=True):
            return None
    outputs = {"scales": Output(scales, scales, scales)} | ({"g": Output(*[rest[0].reshape(1)] * 3)} if rest else {})
    more: dict[str, Any] = {"global_scale": g} if preset.global_scale != "none" else {}
    # float32 rounds a product once where the quantisation rounds nothing, but for a scale that is a power of two.
    is_rounded = preset.round_scaled != "none" or preset.scale_format == "e8m0fnu"
    more["reciprocal_slack"] = 0.0 if is_rounded else _F32
    ends = allowed(case.x, case.gain, scales, slack=case.slack, **known, **more)
    low, high = (np.where(np.isnan(end), q.astype(np.float64), end).astype(q.dtype) for end in ends)
    return outputs | {"q": Output(q, low, high)}


def quantised_documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """A file of each preset and dtype of x."""
    for name in PRESETS:
        preset = get_quantisation("vectors", name)
        low, high = quotients(preset)
        codes = {kind_of(preset.element).name: {
            "numbers": hexadecimal(numbers_of(preset.element)), "lo": hexadecimal(low), "hi": hexadecimal(high),
        }}  # fmt: skip
        if preset.scale_format not in ("float32", preset.element):
            codes[kind_of(preset.scale_format).name] = {"numbers": hexadecimal(numbers_of(preset.scale_format))}
        fields = {field: value for field, value in asdict(preset).items() if field not in ("name", "source")}
        for dtype in HALF:
            tests = [_test(number, test, preset, dtype) for number, test in enumerate(TESTS, start=1)]
            more = {"schema": "../schema.json", "source": preset.source, "quantisation": fields, "codes": codes}
            yield f"quantised/{name}.{dtype}", document("RMSNorm, then quantisation", name, dtype, tests, **more)


def _test(number: int, test: Test, preset: Quantisation, dtype: str) -> dict[str, Any]:
    """Of the first seed with which no scale can move."""
    for seed in range(1000 * number, 1000 * number + 100, 2):
        case = _case(test, seed, dtype, preset)
        outputs = _outputs(preset, case)
        if outputs is not None:
            break
    else:
        raise AssertionError(f"a scale of {preset.name} moves with every seed: {test.comment}")
    arrays = {"x": case.x, "scale": case.gain}
    arrays |= {name: np.array([value], np.float32) for name, value in case.options.items()}
    return {
        "id": number, "comment": test.comment, "flags": [test.flag], "rows": test.shape[0], "n": _N,
        "eps": hexadecimal(np.array([case.eps])),
        "inputs": {name: array_of(array, bits=hexadecimal(array)) for name, array in arrays.items()},
        "outputs": {name: output_of(output) for name, output in outputs.items()},
    }  # fmt: skip
