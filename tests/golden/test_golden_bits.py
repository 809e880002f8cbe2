"""The golden has the same bits on every processor: one hash of its results, whatever vector instructions NumPy uses.

Its inputs are made of integers alone: exponentials and logarithms differ between processors, so that there is no gate.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rmsnorm import PRESETS
from rmsnorm.numpy_impl import rms_norm, rms_norm_jvp, rms_norm_vjp
from rmsnorm.specification import dtypes

DIGEST = "a00977a6ddfb0a8251e53287e30cdb00cb9e82664bec83f7e4583a6b7f67df69"
SOME = ("standard", "zhang_torch", "x_transformers")  # one for each eps_position
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"partial": 0.3}, {"axis": (0, -1), "feature_axis": -1}, {"eps": 0.0})


def values(random: np.random.Generator, *shape: int) -> Any:
    """Integers of 20 bits times powers of two from 2^-24 to 2^-16."""
    powers = random.integers(-24, -16, (*shape[:-1], 1))
    return np.ldexp(random.integers(-(2**20), 2**20, shape).astype(np.float64), powers)


def digest() -> str:
    """Of y, 1 / rho, the gradients and the tangent of y, for every variant and dtype, and some options."""
    total, random = hashlib.sha256(), np.random.default_rng(0)
    for dtype in dtypes.FLOATS:
        x, dy, residual, t = (values(random, 16, 67).astype(dtype) for _ in range(4))
        gain, bias = (values(random, 67).astype(dtype) for _ in range(2))
        mask = random.integers(0, 3, x.shape) > 0
        for variant in PRESETS:
            for options in (*OPTIONS, {"mask": mask}) if variant in SOME else ({},):
                results = rms_norm(x, gain, bias, variant=variant, return_inverse_rms=True, **options)
                results += rms_norm_vjp(dy, x, gain, bias, variant=variant, **options)
                tangent = rms_norm_jvp((x, gain, bias), (t, gain, bias), variant=variant, **options)
                added = () if "mask" in options else rms_norm(x, gain, variant=variant, residual=residual, **options)
                for array in (*results, tangent, *added):
                    if array is not None:
                        number = np.where(array == array, array, np.array(np.nan, array.dtype))  # NaN has one sign
                        total.update(f"{variant} {array.dtype} {array.shape}".encode() + number.tobytes())
    return total.hexdigest()


def test_its_bits_are_those_of_every_machine() -> None:
    assert digest() == DIGEST
