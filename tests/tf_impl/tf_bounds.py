"""Results of one call within the bounds of the parity kit."""

from __future__ import annotations

from typing import Any

import numpy as np

from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.engines import prepare
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import derive

TINY = np.finfo(np.float32).tiny  # TensorFlow's own operations take what is below as 0


def check_bounds(
    got: dict[str, Any], x: np.ndarray, scale: Any = None, bias: Any = None, *, dy: Any = None, variant: Any,
    out_dtype: Any = None, **options: Any,
) -> None:  # fmt: skip
    """``got`` has some of y, inverse_rms, dx, dscale and dbias. The other arguments are those of rms_norm."""
    variant = derive("test", variant, options.pop("eps", None), options.pop("partial", None))
    some = x if dy is None else dy
    y, *_, inverse_rms = golden.rms_norm(
        x, scale, bias, variant=variant, out_dtype=out_dtype, return_inverse_rms=True, **options
    )
    want = {"y": y, "inverse_rms": inverse_rms}
    if dy is not None:
        gradients = golden.rms_norm_vjp(dy, x, scale, bias, variant=variant, **options)
        want |= dict(zip(("dx", "dscale", "dbias"), gradients, strict=False))
    terms = term_sizes(x, scale, bias, dy=some, tangents=(x, None, None), variant=variant, **options)
    axes = {name: options[name] for name in ("axis", "feature_axis") if name in options}
    key = variant, None, None, axes.get("axis", -1), axes.get("feature_axis"), out_dtype
    arrays = [options.get(name) for name in ("mask", "residual", "gate")]
    call = prepare("rms_norm", key, x, scale, bias, *arrays).call
    for quantity, value in got.items():
        value, expected = np.asarray(value), want[quantity]
        assert (value.dtype, value.shape) == (expected.dtype, expected.shape), quantity
        dtype = expected.dtype.name
        limit = bound(quantity, call, dtype, residual=options.get("residual") is not None)
        error = limit * dtypes.unit_roundoff(dtype) * terms[quantity] + max(TINY, dtypes.smallest_subnormal(dtype))
        value, expected = value.astype(np.float64), expected.astype(np.float64)
        same = (value == expected) | (np.isnan(value) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            near = same | (np.abs(value - expected) <= error)
        assert near.all(), (quantity, dtype, value[~near], expected[~near])
