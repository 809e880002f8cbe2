"""RMSNorm in 400-bit arithmetic, one row at a time, and one rounding at the end: what the golden is held to.

Written from the equations (q, k, rho, s, R) and from nothing else of the package but the fields of a Variant.
"""

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
ROWS, COLUMNS = 3, 5  # of a case that are computed: rows of y, dx and jvp, columns of dscale and dbias
# bits of the significand, smallest normal exponent, largest finite number
FORMATS = {
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, float.fromhex("0x1.fep127")),
    "float32": (24, -126, float.fromhex("0x1.fffffep127")),
    "float64": (53, -1022, float.fromhex("0x1.fffffffffffffp1023")),
}


def nearest(value: Any, dtype: str) -> float:
    """The number of a format next to an exact one, ties to even, by integer arithmetic; infinity beyond the range."""
    if value is None:
        return math.nan
    if mp.isinf(value):
        return float(value)
    sign, mantissa, exponent, bits = value._mpf_
    if not mantissa:
        return 0.0
    precision, least, largest = FORMATS[dtype]
    last = max(exponent + bits - 1, least) - precision + 1  # exponent of the last bit that is kept
    shift = last - exponent
    if shift <= 0:
        kept = int(mantissa) << -shift
    else:
        kept, cut, half = int(mantissa) >> shift, int(mantissa) & ((1 << shift) - 1), 1 << (shift - 1)
        kept += cut > half or (cut == half and kept & 1)
    if Fraction(kept) * Fraction(2) ** last > Fraction(largest):
        return -math.inf if sign else math.inf
    return math.ldexp(-kept if sign else kept, last)


