"""RMSNorm on rows in memory, forward and backward, compiled: float64 inside, one rounding where the variant has one.

    y = a / rho * (o + g) + b        dx = (u - a / s <u, a / rho> / k) / rho,    u = (o + g) dy

with s = k d rho / d a. Addresses are integers, 0 for what is not there; the rows of y, h, dy, da and dx follow each
other without a gap. ``reassoc`` lets a sum be vectorised, and is given to nothing but sums.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import binding
from numba import njit

from rmsnorm.cpu.bfloat16 import backward_row, forward_row, forward_row_before
from rmsnorm.cpu.formats import BF16, F16, F32, F64, at, fma, grid, load, rounded, store

INSIDE, OUTSIDE, CLAMP = range(3)
_FMA: Final = binding.get_host_cpu_features().get("fma", True)  # x86 says so
SETTINGS: Final = np.dtype(
    [
        ("n", np.int64),
        ("k", np.int64),
        ("position", np.int64),
        ("eps", np.float64),
        ("offset", np.float64),
        ("variance", np.bool_),
        ("before_scale", np.bool_),
        ("norm", np.int64),
        ("product", np.int64),
        ("scale", np.int64),
        ("bias", np.int64),
        ("x_bytes", np.int64),
        ("y_bytes", np.int64),
        ("lead", np.int64),  # 1: the statistic is that of the next row, and the root of this one there already
        ("single", np.bool_),  # float32 arithmetic may do, see bfloat16.py
    ],
    align=True,
)


def kernel(function: Any) -> Any:
    """Compiled when it is first called, and kept on disk where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither this folder nor the user's cache can be written to
        return njit(**options)(function)


