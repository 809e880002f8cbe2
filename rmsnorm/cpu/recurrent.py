"""One step of a recurrent cell in one pass over each row, compiled: all but its matrix product, and the way back.

    GRU     r, u = sigmoid(norm(a) + gates);     c = tanh(r norm(a) + proposal);  h' = u h + (1 - u) c
    LSTM    i, f, o = sigmoid(norm(a) + below);  g = tanh(norm(a) + below);      c' = f c + i g;  h' = o tanh(norm(c'))

Here a = h W has the gates side by side, and norm(a) = a / sqrt(mean(a^2) + eps) * gain of those that are normalised
together. A mask m makes m h' + (1 - m) h of a state. Numbers are stored as float32 or float64; all arithmetic is in
float64. The arguments are in settings.py; the golden is nematus/numpy/recurrent.py.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.cpu.formats import LOAD, add_product_in_any_order, apart, bits, inlined, view
from rmsnorm.cpu.settings import STEP_ARGUMENTS, STEP_HEAD, STORAGE
from rmsnorm.cpu.statistic import scaled_sum_of_squares, sum_of_squares
from rmsnorm.cpu.system import call_c, fetch_add, set_word, word
from rmsnorm.cpu.tasks import _enter_python, _error_occurred, _integer, _leave_python, _to_python

_KERNEL, _ROWS, _N, _FIRST, _SECOND, _EPS, _TIME, _STEP, _NEXT, _WORK, _THREADS, _PARALLEL = range(len(STEP_HEAD))
_LARGE: Final = 1e280  # of a mean square in float64: it may have overflowed

_LOG2E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.6931471803691238  # of 33 bits: its product with a small integer is exact
_LN2_LOW: Final = 1.9082149292705877e-10
_ROUNDS: Final = 1.5 * 2.0**52  # a sum with it has no fraction


def compiled(name: str, x: str = "") -> Any:
    """``run`` and ``work``; or the kernel of that name in STEP_ARGUMENTS, for rows of that format."""
    if not x:
        return {"run": run, "work": work}[name]
    return {"gru": _gru, "lstm": _lstm, "norm": _norm}[name.partition("_")[0]](name, x)


def run(_: int, arguments: int, count: int) -> int:
    """Computes a job; the arguments of this method of Python are its address and the time."""
    job, time = _integer(word(arguments, 0)), _integer(word(arguments, 1))
    if _error_occurred():
        return 0
    thread = _leave_python()
    set_word(job, _TIME, time)
    set_word(job, _NEXT, 0)
    if word(job, _PARALLEL):
        call_c(word(job, _PARALLEL), word(job, _WORK), job, word(job, _THREADS), 0)
    else:
        call_c(word(job, _WORK), job)
    _enter_python(thread)
    return _to_python(0)


def work(job: int) -> int:
    """What each thread does: part after part, until none are left."""
    rows, step = word(job, _ROWS), word(job, _STEP)
    part = fetch_add(job + 8 * _NEXT, 1)
    while part * step < rows:
        stop = part * step + step
        call_c(word(job, _KERNEL), job, part * step, stop if stop < rows else rows, part)
        part = fetch_add(job + 8 * _NEXT, 1)
    return 0


def _arithmetic(x: str) -> tuple[Any, Any, Any, Any]:
    """sigmoid, tanh, 1 / rho of a row, and the gradient of a norm, for rows of a format."""
    load, like, is_wide = LOAD[x], STORAGE[x](0), x == "float64"

    @inlined
    def expm1(number: float) -> Any:
        """exp(number) - 1 for |number| <= 700, to an ulp or two of the format: Taylor's polynomial for |r| < 0.35."""
        sum_ = number * _LOG2E + _ROUNDS
        whole = sum_ - _ROUNDS
        r = (number - whole * _LN2_HIGH) - whole * _LN2_LOW
        p = 1.0 / 40320
        if is_wide:
            p = (
                (((1.0 / 87178291200 * r + 1.0 / 6227020800) * r + 1.0 / 479001600) * r + 1.0 / 39916800) * r
            ) + 1.0 / 3628800
            p = (p * r + 1.0 / 362880) * r + 1.0 / 40320
        p = (((p * r + 1.0 / 5040) * r + 1.0 / 720) * r + 1.0 / 120) * r + 1.0 / 24
        p = (((p * r + 1.0 / 6) * r) + 0.5) * r + 1
        power = bits((bits(sum_) + 1023) << 52)
        return power * (r * p) + (power - 1)

    @inlined
    def sigmoid(number: float) -> Any:
        limited = -700.0 if number < -700.0 else (700.0 if number > 700.0 else number)
        return 1 / (expm1(-limited) + 2)

    @inlined
    def tanh(number: float) -> Any:
        limited = -40.0 if number < -40.0 else (40.0 if number > 40.0 else number)
        e = expm1(2 * limited)
        return e / (e + 2)

    @inlined
    def inverse_rms(row: Any, counted: int, eps: float) -> Any:
        """1 / rho; 1 for no norm."""
        result = 1.0
        if counted:
            q = sum_of_squares(load, row, counted) / counted
            result = 1 / np.sqrt(q + eps)
            if is_wide and not q < _LARGE:
                largest = 0.0
                for j in range(counted):
                    largest = abs(row[j]) if abs(row[j]) > largest else largest
                if largest < np.inf:
                    factor = 1 / largest
                    q = scaled_sum_of_squares(load, row, counted, factor) / counted
                    result = factor / np.sqrt(q + eps * factor * factor)
        return result

    @apart  # addresses, as numba would count references to arrays
    def pull_back(dy: int, row: int, gains: int, totals: int, n: int, counted: int, factor: float) -> None:
        """The gradient of a row in place of that of its norm; adds the gradient of the gain to the totals."""
        v, h, gain, total = view(dy, n, like), view(row, n, like), view(gains, n, like), view(totals, n, 0.0)
        inner = 0.0
        for j in range(n):
            total[j] += v[j] * (h[j] * factor)
        for j in range(n):
            inner = add_product_in_any_order(load(v[j]) * gain[j], h[j] * factor, inner)
        share = inner / counted
        for j in range(counted):
            v[j] = factor * (load(v[j]) * gain[j] - h[j] * factor * share)
        for j in range(np.uint64(counted), np.uint64(n)):  # unsigned: numba lets a signed index count from the end
            v[j] = factor * (load(v[j]) * gain[j])

    return sigmoid, tanh, inverse_rms, pull_back


