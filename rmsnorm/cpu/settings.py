"""What compiled code knows of a call: a record of numbers, in place of Python's Call."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.call import Call
from rmsnorm.cpu.formats import CODE, STORAGE

_NARROW: Final = 2**8  # elements: computing on such a row takes no longer than a square root
_CACHED: Final = 2**20  # elements: a larger x does not stay in cache, and the kernel waits for memory alone

INSIDE, OUTSIDE, CLAMP = range(3)
SETTINGS: Final = np.dtype(
    [
        ("n", np.int64),  # elements of a row
        ("k", np.int64),  # of these, how many from the first enter the statistic
        ("position", np.int64),  # of eps: INSIDE, OUTSIDE or CLAMP
        ("eps", np.float64),
        ("offset", np.float64),  # o of the gain o + scale
        ("variance", np.bool_),  # whether the statistic subtracts the mean
        ("before_scale", np.bool_),  # whether h / rho is rounded before the gain
        ("norm", np.int64),  # the code of the format to which h / rho is rounded
        ("product", np.int64),  # likewise for the products with the gain
        ("scale", np.int64),  # the code of the format of scale
        ("bias", np.int64),
        ("x_bytes", np.int64),  # of an element
        ("y_bytes", np.int64),
        ("prefetch", np.int64),  # 1: the statistic of the next row is computed before y of this row, else 0
        ("single", np.bool_),  # whether float32 arithmetic may be enough, see bfloat16.py
    ],
    align=True,
)


def settings_of(call: Call, rows: int, scale: str | None, bias: str | None) -> np.ndarray:
    """The settings of a call on so many rows, with parameters of these dtypes; one record."""
    n = call.n
    values: dict[str, Any] = {
        "n": n,
        "k": call.k,
        "position": ("inside", "outside", "clamp").index(call.variant.eps_position),
        "eps": call.eps,
        "offset": call.variant.scale_offset,
        "variance": call.variant.statistic == "variance",
        "before_scale": call.norm is not None,
        "norm": CODE[call.norm],
        "product": CODE[call.product],
        "scale": CODE[scale],
        "bias": CODE[bias],
        "prefetch": n <= _NARROW or (n <= 8 * _NARROW and rows * n <= _CACHED),
        "x_bytes": np.dtype(STORAGE[call.x]).itemsize,
        "y_bytes": np.dtype(STORAGE[call.result]).itemsize,
        "single": _may_use_float32(call, bias),
    }
    record = np.zeros(1, SETTINGS)
    for name, value in values.items():
        record[name] = value
    return record


def _may_use_float32(call: Call, bias: str | None) -> bool:
    if call.x != "bfloat16" or bias is not None:
        return False
    if call.norm is None:
        return call.result == "bfloat16"
    rounds = call.norm == "bfloat16" and call.product in ("bfloat16", "float32")
    return rounds and call.result in ("bfloat16", call.product)