@kernel
def forward(
    settings: Any, formats: Any, start: int, stop: int, ready: int,
    x: int, x_step: int, residual: int, scale: int, bias: int, mask: int, mask_step: int, mask_stride: int,
    y: int, h: int, inverse_rms: int,
) -> None:  # fmt: skip
    """Rows from start to stop of y, h = x + residual and 1 / rho; ``ready`` are the gains, if they are.

    The formats are a number of x and one of y, of which the types alone are read.
    """
    s, (like_x, like_y) = settings[0], formats
    n = s.n
    gain = at(ready, n, 0.0) if ready else gains(s, scale)
    b = parameter(bias, s.bias, n)
    norm, product = grid(s.norm), grid(s.product)
    single = s.single and y != 0 and _is_moderate(gain)
    gain32, doubt = gain[: n * single].astype(np.float32), np.zeros((n + 7) // 8 * 8 * single, np.uint8)
    eights = doubt.view(np.uint64)
    counts, rhos = np.zeros(2, np.int64), np.zeros(2)
    for i in range(start - s.lead, stop):
        ahead = i + s.lead
        if ahead < stop:
            a = at(x + ahead * x_step, n, like_x)
            if residual:
                branch = at(residual + ahead * n * s.x_bytes, n, like_x)
                a = _added(branch, a, at(h + ahead * n * s.x_bytes, n, like_x))
            counts[ahead & 1], rhos[ahead & 1] = _statistic(s, a, mask + ahead * mask_step, mask_stride if mask else -1)
            if inverse_rms:
                at(inverse_rms, stop, 0.0)[ahead] = 1 / rhos[ahead & 1] if counts[ahead & 1] else 0.0
        if i < start or not y:
            continue
        a = at(h + i * n * s.x_bytes if residual else x + i * x_step, n, like_x)
        out = at(y + i * n * s.y_bytes, n, like_y)
        k, rho = counts[i & 1], rhos[i & 1]
        reciprocal = 1 / rho if _FMA and s.scale != F64 and 1e-150 < rho < 1e150 else 0.0
        sure = single and 2.0**-20 < rho < 2.0**20
        if k == 0:
            for j in range(n):
                store(out, j, 0.0)
        elif sure and s.before_scale:
            forward_row_before(a, gain32, np.float32(1 / rho), out, doubt)
            for i8 in range(eights.size if _any(eights) else 0):
                if eights[i8]:
                    _before_scale(a, gain, rho, reciprocal, norm, product, out, 8 * i8, min(8 * i8 + 8, n))
        elif sure:
            forward_row(a, gain32, np.float32(1 / rho), out, doubt)
            for i8 in range(eights.size if _any(eights) else 0):
                if eights[i8]:
                    _after_scale(a, gain, rho, reciprocal, out, 8 * i8, min(8 * i8 + 8, n))
        elif s.before_scale and bias:
            for j in range(n):
                scaled = rounded(rounded(quotient(load(a[j]), rho, reciprocal), norm) * gain[j], product)
                store(out, j, rounded(scaled + b[j], product))
        elif s.before_scale and s.norm == F32 and s.product == F32:
            for j in range(n):
                normalised = np.float32(quotient(load(a[j]), rho, reciprocal))
                store(out, j, np.float64(normalised * np.float32(gain[j])))
        elif s.before_scale:
            _before_scale(a, gain, rho, reciprocal, norm, product, out, 0, n)
        elif bias:
            for j in range(n):
                store(out, j, quotient(load(a[j]) * gain[j], rho, reciprocal) + b[j])
        else:
            _after_scale(a, gain, rho, reciprocal, out, 0, n)


@njit
def _after_scale(a: Any, gain: Any, rho: float, reciprocal: float, out: Any, start: int, stop: int) -> None:
    """The product first, which is exact up to 32 bits."""
    if reciprocal == 0:
        for j in range(start, stop):
            store(out, j, load(a[j]) * gain[j] / rho)
    else:
        for j in range(start, stop):
            store(out, j, _by_reciprocal(load(a[j]) * gain[j], rho, reciprocal))


@njit
def _before_scale(
    a: Any, gain: Any, rho: float, reciprocal: float, norm: Any, product: Any, out: Any, start: int, stop: int
) -> None:
    for j in range(start, stop):
        store(out, j, rounded(rounded(quotient(load(a[j]), rho, reciprocal), norm) * gain[j], product))


@kernel
def backward(
    settings: Any, formats: Any, start: int, stop: int, ready: int, part: int, x: int, x_step: int, scale: int,
    mask: int, mask_step: int, mask_stride: int, inverse_rms: int, dy: int, da: int, dx: int, dscale: int, dbias: int,
) -> None:  # fmt: skip
    """Rows from start to stop of dx; of dscale and dbias their part in float64, or if it has no place the whole.

    Without inverse_rms it is computed again, which is for rows of at most 32 bits.
    """
    s, (like_x, like_y) = settings[0], formats
    n, k = s.n, s.k
    gain = at(ready, n, 0.0) if ready else gains(s, scale)
    sums = np.empty((2 if dbias else 1, n)) if part == 0 else at(part, 2 * n, 0.0).reshape((2, n))
    sums[:] = 0.0
    single = s.single and _is_moderate(gain)
    gain32, doubt = gain[: n * single].astype(np.float32), np.zeros((n + 7) // 8 * 8 * single, np.uint8)
    eights = doubt.view(np.uint64)
    along_scale, along_bias = sums[0], sums[-1, : n if dbias else 0]
    c = np.empty(n if mask or s.variance else 0)
    for i in range(start, stop):
        a, v = at(x + i * x_step, n, like_x), at(dy + i * n * s.y_bytes, n, like_y)
        out = at(dx + i * n * s.x_bytes, n, like_x)
        branch = at(da + i * n * s.x_bytes, n, like_x)
        if inverse_rms:
            inverse = at(inverse_rms, stop, 0.0)[i]
        else:
            k, rho = _statistic(s, a, mask + i * mask_step, mask_stride if mask else -1)
            inverse = 1 / rho if k else 0.0
        if mask or s.variance:
            live = at(mask + i * mask_step, n, np.uint8(0))
            stride = mask_stride if mask else -1
            k = _centred(a, live, stride, s.k, inverse, s.variance, c)
            inner = _inner_live(a, v, gain, live, stride, k, inverse, along_scale, along_bias)
            share = _slope(s, k, inverse, _squares(c, n)) * inner / max(k, 1)
            if dx:
                for j in range(n):
                    counts = k and _is_counted(live, stride, j)
                    found = inverse * (load(v[j]) * gain[j] - c[j] * share) if counts else 0.0
                    store(out, j, found + load(branch[j]) if da else found)
            continue
        inner = _inner(a, v, gain, inverse, along_scale)
        for j in range(along_bias.size):
            along_bias[j] += load(v[j])
        length = _scaled_squares(a, k, inverse) if s.position == OUTSIDE else 0.0
        share = _slope(s, k, inverse, length) * inner / k
        if not dx:
            continue
        if da:
            for j in range(k):
                found = inverse * (load(v[j]) * gain[j] - load(a[j]) * inverse * share)
                store(out, j, found + load(branch[j]))
            for j in range(k, n):
                store(out, j, inverse * (load(v[j]) * gain[j]) + load(branch[j]))
        elif single and s.y_bytes == 2 and k == n and 2.0**-20 < inverse < 2.0**20 and abs(share) < 2.0**20:
            backward_row(a, v, gain32, np.float32(inverse), np.float32(share), out, doubt)
            for i8 in range(eights.size if _any(eights) else 0):
                if eights[i8]:
                    _pulled_back(a, v, gain, inverse, share, out, 8 * i8, min(8 * i8 + 8, n))
        else:
            _pulled_back(a, v, gain, inverse, share, out, 0, k)
            for j in range(k, n):
                store(out, j, inverse * (load(v[j]) * gain[j]))
    if part == 0:
        write(along_scale, s.scale, dscale)
        write(along_bias, s.bias, dbias)


@kernel
def backward_in_order(settings: Any, formats: Any, rows: int, chunk: int, places: Any) -> None:
    """All rows by one thread, with the sums that many threads would give."""
    s = settings[0]
    gain, part, total = gains(s, places[2]), np.empty((2, s.n)), np.zeros((2, s.n))
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        backward(settings, formats, start, stop, gain.ctypes.data, part.ctypes.data, *places)
        total += part
    write(total[0], s.scale, places[-2])
    write(total[1], s.bias, places[-1])


@njit
def _pulled_back(a: Any, v: Any, gain: Any, inverse: float, share: float, out: Any, start: int, stop: int) -> None:
    for j in range(start, stop):
        store(out, j, inverse * (load(v[j]) * gain[j] - load(a[j]) * inverse * share))


@kernel
def prepare(settings: Any, scale: int, ready: int) -> None:
    """The gains, for many calls on parts of the rows."""
    at(ready, settings[0].n, 0.0)[:] = gains(settings[0], scale)


@kernel
def combine(settings: Any, parts: int, count: int, dscale: int, dbias: int) -> None:
    """dscale and dbias from their parts, added from the first to the last."""
    s = settings[0]
    total = np.zeros((2, s.n))
    for i in range(count):
        total += at(parts + i * s.n * 16, 2 * s.n, 0.0).reshape((2, s.n))
    write(total[0], s.scale, dscale)
    write(total[1], s.bias, dbias)


@njit
def write(values: Any, code: int, out: int) -> None:
    n = values.size
    if out == 0:
        return
    if code == F16:
        _write(values, at(out, n, np.int16(0)))
    elif code == BF16:
        _write(values, at(out, n, np.uint16(0)))
    elif code == F32:
        _write(values, at(out, n, np.float32(0)))
    else:
        _write(values, at(out, n, 0.0))


@njit
def parameter(address: int, code: int, n: int) -> Any:
    values = np.empty(n if address else 0)
    if address == 0:
        return values
    if code == F16:
        _read(at(address, n, np.int16(0)), values)
    elif code == BF16:
        _read(at(address, n, np.uint16(0)), values)
    elif code == F32:
        _read(at(address, n, np.float32(0)), values)
    else:
        _read(at(address, n, 0.0), values)
    return values


@njit
def gains(s: Any, scale: int) -> Any:
    """o + g, rounded where the variant rounds each operation, and 1 without g."""
    if scale == 0:
        return np.ones(s.n)
    gain = parameter(scale, s.scale, s.n)
    product = grid(s.product)
    for j in range(s.n if s.offset != 0 else 0):
        gain[j] = rounded(s.offset + gain[j], product) if s.before_scale else s.offset + gain[j]
    return gain


@njit
def quotient(a: float, rho: float, reciprocal: float) -> Any:
    """a / rho, from the reciprocal where it is given."""
    return a / rho if reciprocal == 0 else _by_reciprocal(a, rho, reciprocal)


@njit
def _by_reciprocal(a: float, rho: float, reciprocal: float) -> Any:
    """a / rho with the remainder, as exact as a division and vectorised better, where nothing finite overflows."""
    found = a * reciprocal
    remainder = fma(-found, rho, a)  # NaN for an infinite a, where any number will do
    return fma(remainder if remainder < 1e100 else 1e100, reciprocal, found)


@njit
def _is_moderate(gain: Any) -> Any:
    """Whether no product with a gain underflows unless the result is next to nothing, too."""
    moderate = True
    for j in range(gain.size):  # by index, which is vectorised
        size = abs(gain[j])
        moderate &= (size == 0) | ((size > 2.0**-40) & (size < 2.0**16))
    return moderate


@njit
def _any(marks: Any) -> Any:
    found = np.uint64(0)
    for j in range(marks.size):
        found |= marks[j]
    return found != 0


@njit
def _read(source: Any, target: Any) -> None:
    for j in range(target.size):
        target[j] = load(source[j])


@njit
def _write(source: Any, target: Any) -> None:
    for j in range(target.size):
        store(target, j, source[j])


@njit
def _added(residual: Any, x: Any, h: Any) -> Any:
    for j in range(h.size):
        store(h, j, load(x[j]) + load(residual[j]))
    return h


@njit
def _is_counted(mask: Any, stride: int, j: int) -> Any:
    return stride < 0 or mask[j * stride] != 0


@njit(fastmath={"reassoc"})
def _squares(a: Any, k: int) -> Any:
    total = 0.0
    for j in range(k):
        total += load(a[j]) * load(a[j])
    return total


@njit(fastmath={"reassoc"})
def _scaled_squares(a: Any, k: int, factor: float) -> Any:
    total = 0.0
    for j in range(k):
        total += (load(a[j]) * factor) * (load(a[j]) * factor)
    return total


@njit
def _moment(a: Any, mask: Any, stride: int, first: int, variance: bool) -> Any:
    """How many of the first elements count, and their mean square, about their mean or about 0."""
    k, total = 0, 0.0
    for j in range(first):
        if _is_counted(mask, stride, j):
            k += 1
            total += load(a[j])
    mean = total / max(k, 1) if variance else 0.0
    total = 0.0
    for j in range(first):
        if _is_counted(mask, stride, j):
            total += (load(a[j]) - mean) * (load(a[j]) - mean)
    return k, total / max(k, 1)


@njit
def _statistic(s: Any, a: Any, mask: int, stride: int) -> Any:
    """How many elements of a row count, and rho."""
    if stride < 0 and not s.variance:
        return s.k, _rho(s, _squares(a, s.k) / s.k, s.k)
    k, q = _moment(a, at(mask, s.n, np.uint8(0)), stride, s.k, s.variance)
    return k, _rho(s, q, k)


@njit
def _rho(s: Any, q: float, k: int) -> Any:
    if s.position == INSIDE:
        return np.sqrt(q + s.eps)
    if s.position == OUTSIDE:
        return np.sqrt(q) + s.eps
    floor = s.eps / np.sqrt(max(k, 1))
    return floor if np.sqrt(q) < floor else np.sqrt(q)


@njit
def _slope(s: Any, k: int, inverse: float, length: float) -> Any:
    """rho / s: 1 for eps inside, 1 or 0 for a clamp; else from the squared length of a / rho."""
    if s.position == INSIDE:
        return 1.0
    if s.position == OUTSIDE:
        return 1 / np.sqrt(length / max(k, 1)) if length > 0 else 0.0
    return 1.0 if inverse * s.eps / np.sqrt(max(k, 1)) < 1 - 2.0**-50 else 0.0  # up to the rounding of 1 / rho


@njit(fastmath={"reassoc"})
def _inner(a: Any, v: Any, gain: Any, inverse: float, along_scale: Any) -> Any:
    """<u, a / rho>; adds dy a / rho to dscale."""
    total = 0.0
    for j in range(gain.size):
        term = load(v[j]) * (load(a[j]) * inverse)
        along_scale[j] += term
        total += term * gain[j]
    return total


@njit
def _inner_live(
    a: Any, v: Any, gain: Any, mask: Any, stride: int, k: int, inverse: float, along_scale: Any, along_bias: Any
) -> Any:
    total = 0.0
    for j in range(gain.size if k else 0):
        if _is_counted(mask, stride, j):
            term = load(v[j]) * (load(a[j]) * inverse)
            along_scale[j] += term
            total += term * gain[j]
            if along_bias.size:
                along_bias[j] += load(v[j])
    return total


@njit
def _centred(a: Any, mask: Any, stride: int, first: int, inverse: float, variance: bool, c: Any) -> Any:
    """How many elements count; into c what the statistic squares of a / rho, 0 where not counted."""
    k, total = 0, 0.0
    for j in range(c.size):
        counts = j < first and _is_counted(mask, stride, j)
        c[j] = load(a[j]) * inverse if counts else 0.0
        total += c[j]
        k += counts
    if variance and k:
        for j in range(first):
            if _is_counted(mask, stride, j):
                c[j] -= total / k
    return k
