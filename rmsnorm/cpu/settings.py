"""The record of numbers that compiled code has of a call, in place of Python's Call, and the words of a job."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Final

import numpy as np

from rmsnorm.call import Call

STORAGE: Final[dict[str, type]] = {
    "float16": np.int16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}
CODE: Final[dict[str | None, int]] = {None: 0, **{name: code for code, name in enumerate(STORAGE, 1)}}
F16, BF16, F32, F64 = (CODE[name] for name in STORAGE)

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
        ("product", np.int64),  # the code of the format to which the products with the gain are then rounded
        ("scale", np.int64),  # the code of the format of scale
        ("bias", np.int64),
        ("x_bytes", np.int64),  # of an element
        ("y_bytes", np.int64),
        ("prefetch", np.int64),  # 1: the statistic of the next row is computed before y of this row, else 0
        ("single", np.bool_),  # whether float32 arithmetic may be enough, see bfloat16.py
        ("groups", np.int64),  # of n elements in a row of the parameters, each with a statistic of its own
    ],
    align=True,
)

RECORD: Final = SETTINGS.itemsize  # bytes

# The caller's arguments of a kernel, each a word: an address (0 if there is no such array) or a step in bytes. The
# steps lead to the next row of x, h, the mask or the gate; ``mask_stride`` leads to the next element.
FORWARD: Final = (
    "x", "x_step", "residual", "scale", "bias", "mask", "mask_step", "mask_stride", "y", "h", "inverse_rms", "gate",
    "gate_step",
)  # fmt: skip
BACKWARD: Final = (
    "h", "h_step", "scale", "mask", "mask_step", "mask_stride", "inverse_rms", "dy", "dh", "dx", "dscale", "dbias",
    "gate", "gate_step", "dgate", "bias",
)  # fmt: skip

# The parts of a call for which a kernel is compiled anew, so that other calls have a smaller kernel: a mask, or the
# variance as statistic; a residual, in the backward pass dh; a bias, in the backward pass only with a gate after the
# norm. Kernels with a mask are slower, and compute calls with a residual, too.
OPTIONS: Final = ("mask", "other", "bias")

# A gate is an option, too: its function, whether it comes before the norm or after it, and the format of z.
GATES: Final = tuple(map("-".join, product(("silu", "sigmoid"), ("before", "after"), tuple(STORAGE)[:3])))

# A table of addresses, in words, through which compiled functions call each other: what is in tasks.py; what starts
# XLA's threads, and two messages; what adds o to the gains; what moves a parameter of the format of each code; what
# computes a row again that cancels, for formats of x and y; kernels.
COMPUTE, WORK, SPREAD, NO_MEMORY, NO_KERNEL, OFFSET, PARAMETERS = range(7)
TABLE: Final = "rmsnorm_table"  # its name in compiled code
_CANCELLED: Final = PARAMETERS + 1 + len(STORAGE)
KERNELS: Final = _CANCELLED + len(STORAGE) ** 2


def cancelled_place(x: str, y: str) -> int:
    """The place in the table of what computes a row of such formats again."""
    return _CANCELLED + (CODE[x] - 1) * len(STORAGE) + CODE[y] - 1


# A job, in words: what to compute, on how many threads, and the function that starts them, or 0; the arguments of the
# kernel; the gains and biases, and the sums of the parameters' gradients; the chunks that were taken, and whether
# memory was short; for xla_handler.py, XLA's call, the threads that work on it now and those that left it.
KERNEL, KIND, SETTINGS_OF, ROWS, STEP, THREADS, PARALLEL, ARGUMENTS = range(8)
PREPARED, SUMS, NEXT, FAILED, FRAME, BUSY, LEFT, JOB = (ARGUMENTS + len(BACKWARD) + i for i in range(8))

# The attribute of a call of XLA, in words: the kernel's place in the table, its kind, rows, rows of a chunk, threads;
# two words for each argument of the kernel, which are what it is, and its value, or the index of the operand or result
# whose address it is; and the settings.
INDEX, IS_BACKWARD, ROW_COUNT, ROW_STEP, THREAD_COUNT, SOURCES = range(6)
NUMBER, OPERAND, RESULT = range(3)


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
        "product": CODE[call.product],
        "scale": CODE[scale],
        "bias": CODE[bias],
        "prefetch": call.gate is None and (n <= _NARROW or (n <= 8 * _NARROW and rows * n <= _CACHED)),
        "x_bytes": np.dtype(STORAGE[call.x]).itemsize,
        "y_bytes": np.dtype(STORAGE[call.result]).itemsize,
        "single": bias is None and may_use_float32(call.x, call.result, call.norm),
        "groups": math.prod(call.shape[axis] for axis in call.feature_axes) // n,
    }
    record = np.zeros(1, SETTINGS)
    for name, value in values.items():
        record[name] = value
    return record


def may_use_float32(x: str, y: str, norm: str | None) -> bool:
    """Whether a row of y may be computed in float32: where what is rounded first, h / rho or y, becomes bfloat16."""
    return x in ("bfloat16", "float32") and y in ("bfloat16", "float32") and (norm or y) == "bfloat16"
