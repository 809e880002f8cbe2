"""The forward pass in Pallas, for JAX.

    y = h / rho * (o + scale) + bias

The statistic is float64, one product and sum an element. All else is pairs of float32, rounded once wherever the
variant rounds; a tile in which some number is out of their range is computed in float64 instead, in steps. Arrays are
matrices: h and y of rows by n, 1 / rho of rows by 1, parameters of 1 by n.
Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

from functools import partial as bind
from math import prod
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rmsnorm.call import Call
from rmsnorm.gpu.pallas_pairs import LEAST_RHO, MOST, MOST_RHO, Machine, is_between, two_sum
from rmsnorm.gpu.plan import Tiles, power_of_two, tiles

_A_THREAD: Final = 2  # elements that a thread computes in float64 at once


def forward(call: Call, h: jax.Array, scale: Any, bias: Any, *, is_interpreted: bool) -> tuple[jax.Array, jax.Array]:
    """y and 1 / rho in float64, shaped as x."""
    y, inverse_rms = _run(call, call.result, h, scale, bias, is_interpreted)
    return y.reshape(call.shape), inverse_rms


def inverse_rms_of(call: Call, h: jax.Array, *, is_interpreted: bool) -> jax.Array:
    return _run(call, None, h, None, None, is_interpreted)[1]


def _run(call: Call, y: str | None, h: Any, scale: Any, bias: Any, is_interpreted: bool) -> tuple[Any, jax.Array]:
    rows, n = prod(call.shape) // call.n, call.n
    tile = tiles("forward", rows, n)
    h, scale, bias = (None if array is None else array.reshape(-1, n) for array in (h, scale, bias))
    parts = None
    if tile.chunks > 1:
        every = tile._replace(programs=rows)
        (parts,) = start(every, is_interpreted, bind(_sum_parts, call, every), [parts_of(rows, tile)], h)
    results = [y and ((rows, n), y), ((rows, 1), "float64")]
    filled, inverse_rms = start(tile, is_interpreted, bind(_forward, call, tile, rows), results, h, scale, bias, parts)
    return filled, inverse_rms.reshape([1 if axis in call.axes else size for axis, size in enumerate(call.shape)])


def start(tile: Tiles, is_interpreted: bool, kernel: Any, results: Any, *operands: Any) -> Any:
    """Runs a kernel, whose arguments are a Machine, and a reference or None for each operand and result."""

    def body(*references: Any) -> None:
        rest = iter(references)
        kernel(Machine(is_interpreted), *(None if x is None else next(rest) for x in (*operands, *results)))

    body.__name__ = f"rms_norm{kernel.func.__name__}"
    like = jax.typeof(operands[0]).manual_axis_type  # in a shard_map
    shapes = [jax.ShapeDtypeStruct(*result, manual_axis_type=like) for result in results if result is not None]
    outputs = iter(
        pl.pallas_call(
            body,
            out_shape=shapes,
            grid=(tile.programs, tile.chunks),
            interpret=is_interpreted,
            compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=1),
            name=body.__name__,
        )(*(x for x in operands if x is not None))
    )
    return [None if result is None else next(outputs) for result in results]


def load(array: Any, row: Any, column: Any, inside: Any) -> jax.Array:
    """As many elements from a row and column on as ``inside`` is large; 0 where that is false."""
    return triton.load(array.at[_slices(row, column, inside)], mask=inside, other=0.0)


def store(array: Any, row: Any, column: Any, values: Any, inside: Any) -> None:
    triton.store(array.at[_slices(row, column, inside)], values, mask=inside)


def _slices(row: Any, column: Any, inside: jax.Array) -> tuple[Any, Any]:
    first = (np.int32(i) if isinstance(i, int) else i for i in (row, column))  # x64 would make int64
    return tuple(pl.ds(i, size) for i, size in zip(first, inside.shape, strict=True))


def indices(first: Any, size: int, axis: int) -> jax.Array:
    """The numbers of so many rows (axis 0) or columns (axis 1), as a matrix."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis) + first