def _arguments(name: str) -> range:
    """Where the arguments of a kernel are in a job."""
    return range(len(STEP_HEAD), len(STEP_HEAD) + len(STEP_ARGUMENTS[name]))


def _piece(x: str) -> Any:
    like, size = STORAGE[x](0), np.dtype(STORAGE[x]).itemsize

    @inlined
    def piece(job: int, argument: int, start: int, count: int) -> Any:
        """So many numbers of an argument, from one on."""
        return view(word(job, argument) + start * size, count, like)

    return piece


def _gru(name: str, x: str) -> Any:
    (sigmoid, tanh, inverse_rms, pull_back), piece = _arithmetic(x), _piece(x)
    load, like, size = LOAD[x], STORAGE[x](0), np.dtype(STORAGE[x]).itemsize
    if name == "gru_forward":
        (
            a_, saved_, inverse_, kept_, gain_, gates_, gates_time_, gates_row_, proposal_, proposal_time_,
            proposal_row_, before_, states_, mask_, start_,
        ) = _arguments(name)  # fmt: skip

        def forward(job: int, first: int, last: int, _: int) -> int:
            n, time, rows, eps = word(job, _N), word(job, _TIME), word(job, _ROWS), bits(word(job, _EPS))
            gain = piece(job, gain_, 0, 3 * n)
            proposal_gain = piece(job, gain_, 2 * n, n)
            kept_at, width = time * word(job, kept_) * rows, n * size
            for i in range(first, last):
                index, kept = time * rows + i, kept_at + i
                row, saved = word(job, a_) + 3 * kept * width, word(job, saved_) + 3 * kept * width
                inverse = view(word(job, inverse_) + 16 * kept, 2, 0.0)
                a, b = view(row, 2 * n, like), view(row + 2 * width, n, like)
                factor, other = inverse_rms(a, word(job, _FIRST), eps), inverse_rms(b, word(job, _SECOND), eps)
                inverse[0], inverse[1] = factor, other
                gates = view(word(job, gates_) + time * word(job, gates_time_) + i * word(job, gates_row_), 2 * n, like)
                proposal = view(
                    word(job, proposal_) + time * word(job, proposal_time_) + i * word(job, proposal_row_), n, like
                )
                ru = view(saved, 2 * n, like)
                for j in range(2 * n):
                    ru[j] = sigmoid(load(a[j]) * factor * gain[j] + gates[j])
                r, u, c = (view(saved, n, like), view(saved + width, n, like), view(saved + 2 * width, n, like))
                for j in range(n):
                    c[j] = tanh(load(r[j]) * (b[j] * other * proposal_gain[j]) + proposal[j])
                h, new = piece(job, before_, index * n, n), piece(job, states_, index * n, n)
                for j in range(n):
                    new[j] = load(u[j]) * h[j] + (1 - load(u[j])) * c[j]
                if word(job, mask_):
                    m = load(piece(job, mask_, index, 1)[0])
                    for j in range(n):
                        new[j] = m * new[j]
                    if word(job, start_):
                        start = piece(job, start_, index * n, n)
                        for j in range(n):
                            new[j] += (1 - m) * start[j]
            return 0

        return forward
    (
        a_, saved_, inverse_, gain_, before_, mask_, dstates_, dh_, to_carried_, from_carried_, da_, dgates_,
        dproposal_, dgain_,
    ) = _arguments(name)  # fmt: skip

    def backward(job: int, first: int, last: int, part: int) -> int:
        n, time, rows = word(job, _N), word(job, _TIME), word(job, _ROWS)
        width = n * size
        gain, totals = word(job, gain_), word(job, dgain_) + 24 * n * part
        proposal_gain = view(gain + 2 * width, n, like)
        for i in range(first, last):
            index = time * rows + i
            row, saved = word(job, a_) + 3 * index * width, word(job, saved_) + 3 * index * width
            inverse = view(word(job, inverse_) + 16 * index, 2, 0.0)
            b = view(row + 2 * width, n, like)
            r, u, c = (view(saved, n, like), view(saved + width, n, like), view(saved + 2 * width, n, like))
            h, dh = piece(job, before_, index * n, n), piece(job, dh_, i * n, n)
            if word(job, dstates_):
                dstates = piece(job, dstates_, index * n, n)
                for j in range(n):
                    dh[j] += dstates[j]
            if word(job, mask_):
                m = load(piece(job, mask_, index, 1)[0])
                if word(job, to_carried_):
                    carried = piece(job, to_carried_, i * n, n)
                    for j in range(n):
                        carried[j] = (1 - m) * dh[j]
                for j in range(n):
                    dh[j] = m * dh[j]
            gates_at = word(job, dgates_) + 2 * index * width
            dr, du = view(gates_at, n, like), view(gates_at + width, n, like)
            dproposal = piece(job, dproposal_, index * n, n)
            for j in range(n):
                dproposal[j] = load(dh[j]) * (1 - load(u[j])) * (1 - load(c[j]) * c[j])
            for j in range(n):
                du[j] = load(dh[j]) * (load(h[j]) - c[j]) * u[j] * (1 - load(u[j]))
            factor, other = inverse[0], inverse[1]
            for j in range(n):
                dr[j] = load(dproposal[j]) * (b[j] * other * proposal_gain[j]) * r[j] * (1 - load(r[j]))
            for j in range(n):
                dh[j] = load(dh[j]) * u[j]
            if word(job, from_carried_):
                carried = piece(job, from_carried_, i * n, n)
                for j in range(n):
                    dh[j] += carried[j]
            da_at = word(job, da_) + 3 * index * width
            da, db, dgates = view(da_at, 2 * n, like), view(da_at + 2 * width, n, like), view(gates_at, 2 * n, like)
            for j in range(2 * n):
                da[j] = dgates[j]
            for j in range(n):
                db[j] = load(dproposal[j]) * r[j]
            if word(job, _FIRST):
                pull_back(da_at, row, gain, totals, 2 * n, word(job, _FIRST), factor)
                pull_back(
                    da_at + 2 * width, row + 2 * width, gain + 2 * width, totals + 16 * n, n, word(job, _SECOND), other
                )
        return 0

    return backward


