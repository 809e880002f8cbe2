"""How near the golden tensors of PyTorch have to be."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch_arrays import to_numpy

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps


def check_values(got: Any, want: Any, most: int | None = None, share: float = 0.999) -> None:
    """16 bits: float64 rounded once, another number than the golden's only next to a tie. 32 bits: likewise, but where
    a / rho is rounded before the scale a tie may move y by two. 64 bits: two ulps, what is carried along makes it none.
    """
    apart = ulps(to_numpy(got), want)
    assert apart.max(initial=0) <= (most if most is not None else 1 if want.dtype.itemsize == 2 else 2)
    assert (apart == 0).sum() >= share * apart.size


def check_gradient(got: Any, want: Any, terms: Any, count: int) -> None:
    """One ulp of the dtype, and what float64 rounds: an operation or addition each 2^-53 of the terms' absolute sum."""
    got = to_numpy(got)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    u, tiny = dtypes.unit_roundoff(want.dtype.name), dtypes.smallest_subnormal(want.dtype.name)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        near = np.abs(got - want) <= 2 * u * np.abs(want) + tiny + count * 2.0**-53 * terms
    assert (same | near).all()


def magnitudes_of_terms(x: Any, scale: Any, dy: Any, variant: Any, options: dict[str, Any]) -> Any:
    """The sums of absolute values of the terms of dx, dscale and dbias (from the equations, in float64)."""
    if (residual := options.get("residual")) is not None:
        x = golden.rms_norm(x, residual=residual)[1]
    kept = {name: options[name] for name in ("axis", "mask", "partial") if name in options}
    chosen = rmsnorm.Variant.get(variant)
    axis = options.get("axis", -1)
    axes = tuple(a % 4 for a in (axis if isinstance(axis, tuple) else (axis,)))
    _, inverse = golden.rms_norm(x.astype(np.float64), variant=chosen, return_inverse_rms=True, **kept)
    mask = np.broadcast_to(options.get("mask", True), x.shape)
    a = np.where(mask, np.abs(x.astype(np.float64)), 0.0)
    v = np.where(mask, np.abs(dy.astype(np.float64)), 0.0)
    feature = options.get("feature_axis", axis)
    features = tuple(f % 4 for f in (feature if isinstance(feature, tuple) else (feature,)))
    gain = np.abs(chosen.scale_offset + scale.astype(np.float64))
    gain = gain.reshape([size if i in features else 1 for i, size in enumerate(x.shape)])
    normalised = a * inverse
    if chosen.statistic == "variance":
        normalised = normalised + normalised.sum(axes, keepdims=True)
    k = max(1, chosen.replace(partial=options.get("partial")).counted(int(np.prod([x.shape[i] for i in axes]))) // 4)
    slope = 1.0
    if chosen.eps_position == "outside":
        slope = 1 / np.maximum(1 - chosen.eps * inverse, 2.0**-52)
    u = v * gain
    dx = inverse * (u + normalised * slope * (u * normalised).sum(axes, keepdims=True) / k)
    shared = tuple(i for i in range(4) if i not in features)
    return dx, (v * normalised).sum(shared), v.sum(shared)
