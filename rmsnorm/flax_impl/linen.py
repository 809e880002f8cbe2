"""RMSNorm as a Flax Linen module, a drop-in for flax.linen.RMSNorm in every variant."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, overload

import jax
from jax import numpy as jnp
from jax.nn import initializers

from rmsnorm.specification.frameworks import imported
from rmsnorm.specification.interface import constructor
from rmsnorm.specification.variants import Preset, Variant, derive

with imported("flax"):
    import flax.linen as nn
    from flax.typing import Initializer

    from rmsnorm.flax_impl.layers import check_options, feature_sizes, normalise_over, parameter_dtype


class RMSNorm(nn.RMSNorm):
    """The layer for flax.nnx, ``rmsnorm.flax_impl.RMSNorm``, as a module of flax.linen.

    It is a flax.linen.RMSNorm with its attributes, of which ``use_fast_variance`` and ``force_float32_reductions`` have
    no effect. ``epsilon``, ``scale_init``, ``use_bias``, ``bias_init``, ``partial`` and ``variant`` are those of the
    other layer.

    Raises:
        TypeError: epsilon, partial or variant is of the wrong type.
        ValueError: epsilon, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import jax
        >>> layer = RMSNorm(epsilon=0.0)
        >>> x = jax.numpy.array([[3.0, 4.0]])
        >>> layer.apply(layer.init(jax.random.key(0), x), x)
        Array([[0.84852815, 1.1313709 ]], dtype=float32)
    """

    epsilon: float | None = None
    scale_init: Initializer | None = None
    use_bias: bool | None = None
    bias_init: Initializer = initializers.zeros
    partial: float | Fraction | None = None
    variant: Preset | Variant = "flax"

    def __post_init__(self) -> None:
        derive("RMSNorm", self.variant, self.epsilon, self.partial)
        check_options(self.reduction_axes, self.feature_axes, self.dtype)
        parameter_dtype("RMSNorm", self.param_dtype)
        super().__post_init__()

    def __repr__(self) -> str:
        eps = derive("RMSNorm", self.variant, self.epsilon, None).eps
        return super().__repr__().replace("epsilon = None", f"epsilon = {eps}")  # the one that counts

    @overload
    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, residual: None = None, gate: jax.Array | None = None
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        gate: jax.Array | None = None,
    ) -> Any:
        """Normalize x, or x + residual, as the other layer does, but the mask is cast to bool as in flax.linen.RMSNorm.

        Example:
            >>> x = jax.numpy.array([1.0, 3.0])
            >>> layer = RMSNorm(use_scale=False)
            >>> y, a = layer.apply({}, x, residual=jax.numpy.array([2.0, 1.0]))
            >>> y, a
            (Array([0.8485281, 1.1313708], dtype=float32), Array([3., 4.], dtype=float32))
        """
        variant = derive("RMSNorm", self.variant, self.epsilon, self.partial)
        options = (variant, None, None, self.reduction_axes, self.feature_axes, self.dtype)
        shape, dtype = feature_sizes(x, options), parameter_dtype("RMSNorm", self.param_dtype)
        scale = bias = None
        if self.use_scale:
            scale_init = self.scale_init or initializers.constant(1 - variant.scale_offset)
            scale = self.param("scale", scale_init, shape, dtype)
        if variant.bias if self.use_bias is None else self.use_bias:
            bias = self.param("bias", self.bias_init, shape, dtype)
        mask = None if mask is None else jnp.asarray(mask, bool)
        axis_name = None if self.is_initializing() else self.axis_name
        return normalise_over(options, x, scale, bias, mask, residual, gate, axis_name, self.axis_index_groups)


RMSNorm.__init__ = constructor(RMSNorm.__init__)  # type: ignore[method-assign]