def _lstm(name: str, x: str) -> Any:
    (sigmoid, tanh, inverse_rms, pull_back), piece = _arithmetic(x), _piece(x)
    load, like, size = LOAD[x], STORAGE[x](0), np.dtype(STORAGE[x]).itemsize
    if name == "lstm_forward":
        (
            a_, saved_, inverse_, kept_, gain_, below_, before_, states_, cells_before_, cells_, mask_,
        ) = _arguments(name)  # fmt: skip

        def forward(job: int, first: int, last: int, _: int) -> int:
            n, time, rows, eps = word(job, _N), word(job, _TIME), word(job, _ROWS), bits(word(job, _EPS))
            kept_at, width = time * word(job, kept_) * rows, n * size
            gain, cell_gain = piece(job, gain_, 0, 4 * n), piece(job, gain_, 4 * n, n)
            for i in range(first, last):
                index, kept = time * rows + i, kept_at + i
                a, saved = piece(job, a_, 4 * kept * n, 4 * n), word(job, saved_) + 5 * kept * width
                inverse = view(word(job, inverse_) + 16 * kept, 2, 0.0)
                factor = inverse_rms(a, word(job, _FIRST), eps)
                below = piece(job, below_, 4 * index * n, 4 * n)
                gates, g = view(saved, 3 * n, like), view(saved + 3 * width, n, like)
                for j in range(3 * n):
                    gates[j] = sigmoid(load(a[j]) * factor * gain[j] + below[j])
                last_a, last_gain = piece(job, a_, (4 * kept + 3) * n, n), piece(job, gain_, 3 * n, n)
                last_below = piece(job, below_, (4 * index + 3) * n, n)
                for j in range(n):
                    g[j] = tanh(load(last_a[j]) * factor * last_gain[j] + last_below[j])
                input_, forget, output = (
                    view(saved, n, like),
                    view(saved + width, n, like),
                    view(saved + 2 * width, n, like),
                )
                c, new_c = piece(job, cells_before_, index * n, n), piece(job, cells_, index * n, n)
                h, new = piece(job, before_, index * n, n), piece(job, states_, index * n, n)
                for j in range(n):
                    new_c[j] = load(forget[j]) * c[j] + load(input_[j]) * g[j]
                m = 1.0
                if word(job, mask_):
                    m = load(piece(job, mask_, index, 1)[0])
                    for j in range(n):
                        new_c[j] = m * new_c[j] + (1 - m) * c[j]
                other = inverse_rms(new_c, word(job, _SECOND), eps)
                inverse[0], inverse[1] = factor, other
                activated = view(saved + 4 * width, n, like)
                for j in range(n):
                    activated[j] = tanh(load(new_c[j]) * other * cell_gain[j])
                for j in range(n):
                    new[j] = load(output[j]) * activated[j]
                if word(job, mask_):
                    for j in range(n):
                        new[j] = m * new[j] + (1 - m) * h[j]
            return 0

        return forward
    (
        a_, saved_, inverse_, gain_, cells_before_, cells_, mask_, dstates_, dcells_, dh_, dc_, da_, dbelow_, dgain_,
    ) = _arguments(name)  # fmt: skip

    def backward(job: int, first: int, last: int, part: int) -> int:
        n, time, rows = word(job, _N), word(job, _TIME), word(job, _ROWS)
        width = n * size
        gain, totals = word(job, gain_), word(job, dgain_) + 40 * n * part
        for i in range(first, last):
            index = time * rows + i
            row, saved = word(job, a_) + 4 * index * width, word(job, saved_) + 5 * index * width
            input_, forget, output = (
                view(saved, n, like),
                view(saved + width, n, like),
                view(saved + 2 * width, n, like),
            )
            g, activated = view(saved + 3 * width, n, like), view(saved + 4 * width, n, like)
            c, inverse = piece(job, cells_before_, index * n, n), view(word(job, inverse_) + 16 * index, 2, 0.0)
            dstates, dcells = piece(job, dstates_, index * n, n), piece(job, dcells_, index * n, n)
            dh, dc = piece(job, dh_, i * n, n), piece(job, dc_, i * n, n)
            for j in range(n):
                dh[j] += dstates[j]
            for j in range(n):
                dc[j] += dcells[j]
            m = 1.0
            if word(job, mask_):
                m = load(piece(job, mask_, index, 1)[0])
            at_below = word(job, dbelow_) + 4 * index * width
            dinput, dforget = view(at_below, n, like), view(at_below + width, n, like)
            doutput, dg = view(at_below + 2 * width, n, like), view(at_below + 3 * width, n, like)
            for j in range(n):
                doutput[j] = m * dh[j] * activated[j] * output[j] * (1 - load(output[j]))
            for j in range(n):  # for now the gradient of the normalised cell
                dg[j] = m * dh[j] * output[j] * (1 - load(activated[j]) * activated[j])
            if word(job, _SECOND):
                cell = word(job, cells_) + index * width
                pull_back(
                    at_below + 3 * width, cell, gain + 4 * width, totals + 32 * n, n, word(job, _SECOND), inverse[1]
                )
            for j in range(n):
                dc[j] += dg[j]
            for j in range(n):
                dinput[j] = m * dc[j] * g[j] * input_[j] * (1 - load(input_[j]))
            for j in range(n):
                dforget[j] = m * dc[j] * c[j] * forget[j] * (1 - load(forget[j]))
            for j in range(n):
                dg[j] = m * dc[j] * input_[j] * (1 - load(g[j]) * g[j])
            for j in range(n):
                dc[j] = (1 - m) * dc[j] + m * dc[j] * forget[j]
            for j in range(n):
                dh[j] = (1 - m) * dh[j]
            da_at = word(job, da_) + 4 * index * width
            da, dbelow = view(da_at, 4 * n, like), view(at_below, 4 * n, like)
            for j in range(4 * n):
                da[j] = dbelow[j]
            if word(job, _FIRST):
                pull_back(da_at, row, gain, totals, 4 * n, word(job, _FIRST), inverse[0])
        return 0

    return backward


