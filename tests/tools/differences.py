"""The golden's derivatives against differences of the golden itself: the only check that needs no other formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rmsnorm.accuracy.bounds import STEP
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.parity.cases import Data
from rmsnorm.parity.comparison import Comparison
from rmsnorm.specification import dtypes


def differences(data: Data) -> list[Comparison]:
    """Compare jvp with a central difference of y, and the gradients with jvp by <dy, J t> = <J^T dy, t>.

    Along t with |t_i| <= |x_i| / 2, (y(x + h t) - y(x - h t)) / 2h misses the derivative by h^2 / 6 times the third
    derivative, and that is at most 4 times the terms of y and of its tangent together: each derivative of 1 / rho along
    t brings a factor of at most 1/2 times 1, 3, 15, and each of x at most 1/2. Rounding x + h t and y costs 4 u / h of
    them. The inner products are sums of N terms: sqrt(N) + 4 roundings each.

    Returns:
        Verdicts on float64 ``jvp`` and ``dx`` (all gradients together), or none where the case does not allow it.
    """
    x = data.x
    smooth = data.case.data in ("rows", "constant") and data.variant.rounding != "before_scale" and x.size
    if x.dtype != np.float64 or data.residual is not None or data.out_dtype or not smooth:
        return []
    u = dtypes.unit_roundoff("float64")
    options: dict[str, Any] = {**data.options, **data.arrays}
    primals: tuple[Any, ...] = (x, *map(_wide, (data.scale, data.bias)))
    directions = (data.tangents[0], *map(_wide, data.tangents[1:]))
    tangents: tuple[Any, ...] = (x * np.random.default_rng(0).uniform(-0.5, 0.5, x.shape), *directions[1:])

    def moved(step: float) -> Any:
        return rms_norm(
            *(None if p is None else p + step * t for p, t in zip(primals, tangents, strict=True)), **options
        )

    unmasked = np.broadcast_to(True if data.mask is None else data.mask, x.shape)
    along = rms_norm_jvp(primals, tangents, **options)
    unit = term_sizes(*primals, dy=data.dy, tangents=tangents, **options)
    size = unit["y"] + unit["jvp"]
    error = np.where(unmasked, np.abs((moved(STEP) - moved(-STEP)) / (2 * STEP) - along), 0.0)
    ratio = float(np.max(error / np.where(size > 0, size, 1.0)) / u)
    step = _comparison("jvp", ratio, 4 / 6 * STEP**2 / u + 4 / STEP + 2)

    jvp = rms_norm_jvp(primals, directions, **options)
    unit = term_sizes(*primals, dy=data.dy, tangents=directions, **options)
    dy = np.where(unmasked, data.dy, 0.0)
    gradients = rms_norm_vjp(dy, *primals, **options)
    products = [
        (np.where(unmasked, g, 0.0) if i == 0 else g) * (np.where(unmasked, t, 0.0) if i == 0 else t)
        for i, (g, t) in enumerate(zip(gradients, directions, strict=False))  # the gate is constant
        if g is not None and t is not None
    ]
    whole = sum(float(np.sum(terms)) for terms in products)
    scale = float(np.sum(np.abs(dy) * np.where(unmasked, unit["jvp"], 0.0)))
    ratio = abs(float(np.sum(dy * jvp)) - whole) / (scale * u)
    return [step, _comparison("dx", ratio, 2 * (math.sqrt(x.size) + 4))]


def _wide(array: Any) -> Any:
    """A parameter in float64, as a step is lost in fewer bits."""
    return None if array is None else array.astype(np.float64)


def _comparison(quantity: str, ratio: float, bound: float) -> Comparison:
    passed = ratio <= bound
    return Comparison(quantity, ratio, bound, 0.0, math.inf, passed, "" if passed else "differences disagree")
