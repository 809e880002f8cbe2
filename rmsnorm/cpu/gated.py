"""A norm in groups, or with a gate z, on rows in memory, compiled, in one pass over each row: float64 inside.

    y = h / rho * (o + scale) * f(z)  of h = x, with the gate after the norm; y = h / rho * (o + scale)  of h = x f(z)
    sigmoid: f = s(z),    f' = s(z) s(-z)            s(z) = 1 / (1 + exp(-z))
    silu:    f = z s(z),  f' = s(z) (1 + z s(-z))

A row has the n numbers that the gains have, and groups of k of them with a statistic each. The formats have at most 32
bits. Without a gate f is 1. The gate stands where forward.py and backward.py have the residual and the mask, dgate
where they have dh.

With the gate before the norm and an eps next to nothing, y is moderate however small x f(z) is. Where its squares leave
the range of float64, f(z) and f'(z) of the row are multiplied by one power of two, and so is rho; it cancels in every
result but 1 / rho.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu.formats import LOAD, ROUND, STORE, add_product_in_any_order, apart, bits, inlined, view
from rmsnorm.cpu.formats import multiply_add as fma
from rmsnorm.cpu.settings import BACKWARD, FORWARD, INSIDE, OUTSIDE, STORAGE
from rmsnorm.cpu.statistic import rho_of, slope
from rmsnorm.cpu.system import LINE, aligned, free, malloc, settings_at, word

_X, _X_STEP, _Y, _INVERSE_RMS = map(FORWARD.index, ("x", "x_step", "y", "inverse_rms"))
_GATE, _GATE_STEP = map(FORWARD.index, ("residual", "mask_step"))
_H, _H_STEP, _DY, _DX, _DGATE = map(BACKWARD.index, ("h", "h_step", "dy", "dx", "dh"))
_Z, _Z_STEP = map(BACKWARD.index, ("mask", "mask_step"))

_LOG2E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.6931471803691238  # of 33 bits: its product with a small integer is exact
_LN2_LOW: Final = 1.9082149292705877e-10
_ROUNDS: Final = 1.5 * 2.0**52  # a sum with it has no fraction
_LAST: Final = 708.0  # the exponential of -z is a normal number up to here, and then 0
_END: Final = 2.0**16  # likewise in the golden
_LEAST: Final = 2.0**-960  # sums of squares: below, these lose digits, or are 0
_SMALL: Final = 2.0**-400  # eps: beside a larger one such sums do not count


@inlined
def most_of(s: Any) -> Any:
    """The largest exponent of two by which rho may be multiplied, so that an eps stays in range."""
    return 2**30 if s.eps == 0 else (500 if s.position == INSIDE else 1000)


@inlined
def power_of(exponent: int) -> Any:
    """The power of two; beyond 1000 it multiplies an eps of 0 alone, and a 1 / rho that no result can hold."""
    return bits(((1000 if exponent > 1000 else exponent) + 1023) << 52)


def compiled(kind: str, x: str, y: str, z: str, function: str, position: str, norm: str, product: str) -> Any:
    """The kernel for the formats of x, y and z, and for what the variant does with the gate.

    ``norm`` and ``product`` are the formats to which h / rho and its product with the gain are rounded, both empty if
    they are not. z, ``function`` and ``position`` are empty if there is no gate.
    """
    has_gate, z = z != "", z or x
    load_x, load_y, load_z = LOAD[x], LOAD[y], LOAD[z]
    store_x, store_y, store_z = STORE[x], STORE[y], STORE[z]
    like_x, like_y, like_z = STORAGE[x](0), STORAGE[y](0), STORAGE[z](0)
    x_bytes, y_bytes, z_bytes = (np.dtype(STORAGE[name]).itemsize for name in (x, y, z))
    before_gain, on_x, is_silu = norm != "", position == "before", function == "silu"
    round_norm, round_product = ROUND[norm or "float64"], ROUND[product or "float64"]

    @inlined
    def exponential(size: float) -> Any:
        """exp(-size) to an ulp by Taylor's polynomial: a number, and the exponent of two in the last bits of a sum."""
        sum_ = fma(size, -_LOG2E, _ROUNDS)
        whole = sum_ - _ROUNDS
        r = fma(whole, -_LN2_LOW, fma(whole, -_LN2_HIGH, -size))
        p = fma(fma(fma(1.0 / 6227020800, r, 1.0 / 479001600), r, 1.0 / 39916800), r, 1.0 / 3628800)
        p = fma(fma(fma(p, r, 1.0 / 362880), r, 1.0 / 40320), r, 1.0 / 5040)
        p = fma(fma(fma(fma(p, r, 1.0 / 720), r, 1.0 / 120), r, 1.0 / 24), r, 1.0 / 6)
        return fma(fma(fma(p, r, 0.5), r, 1.0), r, 1.0), sum_

    @inlined
    def shares(number: float) -> Any:
        """s(z) and s(-z): an exponential, a sum, a quotient and a product."""
        size = abs(number)
        size = _LAST if size > _LAST else size  # NaN stays
        p, sum_ = exponential(size)
        power = p * bits((bits(sum_) + 1023) << 52)
        power = 0.0 if size == _LAST else power
        more = 1 / (1 + power)
        less = power * more
        return (less, more) if number < 0 else (more, less)

    @inlined
    def factor(number: float) -> Any:
        share, _ = shares(number)
        return number * share if is_silu else share

    def lift(x: Any, z: Any, most: int, f: Any, derivative: Any) -> Any:
        """f(z) and f'(z), where x is not 0 of z far below 0, times that power of two of which the exponent is returned.

        x f(z) of the row is then at most about 1; the exponent is at most ``most``.
        """
        top = -(2**30)
        for j in range(f.size):
            number = load_z(z[j])
            if load_x(x[j]) != 0 and abs(number) <= _END:
                _, sum_ = exponential(abs(number))
                exponent = (bits(abs(load_x(x[j]))) >> 52) - 1023
                exponent += np.int64(sum_ - _ROUNDS) if number < 0 else 0
                top = exponent if exponent > top else top
        shift = 0 if top == -(2**30) else (-top if -top < most else most)
        for j in range(f.size):
            number = load_z(z[j])
            p, sum_ = exponential(abs(number) if abs(number) <= _END else 0.0)
            share, rest = shares(number)
            exponent = shift
            if number < 0:
                share, exponent = p * rest if number >= -_END else 0.0, shift + np.int64(sum_ - _ROUNDS)
            exponent = -1023 if exponent < -1023 else (1000 if exponent > 1000 else exponent)
            share *= bits((exponent + 1023) << 52)
            derivative[j] = share * (1 + number * rest) if is_silu else share * rest
            f[j] = number * share if is_silu else share
        return shift

    lift = apart(lift)

    @inlined
    def affine(number: float, rho: float, gain: float) -> Any:
        """h / rho times the gain, as the variant rounds it."""
        if before_gain:
            result = round_product(round_norm(number / rho) * gain)
        else:
            result = number * gain / rho
        return result

    def forward(settings: int, start: int, stop: int, prepared: int, _: int, arguments: int) -> int:
        """Computes rows ``start`` to ``stop`` of y, and 1 / rho of each group if asked for. 1 if memory is short."""
        s = settings_at(settings)
        n, k = s.n, s.k
        groups = n // k
        x, x_step, y = word(arguments, _X), word(arguments, _X_STEP), word(arguments, _Y)
        gate, gate_step, inverse_rms = (
            word(arguments, _GATE),
            word(arguments, _GATE_STEP),
            word(arguments, _INVERSE_RMS),
        )
        memory = malloc(LINE + 8 * k)
        if memory == 0:
            return 1
        f = view(aligned(memory), k, 0.0)
        for i in range(start * groups, stop * groups):
            row, first = i // groups, i % groups * k
            x_row, y_row = view(x + row * x_step + first * x_bytes, k, like_x), view(y + i * k * y_bytes, k, like_y)
            z, gain = view(gate + row * gate_step + first * z_bytes, k, like_z), view(prepared + 8 * first, k, 0.0)
            total = 0.0
            for j in range(k):
                f[j] = factor(load_z(z[j])) if has_gate else 1.0
                h = load_x(x_row[j]) * f[j] if on_x else load_x(x_row[j])
                total = add_product_in_any_order(h, h, total)
            power = 1.0
            if on_x and total < _LEAST and s.eps < _SMALL:
                power = power_of(lift(x_row, z, most_of(s), f, f))
                total = 0.0
                for j in range(k):
                    total += load_x(x_row[j]) * f[j] * (load_x(x_row[j]) * f[j])
            rho = rho_of(s, total / k, k, power)
            if inverse_rms:
                view(inverse_rms, i + 1, 0.0)[i] = 1 / rho * power
            for j in range(k):
                if on_x:
                    store_y(y_row, j, affine(load_x(x_row[j]) * f[j], rho, gain[j]))
                else:
                    store_y(y_row, j, affine(load_x(x_row[j]), rho, gain[j]) * f[j])
        free(memory)
        return 0

    def backward(settings: int, start: int, stop: int, prepared: int, sums: int, arguments: int) -> int:
        """Computes rows ``start`` to ``stop`` of dx and dgate, and the sums over these rows for dscale at ``sums``.

        Returns 1 if memory is short.
        """
        s = settings_at(settings)
        n, k = s.n, s.k
        groups = n // k
        x, x_step, dy, dx = word(arguments, _H), word(arguments, _H_STEP), word(arguments, _DY), word(arguments, _DX)
        gate, gate_step, dgate = word(arguments, _Z), word(arguments, _Z_STEP), word(arguments, _DGATE)
        total_sums = view(sums, n, 0.0)
        for j in range(n):
            total_sums[j] = 0.0
        memory = malloc(LINE + 16 * k)
        if memory == 0:
            return 1
        f, derivative = view(aligned(memory), k, 0.0), view(aligned(memory) + 8 * k, k, 0.0)
        for i in range(start * groups, stop * groups):
            row, first = i // groups, i % groups * k
            x_row, dx_row = view(x + row * x_step + first * x_bytes, k, like_x), view(dx + i * k * x_bytes, k, like_x)
            z, dz = view(gate + row * gate_step + first * z_bytes, k, like_z), view(dgate + i * k * z_bytes, k, like_z)
            v, gain = view(dy + i * k * y_bytes, k, like_y), view(prepared + 8 * first, k, 0.0)
            dscale = view(sums + 8 * first, k, 0.0)
            total, inner, length = 0.0, 0.0, 0.0
            for j in range(k):
                f[j] = 1.0
                if has_gate:
                    number = load_z(z[j])
                    share, rest = shares(number)
                    f[j] = number * share if is_silu else share
                    derivative[j] = share * (1 + number * rest) if is_silu else share * rest
                h = load_x(x_row[j]) * f[j] if on_x else load_x(x_row[j])
                total = add_product_in_any_order(h, h, total)
                # f(z) is a factor of dy or of h
                inner = add_product_in_any_order(load_x(x_row[j]) * f[j], load_y(v[j]) * gain[j], inner)
            power = 1.0
            if on_x and total < _LEAST and s.eps < _SMALL:
                power = power_of(lift(x_row, z, most_of(s), f, derivative))
                total, inner = 0.0, 0.0
                for j in range(k):
                    h = load_x(x_row[j]) * f[j]
                    total += h * h
                    inner += h * (load_y(v[j]) * gain[j])
            rho = rho_of(s, total / k, k, power)
            inverse = 1 / rho
            if s.position == OUTSIDE:
                length = total * inverse * inverse
            step = slope(s, k, inverse * power, length) * inner * inverse / k * inverse
            for j in range(k):
                h = load_x(x_row[j]) * f[j] if on_x else load_x(x_row[j])
                upstream = load_y(v[j]) if on_x else load_y(v[j]) * f[j]
                dscale[j] += upstream * (h * inverse)
                gradient = inverse * (upstream * gain[j] - h * step)
                if on_x:
                    store_z(dz, j, gradient * load_x(x_row[j]) * derivative[j] + 0.0)
                    gradient = gradient * f[j]
                elif has_gate:
                    store_z(dz, j, load_y(v[j]) * affine(h, rho, gain[j]) * derivative[j] + 0.0)
                store_x(dx_row, j, gradient + 0.0)
        free(memory)
        return 0

    return forward if kind == "forward" else backward