def _norm(name: str, x: str) -> Any:
    """Norms alone: what stands between two cells."""
    (_, _, inverse_rms, pull_back), piece = _arithmetic(x), _piece(x)
    load, size = LOAD[x], np.dtype(STORAGE[x]).itemsize
    if name == "norm_forward":
        a_, y_, inverse_, gain_, left_, right_ = _arguments(name)

        def forward(job: int, first: int, last: int, _: int) -> int:
            n, right, eps = word(job, left_), word(job, right_), bits(word(job, _EPS))
            gain, other_gain = piece(job, gain_, 0, n), piece(job, gain_, n, right)
            for i in range(first, last):
                index = word(job, _TIME) * word(job, _ROWS) + i
                start = index * (n + right)
                a, b = piece(job, a_, start, n), piece(job, a_, start + n, right)
                y, z = piece(job, y_, start, n), piece(job, y_, start + n, right)
                inverse = view(word(job, inverse_) + 16 * index, 2, 0.0)
                factor, other = inverse_rms(a, word(job, _FIRST), eps), 1.0
                for j in range(n):
                    y[j] = load(a[j]) * factor * gain[j]
                if right:
                    other = inverse_rms(b, word(job, _SECOND), eps)
                for j in range(right):
                    z[j] = load(b[j]) * other * other_gain[j]
                inverse[0], inverse[1] = factor, other
            return 0

        return forward
    a_, v_, inverse_, gain_, left_, right_, dgain_ = _arguments(name)

    def backward(job: int, first: int, last: int, part: int) -> int:
        n, right, gain = word(job, left_), word(job, right_), word(job, gain_)
        totals = word(job, dgain_) + 8 * (n + right) * part
        for i in range(first, last):
            index = word(job, _TIME) * word(job, _ROWS) + i
            start = index * (n + right) * size
            inverse, v = view(word(job, inverse_) + 16 * index, 2, 0.0), word(job, v_) + start
            row = word(job, a_) + start
            if word(job, _FIRST):
                pull_back(v, row, gain, totals, n, word(job, _FIRST), inverse[0])
                if right:
                    v, row = v + n * size, row + n * size
                    pull_back(v, row, gain + n * size, totals + 8 * n, right, word(job, _SECOND), inverse[1])
        return 0

    return backward
