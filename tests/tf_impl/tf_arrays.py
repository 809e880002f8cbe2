"""Arrays of NumPy as tensors of TensorFlow, ways to derivatives, and results within the bounds of the judge."""

from __future__ import annotations

from typing import Any

import calls
import numpy as np
import tensorflow as tf

from rmsnorm.tf_impl import rms_norm

TINY = float(np.finfo(np.float32).tiny)  # TensorFlow's own operations take what is below as 0


def check_bounds(got: dict[str, Any], x: Any, scale: Any = None, bias: Any = None, **options: Any) -> None:
    """``got`` has some of y, inverse_rms, dx, dscale and dbias; the options are those of rms_norm, and dy."""
    calls.hold({name: np.asarray(value) for name, value in got.items()}, x, scale, bias, least=TINY, **options)


def with_gradients(x: Any, dy: Any, *parameters: Any, **options: Any) -> list[Any]:
    """y of rms_norm, and the gradients of x and the parameters."""
    leaves = [x, *parameters]
    with tf.GradientTape() as tape:
        tape.watch(leaves)
        y = rms_norm(*leaves, **options)
    return [y, *tape.gradient(y, leaves, dy)]
