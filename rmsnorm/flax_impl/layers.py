"""RMSNorm as a Flax NNX module, a drop-in for flax.nnx.RMSNorm in every variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax import numpy as jnp
from jax.nn import initializers

from rmsnorm.call import Axis
from rmsnorm.flax_impl.arithmetic import Across
from rmsnorm.flax_impl.functional import rms_norm, rms_norm_across
from rmsnorm.variants import Variant, derive


class RMSNorm(nnx.RMSNorm):
    """Root mean square layer normalization.

        y = a / rho * (o + scale) + bias,    a = x + residual,    rho = sqrt(mean(a_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant. It is a flax.nnx.RMSNorm
    and takes its arguments; the statistic is float64 whatever ``dtype`` says, and weighted where it goes over devices.

    Args:
        num_features: number of parameters, the product of the sizes of the feature axes.
        epsilon: a number >= 0; None for the variant's.
        dtype: of y; None for the variant's rule, which for ``flax`` is promote(x, scale).
        param_dtype: of the parameters.
        use_scale: whether there is a gain; without it the factor is 1.
        scale_init: None for 1 - o, so that the factor is 1 at first.
        reduction_axes: normalised axis or axes.
        feature_axes: axis or axes of the parameters.
        axis_name: mapped axis, or axes, over whose devices rows are spread: the mean is that of all counted elements.
        axis_index_groups: groups of indices within that axis, each with a mean of its own.
        use_fast_variance: taken and, as in flax.nnx.RMSNorm, without effect.
        promote_dtype: maps (x, scale) and ``dtype`` to arrays of the dtype of y; another one than the default stands in
            place of the variant's rule. Values are not taken from it.
        rngs: for scale_init and bias_init.
        scale_metadata, bias_metadata: of the parameters.
        use_bias: whether there is a bias; None as the variant has it, which is not but for ``equinox``, ``lasagne``.
        bias_init: zeros.
        partial: fraction of the elements (of every device's), from the first, that enter the statistic; None for the
            variant's.
        variant: name of a preset or a Variant.

    Attributes:
        scale: gain, of shape (num_features,), or None.
        bias: likewise; None where there is none, so that the state is that of flax.nnx.RMSNorm.

    Raises:
        TypeError: epsilon, partial or variant is of the wrong type.
        ValueError: epsilon, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> layer = RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[3.0, 4.0]])).round(4)
        Array([[0.8485, 1.1314]], dtype=float32)
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer | None = None,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | Sequence[str] | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        use_bias: bool | None = None,
        bias_init: Initializer = initializers.zeros,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        partial: float | Fraction | None = None,
        variant: str | Variant = "flax",
    ) -> None:
        self.variant = derive("RMSNorm", variant, epsilon, partial)
        super().__init__(
            num_features,
            epsilon=self.variant.eps,
            dtype=dtype,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init or initializers.constant(1 - self.variant.scale_offset),
            reduction_axes=reduction_axes,
            feature_axes=feature_axes,
            axis_name=axis_name,
            axis_index_groups=axis_index_groups,
            use_fast_variance=use_fast_variance,
            promote_dtype=promote_dtype,
            rngs=rngs,
            scale_metadata=scale_metadata,
        )
        self.use_bias = self.variant.bias if use_bias is None else use_bias
        self.bias: nnx.Param[jax.Array] | None = nnx.data(None)
        if self.use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_features,), param_dtype), **bias_metadata)
