"""The arrays of one measurement, the right results for them, and the comparison of a candidate's results with these.

y and dx are compared with the golden on a sample of rows, because no row depends on another. dscale depends on all rows
and is compared with float64 sums; this is why float64 is not among the dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import numpy.typing as npt

from rmsnorm.accuracy.bounds import bound, error_of
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp
from rmsnorm.specification import dtypes, errors
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Variant

Array = npt.NDArray[Any]
DTYPES: Final = ("float16", "bfloat16", "float32")
OPS: Final = {"fwd": ("y",), "fwd+bwd": ("y", "dx", "dscale")}
_SAMPLE: Final = 2**18  # elements


@dataclass(frozen=True)
class Accuracy:
    """For every result: the share of elements that are right bit for bit, and the largest distance in ulps."""

    bits: Mapping[str, float]
    max_ulp: Mapping[str, float]
    wrong: str = ""


@dataclass(frozen=True)
class Problem:
    """Rows of different norm, a gain about 1, and the gradient of a loss with respect to y."""

    x: Array
    scale: Array
    dy: Array

    @property
    def dtype(self) -> str:
        return self.x.dtype.name

    def moved(self, op: str) -> int:
        """Bytes that must be read and written: x and y; with the backward pass x, dy and dx in addition."""
        return self.x.nbytes * {"fwd": 2, "fwd+bwd": 5}[op]

    @cached_property
    def rows(self) -> npt.NDArray[np.intp]:
        """The rows that are compared: all if they are few, otherwise a sample with the first and the last."""
        count, width = self.x.size // self.x.shape[-1], self.x.shape[-1]
        chosen = np.random.default_rng(1).choice(count, min(count, max(2, _SAMPLE // width)), replace=False)
        return np.union1d(chosen, [0, count - 1])

    def sample(self, array: Array) -> Array:
        return array.reshape(-1, array.shape[-1])[self.rows]

    @cached_property
    def _right_results(self) -> dict[tuple[Variant, str], tuple[Array, Array]]:
        return {}

    def right_result(self, variant: Variant, quantity: str) -> tuple[Array, Array]:
        """The right result, for y and dx in the sampled rows, and the sums of the absolute values of its terms."""
        if (variant, quantity) not in self._right_results:
            x, dy = self.sample(self.x), self.sample(self.dy)
            if quantity == "dscale":
                right, unit = self._dscale(variant)
                right = right.astype(self.scale.dtype)
            else:
                if quantity == "y":
                    right = rms_norm(x, self.scale, variant=variant)
                else:
                    right, *_ = rms_norm_vjp(dy, x, self.scale, variant=variant)
                unit = term_sizes(x, self.scale, dy=dy, tangents=(None, None, None), variant=variant)[quantity]
            self._right_results[variant, quantity] = right, unit
        return self._right_results[variant, quantity]

    def _dscale(self, variant: Variant) -> tuple[Array, Array]:
        x, dy = (array.reshape(-1, array.shape[-1]) for array in (self.x, self.dy))
        n, eps = x.shape[-1], variant.eps_for(self.dtype)
        k = variant.counted(n)
        sums = np.zeros((2, n))
        for first in range(0, len(x), max(1, _SAMPLE // n)):
            block = slice(first, first + max(1, _SAMPLE // n))
            h = x[block].astype(np.float64)
            root = np.sqrt(np.square(h[:, :k]).mean(axis=-1, keepdims=True))
            rho = {"inside": np.hypot(root, math.sqrt(eps)), "outside": root + eps,
                   "clamp": np.maximum(root, eps / math.sqrt(k))}[variant.eps_position]  # fmt: skip
            terms = dy[block].astype(np.float64) * h / rho
            sums += terms.sum(axis=0), np.abs(terms).sum(axis=0)
        return sums[0], sums[1]

    def judge(self, results: Mapping[str, Array], variant: Variant) -> Accuracy:
        """Compare results with the right ones. They are wrong beyond the parity kit's bounds (accuracy/bounds.py)."""
        spec = [Spec(array.shape, self.dtype) for array in (self.x, self.scale)]
        call = resolve("bench", *spec, variant=variant)
        bits, worst, wrong = {}, {}, []
        for name, got in results.items():
            shape, dtype = {
                "y": (self.x.shape, call.result_dtype),
                "dx": (self.x.shape, self.dtype),
                "dscale": (self.scale.shape, self.dtype),
            }[name]
            if (got.shape, got.dtype.name) != (shape, dtype):
                description, wanted = errors.describe(got.shape, got.dtype.name), errors.describe(shape, dtype)
                return Accuracy({}, {}, f"{name} is {description}, expected {wanted}")
            want, unit = self.right_result(variant, name)
            got = got if name == "dscale" else self.sample(got)
            limit = bound(name, call, dtype)
            distances = ulps(got, want)
            with np.errstate(all="ignore"):
                floor = dtypes.smallest_subnormal(dtype) / 2
                distance = np.abs(got.astype(np.float64) - want.astype(np.float64))
                ratio = distance / np.maximum(unit * dtypes.unit_roundoff(dtype), floor)
            bits[name], worst[name] = float(np.mean(distances == 0)), float(distances.max(initial=0.0))
            largest = float(np.max(ratio, initial=0.0))
            if not largest <= limit:
                wrong.append(f"{name} has parity ratio {largest:.3g}, expected at most {limit:.3g}")
            # In 16 bits an error carries a value across the border of two roundings as often as it is wide.
            carried = error_of(name, call) / dtypes.unit_roundoff(dtype) / 2
            if name == "y" and dtype in dtypes.HALF and np.sum(distances != 0) > 3 + carried * want.size:
                wrong.append(f"{name} is right in {bits[name]:.2%} of the bits, expected {1 - carried:.2%}")
        return Accuracy(bits, worst, "; ".join(wrong))


def make(shape: Sequence[int], dtype: str, seed: int = 0) -> Problem:
    """Draw the arrays of a measurement.

    >>> problem = make((4, 64), "bfloat16")
    >>> problem.moved("fwd") // problem.x.nbytes, problem.moved("fwd+bwd") // problem.x.nbytes
    (2, 5)
    """
    random = np.random.default_rng(seed)
    x, dy = (random.standard_normal(tuple(shape), np.float32) for _ in range(2))
    x *= 10.0 ** random.uniform(-1.0, 1.0, (*shape[:-1], 1)).astype(np.float32)
    scale = 1 + random.standard_normal(shape[-1], np.float32) / 8
    return Problem(*(array.astype(dtype) for array in (x, scale, dy)))
