"""Norms of NumPy, each once. torch_zoo.py has those of PyTorch, test_zoo.py what is said of them."""

from __future__ import annotations

from typing import Any

import numpy as np


def rows(x: Any, eps: float = 1e-6) -> Any:
    """x / rho, in the dtype of x."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(eps))


def standard(x: Any, weight: Any) -> Any:
    """In float64, with one rounding."""
    return (rows(x.astype(np.float64)) * weight.astype(np.float64)).astype(x.dtype)


def in_float32(x: Any, weight: Any) -> Any:
    """As a kernel that multiplies by 1 / rho."""
    wide = x.astype(np.float32)
    inverse = np.float32(1) / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(1e-6))
    return (wide * inverse * weight.astype(np.float32)).astype(x.dtype)


def llama(x: Any, weight: Any) -> Any:
    """With a rounding before the gain, and the wider dtype of the two."""
    normalised = rows(x.astype(np.float64)).astype(x.dtype).astype(np.float64)
    promoted = x.dtype if x.dtype == weight.dtype else np.promote_types(x.dtype, weight.dtype)
    return (normalised * weight.astype(np.float64)).astype(promoted)


def only_float32(x: Any, weight: Any) -> Any:
    if x.dtype != np.float32:
        raise TypeError("float32, please")
    return rows(x, 1e-5) * weight


def truncated(exact: Any, dtype: Any) -> Any:
    """float64 numbers, rounded towards zero."""
    near = exact.astype(dtype)
    bits = near.view(f"u{near.dtype.itemsize}")
    return (bits - (np.abs(near.astype(np.float64)) > np.abs(exact)).astype(bits.dtype)).view(near.dtype)


def no_gain(x: Any) -> Any:
    return rows(x.astype(np.float64)).astype(x.dtype)


def options(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None, **wrong: bool) -> Any:
    """With each option that `check` passes; ``wrong`` is for ``masked``."""
    h = x if residual is None else x + residual
    y = masked(h, weight, mask, **wrong)
    if gate is not None:
        z = gate.astype(np.float64)
        y = y * z / (1 + np.exp(-z))
    return y.astype(x.dtype) if residual is None else (y.astype(x.dtype), h)


def masked(h: Any, weight: Any, mask: Any, eps_outside: bool = False, of_all: bool = False) -> Any:
    """In float64; ``of_all`` divides by n in place of the number of elements that count."""
    wide = h.astype(np.float64)
    counted = np.broadcast_to(True if mask is None else mask, h.shape)
    count = np.maximum(h.shape[-1] if of_all else counted.sum(-1, keepdims=True), 1)
    q = np.where(counted, wide * wide, 0.0).sum(-1, keepdims=True) / count
    return wide / (np.sqrt(q) + 1e-6 if eps_outside else np.sqrt(q + 1e-6)) * weight.astype(np.float64)


# Those that are wrong


def where_masked(**wrong: bool) -> Any:
    return lambda x, weight, mask=None: options(x, weight, mask, **(wrong if mask is not None else {}))


def no_mask_beside_residual(x: Any, weight: Any, mask: Any = None, residual: Any = None) -> Any:
    return options(x, weight, mask if residual is None else None, residual)


def no_gate_beside_mask(x: Any, weight: Any, mask: Any = None, gate: Any = None) -> Any:
    return options(x, weight, mask, None, gate if mask is None else None)


def two_of_three(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None) -> Any:
    """No mask beside both of the others."""
    every = not any(option is None for option in (mask, residual, gate))
    return options(x, weight, None if every else mask, residual, gate)


def one_column_without_a_gate(x: Any, weight: Any, gate: Any = None) -> Any:
    y = options(x, weight, gate=gate)
    return y if gate is not None else y[..., :1]


def dense(array: Any) -> Any:
    """What a kernel reads that ignores strides."""
    strides = np.empty(array.shape, array.dtype).strides
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def dense_mask(x: Any, weight: Any, mask: Any = None) -> Any:
    return options(x, weight, mask if mask is None else dense(mask))


def another_sum(second: Any) -> Any:
    """What is returned beside y is ``second`` of x and x + residual."""

    def norm(x: Any, weight: Any, residual: Any = None) -> Any:
        y = options(x, weight, residual=residual)
        return y if residual is None else (y[0], second(x, y[1]))

    return norm


def over_n_minus_1(x: Any, weight: Any, offset: float = 0.0) -> Any:
    wide = x.astype(np.float64)
    q = (wide * wide).sum(-1, keepdims=True) / max(1, x.shape[-1] - 1)
    return (wide / np.sqrt(q + 1e-6) * (offset + weight.astype(np.float64))).astype(x.dtype)


def inverse_in_16_bits(x: Any, weight: Any) -> Any:
    """1 / rho, of float16."""
    wide = x.astype(np.float64)
    inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    inverse = inverse.astype(np.float16).astype(np.float64) if x.dtype == np.float16 else inverse
    return (wide * inverse * weight.astype(np.float64)).astype(x.dtype)


def halves(x: Any, weight: Any) -> Any:
    """Each half of an even row by itself."""
    n = x.shape[-1] // 2 if x.shape[-1] % 2 == 0 else x.shape[-1]
    parts = x.astype(np.float64).reshape(*x.shape[:-1], -1 if x.size else 1, n)
    return (rows(parts).reshape(x.shape) * weight.astype(np.float64)).astype(x.dtype)


def doubled_after(first: int) -> Any:
    """The mistake starts with a later call."""
    calls: list[int] = []

    def norm(x: Any, weight: Any) -> Any:
        calls.append(1)
        return llama(x, weight) * (2 if len(calls) > first else 1)

    return norm


def out_of_luck(x: Any, weight: Any) -> Any:
    raise RuntimeError("out of luck")


def in_place(x: Any, weight: Any) -> Any:
    y = llama(x, weight)
    x[...] = 0
    return y


def where(condition: Any, change: Any) -> Any:
    """What a change makes of y where a condition on x holds."""

    def norm(x: Any, weight: Any) -> Any:
        y = standard(x, weight)
        return change(y) if condition(x) else y

    return norm


def of_blocks_of_8(x: Any, weight: Any) -> Any:
    """The rest of a row is 0."""
    end = x.shape[-1] - x.shape[-1] % 8
    return np.concatenate([standard(x, weight)[..., :end], 0 * x[..., end:]], axis=-1)


def statistic_of_blocks_of_8(x: Any, weight: Any) -> Any:
    wide, end = x.astype(np.float64), x.shape[-1] - x.shape[-1] % 8
    if not end:
        return standard(x, weight)
    inverse = 1 / np.sqrt((wide[..., :end] ** 2).mean(-1, keepdims=True) + 1e-6)
    return (wide * inverse * weight.astype(np.float64)).astype(x.dtype)


def of_1024_columns(x: Any, weight: Any) -> Any:
    return np.concatenate([standard(x, weight)[..., :1024], x[..., 1024:]], axis=-1)


def of_1024_rows(x: Any, weight: Any) -> Any:
    y = standard(x, weight)
    return np.concatenate([y[:1024], 0 * y[1024:]]) if x.ndim == 2 else y
