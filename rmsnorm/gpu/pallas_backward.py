"""The backward pass in Pallas, for JAX.

    dx = (u - h / s <u, h / rho> / k) / rho + dh,    u = (o + scale) dy

with drho / dh = h / (k s). The inner products, and the sums for the gain and the bias, are float64; all else is pairs
of float32, rounded once. A tile with a number out of their range, or with a difference that cancels too much, is
computed in pairs of float64 instead, in steps, as cpu/cancelled.py does. Arrays are as in pallas_forward.py.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from functools import partial as bind
from math import prod
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from rmsnorm.call import Call
from rmsnorm.gpu.pallas_forward import (
    any_of,
    gains,
    indices,
    load,
    parts_of,
    start,
    store,
    sum_of_chunks,
    total,
    wide_gains,
    width_in_float64,
)
from rmsnorm.gpu.pallas_pairs import (
    LEAST,
    LEAST_RHO,
    MOST,
    MOST_RHO,
    Machine,
    floor_of,
    is_between,
    pair_sum,
    pair_total,
    two_sum,
)
from rmsnorm.gpu.plan import Tiles, tiles

_CANCELS: Final = {"float32": 2.0**-20}  # of the terms of a difference: what 48 bits leave for float32
_CANCELS_16: Final = 2.0**-30
_ROWS_TO_ADD: Final = 16  # at once, of the sums of each program
_ZERO: Final = 2.0**-95  # of the terms of a difference of pairs of float64


def backward(
    call: Call, wanted: tuple[str | None, ...], dy: jax.Array, h: jax.Array, inverse_rms: jax.Array,
    scale: Any, dh: Any, *, is_interpreted: bool,
) -> list[jax.Array]:  # fmt: skip
    """Those of dx + dh, dscale and dbias that are ``wanted``, in these dtypes, from 1 / rho in float64."""
    rows, n = prod(call.shape) // call.n, call.n
    tile = tiles("backward", rows, n)
    dy, h, scale, dh = (None if array is None else array.reshape(-1, n) for array in (dy, h, scale, dh))
    parts = None
    if tile.chunks > 1:
        every = tile._replace(programs=rows)
        kernel = bind(_sum_parts, call, every)
        parts = start(every, is_interpreted, kernel, [parts_of(rows, tile)], dy, h, scale)[0]
    height = -(-tile.programs // _ROWS_TO_ADD) * _ROWS_TO_ADD
    sums = [None if name is None else ((height, n), "float64") for name in wanted[1:]]
    kernel = bind(_backward, call, tile, rows)
    operands = dy, h, dh, scale, parts, inverse_rms.reshape(rows, 1)
    dx = wanted[0] and ((rows, n), wanted[0])
    results = start(tile, is_interpreted, kernel, [dx, *sums], *operands)
    own = [results[0] if dx is None else results[0].reshape(call.shape)]
    for part, name in zip(results[1:], wanted[1:], strict=True):
        if part is not None and name is not None:
            part = _over_programs(part, tile.programs, name, is_interpreted)
            part = part.reshape([call.shape[axis] for axis in call.feature_axes])
        own.append(part)
    return [result for result in own if result is not None]


class _Row(NamedTuple):
    """Of the rows of a tile: where they are, 1 / rho, slope, and the inner product of u and h."""

    first: Any
    inside: Any
    inverse_rms: Any
    slope: Any
    inner: Any


def _over_programs(sums: jax.Array, programs: int, name: str, is_interpreted: bool) -> jax.Array:
    """The sum of so many rows of a matrix, in one order on every card, rounded once."""
    n = sums.shape[1]
    width = min(128, tiles("backward", programs, n).block)
    tile = Tiles(_ROWS_TO_ADD, width, 1, pl.cdiv(n, width), 4)
    return start(tile, is_interpreted, bind(_add_up, tile, programs, n), [((1, n), name)], sums)[0]


def _add_up(tile: Tiles, count: int, n: int, machine: Machine, sums: Any, result: Any) -> None:
    column = pl.program_id(0) * tile.block
    columns = indices(column, tile.block, 1) < n

    def step(i: Any, so_far: jax.Array) -> jax.Array:
        row = i * tile.rows
        return so_far + load(sums, row, column, (indices(row, tile.rows, 0) < count) & columns)

    zero = jnp.zeros((tile.rows, tile.block), jnp.float64)
    steps = pl.cdiv(count, tile.rows)
    added = jnp.sum(lax.fori_loop(jnp.int32(0), jnp.int32(steps), step, zero), axis=0, keepdims=True)
    name = result.dtype.name
    store(result, 0, column, added if name == "float64" else machine.rounded_wide(added, name), columns)


def _sum_parts(call: Call, tile: Tiles, machine: Machine, dy: Any, h: Any, scale: Any, parts: Any) -> None:
    """Into ``parts``, of rows by chunks: the inner product of u and h in a chunk of a row."""
    row, chunk = pl.program_id(0), pl.program_id(1)
    column = chunk * tile.block
    columns = indices(column, tile.block, 1) < call.n
    u = machine.wide(load(dy, row, column, columns))
    if scale is not None:
        u = u * wide_gains(machine, call, scale, column, columns)
    parts[pl.ds(row, 1), pl.ds(chunk, 1)] = total(u * machine.wide(load(h, row, column, columns)))


def _backward(
    call: Call, tile: Tiles, count: int, machine: Machine,
    dy: Any, h: Any, dh: Any, scale: Any, parts: Any, inverse_rms: Any, dx: Any, dscale: Any, dbias: Any,
) -> None:  # fmt: skip
    """Tiles i, i + programs ... of dx, and the sums over their rows for dscale and dbias, of programs by n, in float64.

    ``parts``: what _sum_parts has written, if a tile is a chunk of one row.
    """
    program, column = pl.program_id(0), pl.program_id(1) * tile.block
    columns = indices(column, tile.block, 1) < call.n

    def compute(i: Any, sums: tuple[Any, Any]) -> tuple[Any, Any]:
        row = (program + i * tile.programs) * tile.rows
        rows = indices(row, tile.rows, 0) < count
        inside = rows & columns
        r = load(inverse_rms, row, 0, rows)
        x, v = load(h, row, column, inside), load(dy, row, column, inside)
        wide_x, wide_v = machine.wide(x), machine.wide(v)
        of_scale, of_bias = sums
        if of_scale is not None:
            of_scale = of_scale + wide_v * (wide_x * r)
        if of_bias is not None:
            of_bias = of_bias + wide_v
        if dx is not None:
            gain = None if scale is None else gains(machine, call, scale, column, columns)
            u, u_error, bad = _times_gain(machine, v.astype(jnp.float32), gain)
            if parts is None:
                inner = total((machine.wide(u) + machine.wide(u_error)) * wide_x)
            else:
                inner = sum_of_chunks(parts, row, rows, tile.chunks)
            own = _Row(row, rows, r, _slope(call, r), inner)
            _fill(call, tile, machine, own, (dy, h, dh, scale), dx, column, x, (u, u_error), bad)
        return of_scale, of_bias

    zero = jnp.zeros((tile.rows, tile.block), jnp.float64)
    steps = pl.cdiv(pl.cdiv(count, tile.rows), tile.programs)
    sums = (None if dscale is None else zero, None if dbias is None else zero)
    sums = lax.fori_loop(jnp.int32(0), jnp.int32(steps), compute, sums)
    for reference, added in zip((dscale, dbias), sums, strict=True):
        if reference is not None:
            store(reference, program, column, jnp.sum(added, axis=0, keepdims=True), columns)


def _times_gain(machine: Machine, v: jax.Array, gain: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """u as a pair, and where that is out of range."""
    if gain is None:
        return v, jnp.zeros_like(v), machine.is_outside(v, v)
    high = jnp.broadcast_to(gain[0], v.shape)
    u, error = machine.product(v, high)
    return u, error + v * gain[1], machine.is_outside(u, v, high)


def _slope(call: Call, inverse_rms: jax.Array) -> jax.Array:
    """rho / s, with drho / dh = h / (k s)."""
    if call.variant.eps_position == "outside":
        return 1 / (1 - call.eps * inverse_rms)
    if call.variant.eps_position == "clamp":
        return jnp.where(inverse_rms * floor_of(call) < 1 - 2.0**-50, 1.0, 0.0)  # 1 / rho is rounded
    return jnp.ones_like(inverse_rms)


def _fill(
    call: Call, tile: Tiles, machine: Machine, row: _Row, arrays: Any, dx: Any, column: Any, x: jax.Array, u: Any,
    bad: jax.Array,
) -> None:  # fmt: skip
    """A tile of dx, of which x and the pair u are loaded."""
    columns = indices(column, tile.block, 1)
    counts, inside = columns < call.k, row.inside & (columns < call.n)
    outside = ~is_between(row.inverse_rms, 1 / MOST_RHO, 1 / LEAST_RHO)
    if call.variant.eps_position == "outside":
        outside = outside | (call.eps * row.inverse_rms > 0.5)
    step = row.inverse_rms * row.inverse_rms * row.slope * row.inner / call.k
    outside = outside | ((step != 0) & ~is_between(abs(step), LEAST, MOST))
    step_high, step_low = machine.split(step)
    v = x.astype(jnp.float32)
    near, near_error = machine.product(v, step_high)
    bad = bad | (counts & machine.is_outside(near, v, jnp.broadcast_to(step_high, v.shape)))
    near, near_error = (jnp.where(counts, part, 0.0) for part in (near, near_error + v * step_low))
    rest, rest_error = two_sum(u[0], -near)
    bad = bad | (abs(rest) < _CANCELS.get(dx.dtype.name, _CANCELS_16) * abs(near))
    rest_error = rest_error + (u[1] - near_error)
    high, low = machine.split(row.inverse_rms)
    gradient, error = machine.product(rest, high)
    error = error + (rest * low + rest_error * high)
    dh = arrays[2]
    if dh is not None:
        other = load(dh, row.first, column, inside).astype(jnp.float32)
        bad = bad | machine.is_outside(other, other)
        gradient, lost = two_sum(gradient, other)
        error = error + lost
    gradient = jnp.where(gradient == 0, 0.0, gradient)  # a zero becomes +0
    result = machine.rounded(gradient, error, dx.dtype.name)
    is_bad = any_of((bad & inside) | (outside & row.inside))

    @pl.when(~is_bad)
    def _() -> None:
        store(dx, row.first, column, result, inside)

    @pl.when(is_bad)
    def _() -> None:
        _fill_again(call, tile, machine, row, arrays, dx, column)


def _fill_again(call: Call, tile: Tiles, machine: Machine, row: _Row, arrays: Any, dx: Any, column: Any) -> None:
    """A tile of dx in pairs of float64."""
    dy, h, dh, scale = arrays
    width = width_in_float64(tile)

    def terms(own: Any) -> tuple[jax.Array, ...]:
        """h and the pair u of so many columns, and which of them there are."""
        columns = indices(own, width, 1) < call.n
        inside = row.inside & columns
        x, v = (machine.wide(load(array, row.first, own, inside)) for array in (h, dy))
        if scale is None:
            return x, v, jnp.zeros_like(v), inside
        return x, *machine.product(v, wide_gains(machine, call, scale, own, columns) + jnp.zeros_like(v)), inside

    def add(i: Any, sums: Any) -> Any:
        (inner, inner_error), (square, square_error), plain = sums
        own = i * width
        x, u, u_error, _ = terms(own)
        product, error = machine.pair_product(u, u_error, x, 0.0)
        inner, inner_error = pair_sum(inner, inner_error, product, error)
        counts = indices(own, width, 1) < call.k
        product, error = (jnp.where(counts, part, 0.0) for part in machine.product(x, x))
        return (inner, inner_error), pair_sum(square, square_error, product, error), plain + u * x

    zero = jnp.zeros((tile.rows, width), jnp.float64)
    zeros = (zero, zero), (zero, zero), zero
    *pairs, plain = lax.fori_loop(jnp.int32(0), jnp.int32(pl.cdiv(call.n, width)), add, zeros)
    inner, square = (pair_total(*pair) for pair in pairs)
    plain = total(plain)  # which may be infinite, and then the pair is NaN
    q = square[0] / call.k
    rho = machine.rho_of(call, q)
    if call.variant.eps_position == "inside":
        share = call.eps / (q + call.eps)
    elif call.variant.eps_position == "outside":
        share = call.eps / rho
    else:
        share = jnp.where(machine.sqrt(q) < rho, 1.0, 0.0)
    along = machine.pair_quotient(*inner, *square)
    r = row.inverse_rms
    step = r * r * row.slope * plain / call.k
    by_pairs = (step != 0) & (abs(step) < np.inf) & (share <= 0.5)  # else nothing cancels but by chance

    def fill(i: Any, _: None) -> None:
        own = column + i * width
        x, u, u_error, inside = terms(own)
        near, near_error = machine.pair_product(x, 0.0, *along)
        rest, _ = pair_sum(u, u_error, -near, -near_error)
        rest = jnp.where(abs(rest) <= _ZERO * abs(near), 0.0, rest) + share * near
        counts = indices(own, width, 1) < call.k
        rest = jnp.where(counts, rest, u)
        by_formula = r * (u - jnp.where(counts, r * x * row.slope * (r * plain / call.k), 0.0))
        gradient = jnp.where(by_pairs, rest / rho, by_formula)
        if dh is not None:
            gradient = gradient + machine.wide(load(dh, row.first, own, inside))
        gradient = jnp.where(gradient == 0, 0.0, gradient)  # a zero becomes +0
        store(dx, row.first, own, machine.rounded_wide(gradient, dx.dtype.name), inside)

    lax.fori_loop(jnp.int32(0), jnp.int32(tile.block // width), fill, None)
