"""Static vectors of norms: what a program that has no other part of this package can be judged by.

docs/checking.md describes the files. Every input is made by a hash of integers, so that the bytes are the same on
every machine, and a reader in any language can make the inputs of a large test itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import operations_of
from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Array, Case, Data
from rmsnorm.parity.equations import Steps
from rmsnorm.parity.judge import expect
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

FORMAT: Final = 1
VARIANTS: Final = ("standard", "llama", "gemma", "torch", "apex", "onnx")  # docs/checking.md says for which others
TYPES: Final = ("float32", "bfloat16", "float16")
BLOCK: Final = 256  # elements of a sum, where a test has no single ones
_F32: Final = 2.0**-24  # unit roundoff
_QUANTITIES: Final = ("y", "dx", "dscale", "inverse_rms")
FLAGS: Final = {
    "Ordinary": "finite numbers of ordinary size; rows of very different size, where eps shows",
    "OddWidth": "a width that is no power of two, also 1",
    "OneSign": "no element of x or dy is negative, so that the terms of sums add up",
    "MixedTypes": "a gain in float32 beside x of 16 bits",
    "Residual": "h = x + residual is rounded to the dtype of x, normalised and returned; dh is its gradient",
    "WideRows": "rows of 4,096 elements, made by the hash, judged by sums",
    "ManyRows": "1,024 rows, made by the hash, judged by sums",
    "ZeroGain": "gains that are 0 together with the offset, and a row of zeros",
    "Cancels": "the two terms of dx cancel but for eps",
    "Tie": "1/rho is 1, and products lie halfway between two numbers of 16 bits",
    "LargeValues": "squares beyond the largest number of the dtype, in bfloat16 and float32 also of float32",
    "Subnormal": "x is subnormal in its dtype",
    "NonFinite": "NaN and infinity in x",
}


class Test(NamedTuple):
    """One call; ``exponents`` are those of the rows of x, repeated, and ``change`` makes other arrays of them."""

    comment: str
    flag: str
    shape: tuple[int, int]
    exponents: tuple[int, ...] = (0,)
    change: Callable[[dict[str, Array], float], None] | None = None
    parameters: str = ""
    eps: float | None = None
    residual: bool = False
    hashed: bool = False


def bits_of(seed: int, indices: Array) -> Array:
    """A hash of each index, 32 bits: the finaliser of MurmurHash3.

    >>> [hex(z) for z in bits_of(1, np.arange(2))]
    ['0x514e28b7', '0x96a0f96b']
    """
    z = (np.uint64(seed) + indices.astype(np.uint64) * np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        z = ((z ^ (z >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return np.asarray(z ^ (z >> np.uint64(16)))


def hashed(seed: int, size: int, dtype: str, exponent: Any = 0) -> Array:
    """Numbers in [-1, 1) 2^exponent, each exact in its dtype: the first p bits of the hash, less 2^(p-1)."""
    p = round(-math.log2(dtypes.unit_roundoff(dtype)))
    fraction = (bits_of(seed, np.arange(size)) >> np.uint64(32 - p)).astype(np.float64) - 2.0 ** (p - 1)
    return np.ldexp(fraction, exponent - p + 1).astype(dtype)


def _one_sign(arrays: dict[str, Array], offset: float) -> None:
    arrays |= {"x": np.abs(arrays["x"]), "dy": np.abs(arrays["dy"])}


def _outlier(arrays: dict[str, Array], offset: float) -> None:
    arrays["x"][0, 7] = 512


def _zero_gain(arrays: dict[str, Array], offset: float) -> None:
    arrays["scale"][::3] = -offset
    arrays["x"][1] = 0


def _cancels(arrays: dict[str, Array], offset: float) -> None:
    arrays["scale"][:] = 1 - offset
    arrays["dy"] = arrays["x"].copy()


def _tie(arrays: dict[str, Array], offset: float) -> None:
    arrays["x"][:] = np.array([1.5, 1.25, -1.25, -0.75, 0.25, 0, 0, 0])  # mean(x^2) is 3/4


def _subnormal(arrays: dict[str, Array], offset: float) -> None:
    dtype = arrays["x"].dtype.name
    least = round(math.log2(dtypes.smallest_subnormal(dtype) / dtypes.epsilon(dtype)))
    arrays["x"] = hashed(3, arrays["x"].size, dtype, least).reshape(arrays["x"].shape)
    arrays["scale"] = np.ldexp(arrays["scale"].astype(np.float32), -10).astype(dtype)


def _large(arrays: dict[str, Array], offset: float) -> None:
    dtype = arrays["x"].dtype.name
    arrays["x"] = hashed(3, arrays["x"].size, dtype, 15 if dtype == "float16" else 100).reshape(arrays["x"].shape)


def _non_finite(arrays: dict[str, Array], offset: float) -> None:
    arrays["x"][0, 3], arrays["x"][1, 5], arrays["x"][2, 1] = np.nan, np.inf, -np.inf


TESTS: Final = (
    Test("rows of very different size", "Ordinary", (6, 16), (0, 3, -5, -10, 1, -3)),
    Test("rows of 64, one with an outlier", "Ordinary", (2, 64), (0, -7), _outlier),
    Test("rows of 13", "OddWidth", (3, 13), (0, -9, 2)),
    Test("rows of 1", "OddWidth", (3, 1), (0, -10, 1)),
    Test("no element is negative", "OneSign", (8, 8), (0, -2), _one_sign),
    Test("a gain in float32", "MixedTypes", (4, 16), (0, -8, 2), parameters="float32"),
    Test("x + residual", "Residual", (3, 16), (0, -2), residual=True),
    Test("wide rows", "WideRows", (2, 4096), hashed=True),
    Test("many rows", "ManyRows", (1024, 8), (-4,), hashed=True),
    Test("gains of zero, a row of zeros", "ZeroGain", (2, 16), (0,), _zero_gain),
    Test("dy is x, and the gain 1", "Cancels", (3, 16), (0, -6, 2), _cancels),
    Test("1/rho is 1", "Tie", (2, 8), (0,), _tie, eps=0.25),
    Test("squares overflow", "LargeValues", (2, 16), (0,), _large),
    Test("x is subnormal", "Subnormal", (2, 16), (0,), _subnormal),
    Test("NaN, infinity, -infinity, and a row without", "NonFinite", (4, 8), (0,), _non_finite),
)


def data_of(test: Test, number: int, variant: Variant, dtype: str) -> Data:
    """The arrays of a test. Their seeds are 16 times its number, and one more for each array."""
    shape, chosen = test.shape, variant if test.eps is None else variant.replace(eps=test.eps)
    exponents = np.resize(test.exponents, (shape[0], 1))
    width = test.parameters or dtype
    types = {"x": dtype, "scale": width, "dy": dtype, "residual": dtype, "dh": dtype}
    spec = Spec(shape, dtype)
    residual = spec if test.residual else None
    call = resolve("vectors", spec, Spec(shape[1:], width), variant=chosen, residual=residual)
    arrays = {}
    for i, name in enumerate(types if test.residual else ("x", "scale", "dy")):
        kind = call.result_dtype if name == "dy" else types[name]
        own = np.broadcast_to(exponents, shape).ravel() if name in ("x", "residual") else 0
        sizes = shape[1:] if name == "scale" else shape
        arrays[name] = hashed(16 * number + i, math.prod(sizes), kind, own).reshape(sizes)
    if test.change is not None:
        test.change(arrays, chosen.scale_offset)
    case = Case(test.comment, shape, residual=test.residual)
    return Data(
        case=case, variant=chosen, call=call, x=arrays["x"], scale=arrays["scale"], bias=None, dy=arrays["dy"],
        dh=arrays.get("dh"), tangents=(arrays["x"], arrays["scale"], None), mask=None,
        residual=arrays.get("residual"), gate=None, axis=-1, feature_axis=None, out_dtype=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Output:
    """The right value of a quantity, and the least and the greatest that a kernel may return."""

    value: Array
    low: Array
    high: Array


def outputs_of(data: Data) -> dict[str, Output]:
    """What is right for a kernel whose statistic is in float32 or wider. ``accuracy/bounds.py`` derives it."""
    outputs = {}
    with np.errstate(all="ignore"):
        for name, want in expect(data, _QUANTITIES).items():
            dtype, error = want.value.dtype.name, operations_of(name, data.call, worst=True) * _F32
            if name in ("y", "inverse_rms"):
                ends = [_end(data, name, dtype, 1 + sign * error) for sign in (-1, 1)]
            else:
                real = getattr(Steps(data, {}), name)
                away = error * want.unit / dtypes.unit_roundoff(dtype)
                ends = [cast(real - away, dtype), cast(real + away, dtype)]
            # The golden is among them: in float64 a real number may lie on the other side of a tie.
            low, high = (np.where(np.isnan(want.value), want.value, f(*ends, want.value)) for f in (_least, _most))
            outputs[name] = Output(want.value, low.astype(dtype), high.astype(dtype))
    if data.residual is not None:
        h = add(data.x, data.residual, data.call.sum_dtype)
        outputs["h"] = Output(h, h, h)
    return outputs


def _end(data: Data, name: str, dtype: str, factor: float) -> Array:
    """A quantity with all its roundings, where 1/rho is so many times as large."""
    steps = Steps(data, {"inverse": lambda s, inverse: inverse * factor})
    return cast(steps.y if name == "y" else steps.inverse, dtype)


def _least(*arrays: Array) -> Array:
    """The least of numbers; of zeros -0, of which processors take one or the other."""
    wide = np.stack([array.astype(np.float64) for array in arrays])
    least = np.fmin.reduce(wide)
    return np.where((least == 0) & ((wide == 0) & np.signbit(wide)).any(0), -0.0, least)


def _most(*arrays: Array) -> Array:
    return -_least(*(-array for array in arrays))


def hexadecimal(array: Array) -> str:
    """The bits of each number, with a space between two.

    >>> hexadecimal(np.float32([1, -2]))
    '3f800000 c0000000'
    """
    array = np.where(np.isnan(array), np.abs(array), array).astype(array.dtype)
    bits = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").ravel()
    return " ".join(f"{number:0{2 * array.dtype.itemsize}x}" for number in bits.tolist())


def sums(low: Array, high: Array) -> list[Array]:
    """sum (j + 1) a_j over each block of the least and of the greatest: float64 in this order, outwards to float32."""
    ends = []
    for end, outwards in ((low, -np.inf), (high, np.inf)):
        terms = end.astype(np.float64).reshape(-1, BLOCK) * np.arange(1, BLOCK + 1)
        total = np.cumsum(terms, axis=1)[:, -1]
        narrow = total.astype(np.float32)
        is_inside = narrow.astype(np.float64) > total if outwards < 0 else narrow.astype(np.float64) < total
        ends.append(np.where(is_inside, np.nextafter(narrow, np.float32(outwards)), narrow))
    return ends


def array_of(array: Array, **fields: Any) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), **fields}


def output_of(output: Output, *, summed: bool = False) -> dict[str, Any]:
    if summed and output.value.size >= BLOCK:
        low, high = sums(output.low, output.high)
        return array_of(output.value, block=BLOCK, lo=hexadecimal(low), hi=hexadecimal(high))
    texts = {"bits": output.value, "lo": output.low, "hi": output.high}
    return array_of(output.value, block=1, **{name: hexadecimal(array) for name, array in texts.items()})


def document_of(variant: str, dtype: str) -> dict[str, Any]:
    preset = Variant.get(variant)
    tests: list[dict[str, Any]] = []
    for number, test in enumerate(TESTS, start=1):
        if test.parameters == dtype:  # the same as an ordinary gain
            continue
        data = data_of(test, number, preset, dtype)
        inputs = {}
        for i, name in enumerate(("x", "scale", "dy", "residual", "dh")):
            if (array := getattr(data, name)) is not None:
                seed = {"seed": 16 * number + i, "exponent": test.exponents[0] if name == "x" else 0}
                inputs[name] = array_of(array, **(seed if test.hashed else {"bits": hexadecimal(array)}))
        outputs = {name: output_of(output, summed=test.hashed) for name, output in outputs_of(data).items()}
        tests.append({
            "id": number, "comment": test.comment, "flags": [test.flag], "rows": test.shape[0], "n": test.shape[1],
            "eps": hexadecimal(np.array([data.call.eps])), "offset": int(preset.scale_offset),
            "norm": data.call.norm_dtype or "none", "inputs": inputs, "outputs": outputs,
        })  # fmt: skip
    own = {flag for test in tests for flag in test["flags"]}
    notes = {flag: text for flag, text in FLAGS.items() if flag in own}
    head = {"schema": "schema.json", "format": FORMAT, "algorithm": "RMSNorm", "variant": variant, "dtype": dtype}
    return {**head, "source": preset.source, "numberOfTests": len(tests), "notes": notes, "tests": tests}


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """A file of each variant and dtype, by its name without an ending."""
    for variant in VARIANTS:
        for dtype in TYPES:
            yield f"{variant}.{dtype}", document_of(variant, dtype)