def width_in_float64(tile: Tiles) -> int:
    """Elements of a row that are computed in float64 at once."""
    return min(tile.block, max(1, _A_THREAD * 32 * tile.warps // tile.rows))


def total(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=1, keepdims=True)


def any_of(marks: jax.Array) -> jax.Array:
    return jnp.max(marks.astype(jnp.int32)) > 0


def gains(machine: Machine, call: Call, scale: Any, column: Any, inside: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o + scale as a pair of float32."""
    gain = load(scale, 0, column, inside)
    if gain.dtype == jnp.float64:  # as in a shard_map, whose sums over devices are of the type of the gain
        return machine.split(gain + call.offset)
    gain = gain.astype(jnp.float32)
    if not call.variant.scale_offset:
        return gain, jnp.zeros_like(gain)
    return two_sum(gain, jnp.full_like(gain, call.offset))


def wide_gains(machine: Machine, call: Call, scale: Any, column: Any, inside: jax.Array) -> jax.Array:
    """o + scale in float64."""
    gain = machine.wide(load(scale, 0, column, inside))
    return gain + call.offset if call.variant.scale_offset else gain


def parts_of(rows: int, tile: Tiles) -> tuple[tuple[int, int], str]:
    """The type of the sums over the chunks of each row, which are loaded at once. Pallas wants all that is loaded to be
    inside of the array, also what a mask leaves out.
    """
    return (rows, power_of_two(tile.chunks)), "float64"


def sum_of_chunks(parts: Any, row: Any, rows: jax.Array, chunks: int) -> jax.Array:
    return total(load(parts, row, 0, rows & (indices(0, parts.shape[1], 1) < chunks)))


def _sum_parts(call: Call, tile: Tiles, machine: Machine, h: Any, parts: Any) -> None:
    """Into ``parts``, of rows by chunks: the sum of squares in a chunk of a row."""
    row, chunk = pl.program_id(0), pl.program_id(1)
    column = chunk * tile.block
    v = machine.wide(load(h, row, column, indices(column, tile.block, 1) < call.k))
    parts[pl.ds(row, 1), pl.ds(chunk, 1)] = total(v * v)


def _forward(
    call: Call, tile: Tiles, count: int, machine: Machine,
    h: Any, scale: Any, bias: Any, parts: Any, y: Any, inverse_rms: Any,
) -> None:  # fmt: skip
    """A tile of y and 1 / rho. ``parts``: what _sum_parts has written, if a program has a chunk of one row."""
    row, column = pl.program_id(0) * tile.rows, pl.program_id(1) * tile.block
    rows = indices(row, tile.rows, 0) < count
    columns = indices(column, tile.block, 1) < call.n
    inside = rows & columns
    x = load(h, row, column, inside)
    if parts is None:
        wide = machine.wide(x)
        q = total(jnp.where(indices(column, tile.block, 1) < call.k, wide * wide, 0.0))
    else:
        q = sum_of_chunks(parts, row, rows, tile.chunks)
    rho = machine.rho_of(call, q / call.k)
    store(inverse_rms, row, 0, 1 / rho, rows if parts is None else rows & (column == 0))
    if y is None:
        return
    bad, result = _in_pairs(call, machine, x.astype(jnp.float32), scale, bias, column, columns, 1 / rho)
    is_bad = any_of((bad & inside) | (~is_between(rho, LEAST_RHO, MOST_RHO) & rows))

    @pl.when(~is_bad)
    def _() -> None:
        store(y, row, column, result, inside)

    @pl.when(is_bad)
    def _() -> None:
        width = width_in_float64(tile)

        def step(i: Any, _: None) -> None:
            own = column + i * width
            columns = indices(own, width, 1) < call.n
            result = _in_float64(call, machine, load(h, row, own, rows & columns), scale, bias, own, columns, rho)
            store(y, row, own, result, rows & columns)

        lax.fori_loop(jnp.int32(0), jnp.int32(tile.block // width), step, None)


def _in_pairs(
    call: Call, machine: Machine, h: jax.Array, scale: Any, bias: Any, column: Any, columns: Any, inverse_rms: Any
) -> tuple[jax.Array, jax.Array]:
    """A tile of y from one of h in float32, and before it which elements are out of range."""
    high, low = machine.split(inverse_rms)
    bad = machine.is_outside(h, h)
    if call.norm is not None:
        t, error = machine.product(h, high)
        v = machine.rounded(t, error + h * low, call.norm).astype(jnp.float32)
        if scale is not None:
            gain = machine.rounded(*gains(machine, call, scale, column, columns), call.product).astype(jnp.float32)
            product = machine.times(v, gain)
            bad = bad | machine.is_outside(product, v, gain)
            v = machine.to_format(product, call.product).astype(jnp.float32)
        if bias is not None:
            v = machine.rounded(*two_sum(v, _biases(machine, bias, column, columns)), call.product).astype(jnp.float32)
            bad = bad | ~(abs(v) <= MOST)
        return bad, machine.to_format(v, call.result)
    product, product_error = h, jnp.zeros_like(h)
    if scale is not None:
        gain, gain_error = gains(machine, call, scale, column, columns)
        product, product_error = machine.product(h, gain)
        product_error = product_error + h * gain_error
        bad = machine.is_outside(product, jnp.broadcast_to(h, product.shape), jnp.broadcast_to(gain, product.shape))
    t, error = machine.product(product, high)
    error = error + (product * low + product_error * high)
    if bias is not None:
        t, lost = two_sum(t, _biases(machine, bias, column, columns))
        error = error + lost
        bad = bad | ~(abs(t) <= MOST)
    return bad, machine.rounded(t, error, call.result)


def _in_float64(
    call: Call, machine: Machine, h: jax.Array, scale: Any, bias: Any, column: Any, columns: Any, rho: Any
) -> jax.Array:
    v = machine.wide(h)
    if call.norm is not None:
        v = machine.wide(machine.rounded_wide(v / rho, call.norm))
        if scale is not None:
            gain = machine.rounded_wide(wide_gains(machine, call, scale, column, columns), call.product)
            v = machine.wide(machine.rounded_wide(v * machine.wide(gain), call.product))
        if bias is not None:
            v = v + machine.wide(load(bias, 0, column, columns))
            v = machine.wide(machine.rounded_wide(v, call.product))
    else:
        if scale is not None:
            v = v * wide_gains(machine, call, scale, column, columns)
        v = v / rho
        if bias is not None:
            v = v + machine.wide(load(bias, 0, column, columns))
    return machine.rounded_wide(v, call.result)


def _biases(machine: Machine, bias: Any, column: Any, columns: jax.Array) -> jax.Array:
    return load(bias, 0, column, columns).astype(jnp.float32)