def array(values: Sequence[float], dtype: str) -> Any:
    """Of numbers that the format holds."""
    return np.array(values, np.float64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def exact(value: Any) -> Any:
    """None stands for NaN."""
    return None if math.isnan(float(value)) else mpf(float(value))


def promote(*names: str) -> str:
    if len(set(names)) == 1:
        return names[0]
    return "float64" if "float64" in names else "float32"


def roundings(variant: Any, t: str, g: str | None) -> tuple[str | None, str, str]:
    """Where a / rho is rounded, where the operations with the parameters are, and the dtype of y."""
    both = promote(t, g or t)
    before = variant.rounding == "before_scale"
    if variant.result_dtype == "half_scale" and g is not None:  # T5
        half = g in ("float16", "bfloat16")
        result = g if half else promote(both, "float32")
        return (g if half and before else None), result, result
    result = {"x": t, "promote": both, "scale": g or t, "half_scale": t}[variant.result_dtype]
    return (t if before else None), both, result


@dataclass
class Row:
    """The forward pass of a row and its Jacobian; ``a`` holds None for NaN, ``live`` says what derivatives see."""

    variant: Any
    eps: float
    a: list[Any]
    live: Sequence[bool]

    def __post_init__(self) -> None:
        first = len(self.a)
        if self.variant.partial is not None:
            exact_k = Fraction(self.variant.partial) * len(self.a)
            rounded = {"ceil": math.ceil, "floor": math.floor}[self.variant.partial_rounding]
            first = max(1, rounded(exact_k))
        self.counted = [bool(alive) and i < first for i, alive in enumerate(self.live)]
        self.k = sum(self.counted)
        self.slope = [mpf(0)] * len(self.a)  # d rho / d a
        if not self.k:
            return
        c = [a if m else mpf(0) for a, m in zip(self.a, self.counted, strict=True)]
        if self.variant.statistic == "variance":
            mean = mp.fsum(c) / self.k
            c = [a - mean if m else mpf(0) for a, m in zip(c, self.counted, strict=True)]
        eps, position = mpf(self.eps), self.variant.eps_position
        q = mp.fsum(v * v for v in c) / self.k
        root = mp.sqrt(q)
        floor = eps / mp.sqrt(self.k)
        self.rho = {"inside": mp.sqrt(q + eps), "outside": root + eps, "clamp": max(root, floor)}[position]
        s = self.rho if position == "inside" else root
        if s and not (position == "clamp" and root < floor):
            self.slope = [v / (self.k * s) for v in c]

    @property
    def inverse_rms(self) -> Any:
        return 1 / self.rho if self.k else mpf(0)

    def normalised(self, live: bool = False, at: Sequence[int] | None = None) -> list[Any]:
        """a / rho, of the elements ``at`` or of all; for derivatives only where they see it."""
        at = range(len(self.a)) if at is None else at
        if not self.k:
            return [mpf(0)] * len(at)
        seen = [mpf(0) if live and not self.live[i] else self.a[i] for i in at]
        return [None if a is None else a / self.rho for a in seen]

    def forward(self, g: list[Any], b: list[Any], offset: Any, where: tuple[str | None, str, str]) -> list[float]:
        norm, product, result = where
        y = self.normalised()
        gain = [mpf(1) if p is None else offset + p for p in g]
        if not self.k:
            return [0.0] * len(y)
        if norm is None:
            terms = zip(y, gain, b, strict=True)
            return [nearest(None if v is None else v * o + (c or 0), result) for v, o, c in terms]
        y = [exact(nearest(v, norm)) for v in y]
        if g[0] is not None:
            gain = [mpf(nearest(o, product)) for o in gain]
            y = [None if v is None else mpf(nearest(v * o, product)) for v, o in zip(y, gain, strict=True)]
        if b[0] is not None:
            y = [None if v is None else mpf(nearest(v + c, product)) for v, c in zip(y, b, strict=True)]
        return [nearest(v, result) for v in y]

    def upstream(self, v: list[Any]) -> list[Any]:
        return [e if alive and self.k else mpf(0) for e, alive in zip(v, self.live, strict=True)]

    def pull_back(self, u: list[Any]) -> list[Any]:
        """R^T u = u / rho - (d rho / d a) <u, a> / rho^2."""
        if not self.k:
            return u
        inner = mp.fsum(e * a for e, a in zip(u, self.normalised(live=True), strict=True)) / self.rho
        terms = zip(u, self.slope, self.live, strict=True)
        return [(e / self.rho - s * inner) if alive else mpf(0) for e, s, alive in terms]

    def push_forward(self, da: list[Any]) -> list[Any]:
        """R da = da / rho - a <d rho / d a, da> / rho^2."""
        if not self.k:
            return da
        da = self.upstream(da)
        inner = mp.fsum(s * t for s, t in zip(self.slope, da, strict=True)) / self.rho
        terms = zip(da, self.normalised(live=True), self.live, strict=True)
        return [(t / self.rho - a * inner) if alive else mpf(0) for t, a, alive in terms]


def compare(want: Sequence[float], got: Any, dtype: str, slack: Any = 0.0) -> int:
    """Bit for bit, in float64 within an ulp: 106 bits may fall on the other side of a border between two roundings."""
    want = array(want, dtype)
    assert got.dtype.name == dtype
    assert np.array_equal(np.isnan(want), np.isnan(got))
    different = ~((want == got) | np.isnan(want))
    one, other = (each[different].astype(np.float64) for each in (want, got))
    allowed = np.broadcast_to(slack, want.shape)[different]
    if dtype == "float64":
        allowed = allowed + np.spacing(np.abs(one))
    assert np.all(np.abs(one - other) <= allowed), (one, other)
    return len(one)


def check(data: Any, slack: float = 0.0) -> int:
    """Every quantity of a case; how many numbers were not the nearest ones.

    ``slack`` is what may be left of terms that cancel, in units of the terms.
    """
    variant, shape = data.variant, data.x.shape
    rank = len(shape)
    axes = data.axis if isinstance(data.axis, tuple) else (data.axis,)
    axes = tuple(sorted(axis % rank for axis in axes))
    features = axes
    if data.feature_axis is not None:
        features = (data.feature_axis % rank,)
    outer = [axis for axis in range(rank) if axis not in axes]
    n = math.prod(shape[axis] for axis in axes)
    places = np.arange(data.x.size).reshape(shape).transpose([*outer, *axes]).reshape(-1, n)
    sizes = [shape[axis] if axis in features else 1 for axis in range(rank)]
    owner = np.broadcast_to(np.arange(math.prod(sizes)).reshape(sizes), shape).ravel()

    t = data.x.dtype.name
    given = [p.dtype.name for p in (data.scale, data.bias) if p is not None]
    g_dtype = promote(*given) if given else None
    norm, product, result = roundings(variant, t, g_dtype)
    where = norm, product, data.out_dtype or result
    eps = variant.eps
    if eps is None:
        eps = 2.0**-52 if t == "float64" else 2.0**-23

    def flat(values: Any, default: float = 0.0) -> list[Any]:
        return [exact(v) for v in np.broadcast_to(default if values is None else values, shape).ravel()]

    def parameter(values: Any, at: Any) -> list[Any]:
        return [None if values is None else exact(values.ravel()[owner[place]]) for place in at]

    a = data.x.ravel()
    if data.residual is not None:
        pairs = zip(map(exact, a), map(exact, data.residual.ravel()), strict=True)
        total = [nearest(None if x is None else x + r, t) for x, r in pairs]
        a = array(total, t)
    live = np.broadcast_to(True if data.mask is None else data.mask, shape).ravel()
    dy, dh, da = flat(data.dy), flat(data.dh), flat(data.tangents[0])
    found = {name: value.ravel() for name, value in golden(data).items()}
    units = dict.fromkeys(found, np.zeros(data.x.size))
    if slack:
        along = {"dy": data.dy, "dh": data.dh, "tangents": data.tangents}
        units = term_sizes(data.x, data.scale, data.bias, **along, **data.options, **data.arrays)
        units = {name: slack * unit.ravel() for name, unit in units.items()}
    count, worst = 0, len(places)
    chosen = {0, 2 % worst, worst - 1} if worst > ROWS else set(range(worst))
    columns = np.linspace(0, max(owner), COLUMNS).astype(int) if given else []
    sums = {int(column): [mpf(0), mpf(0)] for column in columns}
    offset = mpf(variant.scale_offset)
    for i, at in enumerate(places):
        row = Row(variant, eps, [exact(a[place]) for place in at], live[at])
        v = row.upstream([dy[place] for place in at])
        summed = [j for j, place in enumerate(at) if owner[place] in sums]
        for j, c in zip(summed, row.normalised(live=True, at=summed), strict=True):
            sums[owner[at[j]]][0] += v[j] * c
            sums[owner[at[j]]][1] += v[j]
        if i not in chosen:
            continue
        g, b = parameter(data.scale, at), parameter(data.bias, at)
        gain = [mpf(1) if p is None else offset + p for p in g]
        count += compare(row.forward(g, b, offset, where), found["y"][at], where[2], units["y"][at])
        arithmetic = "float64" if t == "float64" else "float32"
        count += compare([nearest(row.inverse_rms, arithmetic)], found["inverse_rms"][i : i + 1], arithmetic)
        dx = row.pull_back([e * o for e, o in zip(v, gain, strict=True)])
        dx = [e + dh[place] for e, place in zip(dx, at, strict=True)]
        for name in ("dx", "dresidual") if data.residual is not None else ("dx",):
            count += compare([nearest(e, t) for e in dx], found[name][at], t, units[name][at])
        along = row.push_forward([da[place] for place in at])
        along = [e * o for e, o in zip(along, gain, strict=True)]
        dg, db = (parameter(tangent, at) for tangent in data.tangents[1:])
        zero = mpf(0)
        terms = zip(along, row.normalised(live=True), dg, db, row.live, strict=True)
        along = [e + x * (p or zero) + (q or zero) if m and row.k else zero for e, x, p, q, m in terms]
        count += compare([nearest(e, where[2]) for e in along], found["jvp"][at], where[2], units["jvp"][at])
    order = sorted(sums)
    for j, (name, p) in enumerate((("dscale", data.scale), ("dbias", data.bias))):
        if p is not None:
            want = [nearest(sums[column][j], p.dtype.name) for column in order]
            count += compare(want, found[name][order], p.dtype.name, units[name][order])
    return count
