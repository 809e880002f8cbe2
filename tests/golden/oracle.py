"""RMSNorm in 400-bit arithmetic, from the equations (q, k, rho, s, R): one row at a time, one rounding at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from mpmath import mp, mpf

from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.parity.judge import golden

BITS = 400
ROWS, COLUMNS = 3, 5  # how many of a case are computed: rows of y, dx and jvp, columns of dscale and dbias
# bits of the significand, smallest normal exponent, largest finite number
FORMATS = {
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, float.fromhex("0x1.fep127")),
    "float32": (24, -126, float.fromhex("0x1.fffffep127")),
    "float64": (53, -1022, float.fromhex("0x1.fffffffffffffp1023")),
}


def nearest(value: Any, dtype: str) -> float:
    """The number of a format nearest to an exact one, in integer arithmetic. Ties to even; infinity beyond range."""
    if value is None:
        return math.nan
    if mp.isinf(value):
        return float(value)
    sign, mantissa, exponent, bits = value._mpf_
    if not mantissa:
        return 0.0
    precision, least, largest = FORMATS[dtype]
    last = max(exponent + bits - 1, least) - precision + 1  # exponent of the last bit
    shift = last - exponent
    if shift <= 0:
        digits = int(mantissa) << -shift
    else:
        digits, cut, half = int(mantissa) >> shift, int(mantissa) & ((1 << shift) - 1), 1 << (shift - 1)
        digits += cut > half or (cut == half and digits & 1)
    if Fraction(digits) * Fraction(2) ** last > Fraction(largest):
        return -math.inf if sign else math.inf
    return math.ldexp(-digits if sign else digits, last)


def array(values: Sequence[float], dtype: str) -> Any:
    """An array of numbers that the format can represent."""
    return np.array(values, np.float64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def exact(value: Any) -> Any:
    """The exact number; None for NaN."""
    return None if math.isnan(float(value)) else mpf(float(value))


def promote(*names: str) -> str:
    if len(set(names)) == 1:
        return names[0]
    return "float64" if "float64" in names else "float32"


def roundings(variant: Any, t: str, g: str | None) -> tuple[str | None, str, str]:
    """The dtypes to which h / rho, the operations with the parameters, and y are rounded."""
    both = promote(t, g or t)
    before = variant.rounding == "before_scale"
    if variant.result_dtype == "half_scale" and g is not None:  # T5
        half = g in ("float16", "bfloat16")
        result = g if half else promote(both, "float32")
        return (g if half and before else None), result, result
    if variant.result_dtype == "promote_first":  # MLX: x / rho is cast to what the product with the gain is in
        return (both if before else None), both, both
    result = {"x": t, "promote": both, "scale": g or t, "half_scale": t}[variant.result_dtype]
    return (t if before else None), both, result


@dataclass
class Row:
    """The forward pass of a row and its Jacobian. ``h`` has None for NaN; derivatives are 0 outside of ``mask``."""

    variant: Any
    eps: float
    h: list[Any]
    mask: Sequence[bool]

    def __post_init__(self) -> None:
        rounded = {"ceil": math.ceil, "floor": math.floor}[self.variant.partial_rounding]
        first = max(1, rounded(Fraction(self.variant.partial or 1) * len(self.h)))
        self.counted = [bool(m) and i < first for i, m in enumerate(self.mask)]
        self.k = sum(self.counted)
        self.slope = [mpf(0)] * len(self.h)  # d rho / d h
        if not self.k:
            return
        c = [h if m else mpf(0) for h, m in zip(self.h, self.counted, strict=True)]
        eps, position = mpf(self.eps), self.variant.eps_position
        q = mp.fsum(v * v for v in c) / self.k
        root = mp.sqrt(q)
        floor = eps / mp.sqrt(self.k)
        self.rho = {"inside": mp.sqrt(q + eps), "outside": root + eps, "clamp": max(root, floor)}[position]
        s = self.rho if position == "inside" else root
        if s and not (position == "clamp" and root < floor * (1 - mpf(2) ** -48)):
            self.slope = [v / (self.k * s) for v in c]

    def normalised(self, masked: bool = False, indices: Sequence[int] | None = None) -> list[Any]:
        """h / rho, of the elements at ``indices`` or of all; with ``masked`` 0 outside of the mask, for derivatives."""
        indices = range(len(self.h)) if indices is None else indices
        if not self.k:
            return [mpf(0)] * len(indices)
        elements = [mpf(0) if masked and not self.mask[i] else self.h[i] for i in indices]
        return [None if h is None else h / self.rho for h in elements]

    def affine(self, g: list[Any], b: list[Any], offset: Any, formats: tuple[str | None, str, str]) -> list[Any]:
        """y before it is rounded, and before a gate after the norm."""
        norm, product, _ = formats
        y = self.normalised()
        gain = [mpf(1) if p is None else offset + p for p in g]
        if not self.k:
            return [mpf(0)] * len(y)
        if norm is None:
            return [None if v is None else v * o + (c or 0) for v, o, c in zip(y, gain, b, strict=True)]
        y = [exact(nearest(v, norm)) for v in y]
        if g[0] is not None:
            gain = [mpf(nearest(o, product)) for o in gain]
            y = [None if v is None else mpf(nearest(v * o, product)) for v, o in zip(y, gain, strict=True)]
        if b[0] is not None:
            y = [None if v is None else mpf(nearest(v + c, product)) for v, c in zip(y, b, strict=True)]
        return y

    def under_mask_zero(self, v: list[Any]) -> list[Any]:
        """Constants have no derivative: what is under the mask, and all of a row that counts nothing."""
        return [e if m and self.k else mpf(0) for e, m in zip(v, self.mask, strict=True)]

    def pull_back(self, u: list[Any]) -> list[Any]:
        """R^T u = u / rho - (d rho / d h) <u, h> / rho^2."""
        if not self.k:
            return u
        inner = mp.fsum(e * x for e, x in zip(u, self.normalised(masked=True), strict=True)) / self.rho
        terms = zip(u, self.slope, self.mask, strict=True)
        return [(e / self.rho - s * inner) if m else mpf(0) for e, s, m in terms]

    def push_forward(self, dh: list[Any]) -> list[Any]:
        """R dh = dh / rho - h <d rho / d h, dh> / rho^2."""
        if not self.k:
            return dh
        dh = self.under_mask_zero(dh)
        inner = mp.fsum(s * t for s, t in zip(self.slope, dh, strict=True)) / self.rho
        terms = zip(dh, self.normalised(masked=True), self.mask, strict=True)
        return [(t / self.rho - x * inner) if m else mpf(0) for t, x, m in terms]


def times(a: Any, b: Any) -> Any:
    return None if a is None or b is None else a * b


def gate(variant: Any, z: Any) -> tuple[Any, Any]:
    """f(z) and f'(z)."""
    if z is None:
        return None, None
    s, rest = 1 / (1 + mp.exp(-z)), 1 / (1 + mp.exp(z))
    return (z * s, s * (1 + z * rest)) if variant.gate_function == "silu" else (s, s * rest)


def compare(want: Sequence[float], got: Any, dtype: str, slack: Any = 0.0) -> int:
    """Compares bit for bit; in float64 within one ulp, as 106 bits may be on the other side of a rounding border."""
    want = array(want, dtype)
    assert got.dtype.name == dtype
    assert np.array_equal(np.isnan(want), np.isnan(got))
    different = ~((want == got) | np.isnan(want))
    one, other = (values[different].astype(np.float64) for values in (want, got))
    allowed = np.broadcast_to(slack, want.shape)[different]
    if dtype == "float64":
        allowed = allowed + np.spacing(np.abs(one))
    assert np.all(np.abs(one - other) <= allowed), (one, other)
    return len(one)


def check(data: Any, slack: float = 0.0) -> int:
    """Compares every quantity of a case. Returns how many numbers were not the nearest ones.

    ``slack`` is the allowed remainder of terms that cancel, in units of the terms.
    """
    variant, shape = data.variant, data.x.shape
    rank = len(shape)
    axes = sorted(int(axis) % rank for axis in np.atleast_1d(data.axis))
    named = axes if data.feature_axis is None else np.atleast_1d(data.feature_axis)
    features = [int(axis) % rank for axis in named]
    outer = [axis for axis in range(rank) if axis not in axes]
    n = math.prod(shape[axis] for axis in axes)
    rows = np.arange(data.x.size).reshape(shape).transpose([*outer, *axes]).reshape(-1, n)
    sizes = [shape[axis] if axis in features else 1 for axis in range(rank)]
    owner = np.broadcast_to(np.arange(math.prod(sizes)).reshape(sizes), shape).ravel()

    t = data.x.dtype.name
    is_cast = variant.scale_dtype == "x" and data.scale is not None and promote(t, data.scale.dtype.name) != t
    parameters = [p.dtype.name for p in (data.scale, data.bias) if p is not None]
    if is_cast:
        parameters[0] = t
    g_dtype = promote(*parameters) if parameters else None
    norm, product, result = roundings(variant, t, g_dtype)
    formats = norm, product, data.out_dtype or result
    arithmetic = "float64" if t == "float64" else "float32"
    eps = float(np.finfo(arithmetic).eps) if variant.eps is None else variant.eps

    def flat(values: Any, default: float = 0.0) -> list[Any]:
        return [exact(v) for v in np.broadcast_to(default if values is None else values, shape).ravel()]

    def parameter(values: Any, row: Any) -> list[Any]:
        return [None if values is None else exact(values.ravel()[owner[i]]) for i in row]

    h = list(map(exact, data.x.ravel()))
    if data.residual is not None:
        h = [None if x is None else x + r for x, r in zip(h, map(exact, data.residual.ravel()), strict=True)]
        if variant.residual_rounding == "before":
            h = [exact(nearest(total, t)) for total in h]
    one = [mpf(1)] * len(h)
    f, slope = one, one
    if data.gate is not None:
        f, slope = zip(*(gate(variant, z) for z in flat(data.gate)), strict=True)
    before, after = (f, one) if variant.gate_position == "before" else (one, f)
    mask = np.broadcast_to(True if data.mask is None else data.mask, shape).ravel()
    dy, dh, tangent = flat(data.dy), flat(data.dh), flat(data.tangents[0])
    results = {name: value.ravel() for name, value in golden(data).items()}
    units = dict.fromkeys(results, np.zeros(data.x.size))
    if slack:
        directions = {"dy": data.dy, "dh": data.dh, "tangents": data.tangents}
        sizes_of = term_sizes(data.x, data.scale, data.bias, **directions, **data.options, **data.arrays)
        units = {name: slack * unit.ravel() for name, unit in sizes_of.items()}
    count = 0
    chosen = {0, 2 % len(rows), len(rows) - 1} if len(rows) > ROWS else set(range(len(rows)))
    columns = np.linspace(0, max(owner), COLUMNS).astype(int) if parameters else []
    sums = {int(column): [mpf(0), mpf(0)] for column in columns}
    offset = mpf(variant.scale_offset)
    for number, indices in enumerate(rows):
        row = Row(variant, eps, [times(h[i], before[i]) for i in indices], mask[indices])
        v = row.under_mask_zero([times(dy[i], after[i]) for i in indices])
        summed = [j for j, i in enumerate(indices) if owner[i] in sums]
        for j, c in zip(summed, row.normalised(masked=True, indices=summed), strict=True):
            sums[owner[indices[j]]][0] += v[j] * c
            sums[owner[indices[j]]][1] += v[j]
        if number not in chosen:
            continue
        g, b = parameter(data.scale, indices), parameter(data.bias, indices)
        g = [exact(nearest(p, t)) for p in g] if is_cast else g
        gain = [mpf(1) if p is None else offset + p for p in g]
        ungated = row.affine(g, b, offset, formats)
        gated = [times(e, after[i]) if row.k else mpf(0) for e, i in zip(ungated, indices, strict=True)]
        y = [nearest(e, formats[2]) for e in gated]
        count += compare(y, results["y"][indices], formats[2], units["y"][indices])
        inverse_rms = nearest(1 / row.rho if row.k else mpf(0), arithmetic)
        count += compare([inverse_rms], results["inverse_rms"][number : number + 1], arithmetic)
        dx = row.pull_back([e * o for e, o in zip(v, gain, strict=True)])
        if data.gate is not None:
            dz = [times(e, h[i]) for e, i in zip(dx, indices, strict=True)]
            if variant.gate_position == "after":
                dz = [times(dy[i], e) for e, i in zip(ungated, indices, strict=True)]
            dz = row.under_mask_zero([times(e, slope[i]) for e, i in zip(dz, indices, strict=True)])
            want = [nearest(e, data.gate.dtype.name) for e in dz]
            count += compare(want, results["dgate"][indices], data.gate.dtype.name, units["dgate"][indices])
        dx = row.under_mask_zero([times(e, before[i]) for e, i in zip(dx, indices, strict=True)])
        dx = [e + dh[i] for e, i in zip(dx, indices, strict=True)]
        for name in ("dx", "dresidual") if data.residual is not None else ("dx",):
            count += compare([nearest(e, t) for e in dx], results[name][indices], t, units[name][indices])
        jvp = row.push_forward([times(tangent[i], before[i]) for i in indices])
        jvp = [times(e, o) for e, o in zip(jvp, gain, strict=True)]
        dg, db = (parameter(values, indices) for values in data.tangents[1:])
        terms = zip(jvp, row.normalised(masked=True), dg, db, row.mask, strict=True)
        jvp = [e + x * (p or 0) + (q or 0) if m and row.k else mpf(0) for e, x, p, q, m in terms]
        jvp = row.under_mask_zero([times(e, after[i]) for e, i in zip(jvp, indices, strict=True)])
        want = [nearest(e, formats[2]) for e in jvp]
        count += compare(want, results["jvp"][indices], formats[2], units["jvp"][indices])
    order = sorted(sums)
    for j, (name, p) in enumerate((("dscale", data.scale), ("dbias", data.bias))):
        if p is not None:
            want = [nearest(sums[column][j], p.dtype.name) for column in order]
            count += compare(want, results[name][order], p.dtype.name, units[name][order])
    return count
