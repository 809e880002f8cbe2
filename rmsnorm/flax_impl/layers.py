"""RMSNorm as a Flax NNX module, a drop-in for flax.nnx.RMSNorm in every variant."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial as bind
from numbers import Integral
from types import MappingProxyType
from typing import Any, Final, overload

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax import numpy as jnp
from jax.nn import initializers

from rmsnorm.engines import prepare
from rmsnorm.flax_impl.functional import arrays, forward
from rmsnorm.flax_impl.space import Space
from rmsnorm.specification import errors
from rmsnorm.specification.interface import Options, constructor
from rmsnorm.specification.resolve import check_axis
from rmsnorm.specification.variants import Preset, Variant, derive

# By the offset of the gain. Flax 0.11 keeps the function: these are equal in every layer, and pickle knows them.
_UNIT: Final[Mapping[float, Initializer]] = {0.0: initializers.ones, 1.0: initializers.zeros}


class RMSNorm(nnx.RMSNorm):
    """Root mean square layer normalization.

        y = h / rho * (o + scale) + bias,    h = x + residual,    rho = sqrt(mean(h_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant. It is a flax.nnx.RMSNorm
    and takes its arguments. The statistic does not depend on ``dtype``; over several devices it is a weighted mean.

    Args:
        num_features: number of parameters, the product of the sizes of the feature axes.
        epsilon: a number >= 0; None for the variant's.
        dtype: of y, where float64 is float32 while x64 is off; None for the variant's rule, which for ``flax`` is
            promote(x, scale).
        param_dtype: of the parameters.
        use_scale: whether there is a gain; without it the factor is 1.
        scale_init: None for 1 - o, so that the factor is 1 at first.
        reduction_axes: normalised axis or axes.
        feature_axes: axis or axes of the parameters.
        axis_name: mapped axis, or axes, over whose devices rows are spread: the mean is that of all counted elements.
        axis_index_groups: groups of indices within that axis, each with a mean of its own.
        use_fast_variance: has no effect, as in flax.nnx.RMSNorm.
        promote_dtype: maps (x, scale) and ``dtype`` to arrays of the dtype of y. A function other than the default
            replaces the variant's rule; only the dtype of its results is used.
        rngs: for scale_init and bias_init.
        scale_metadata, bias_metadata: of the parameters.
        use_bias: whether there is a bias; None as in the variant: only ``equinox`` and ``lasagne`` have one.
        bias_init: zeros.
        partial: fraction of the elements (of every device's), from the first, that enter the statistic; None for the
            variant's.
        variant: name of a preset or a Variant. By default the layer is ``flax``, as flax.nnx.RMSNorm, and the functions
            are ``standard``: if x has 16 bits and scale has 32, y of the layer has 32 and y of the functions 16.

    Attributes:
        scale: gain, of shape (num_features,), or None.
        bias: of the same shape; or None, so that the state is that of flax.nnx.RMSNorm.

    Raises:
        TypeError: epsilon, partial or variant is of the wrong type.
        ValueError: epsilon, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> layer = RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[3.0, 4.0]]))
        Array([[0.84852815, 1.1313709 ]], dtype=float32)
    """

    promote_dtype: Any = None  # a layer of Flax 0.11 whose class ``replace`` changes has no other

    @constructor
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
        variant: Preset | Variant = "flax",
    ) -> None:
        if not isinstance(num_features, Integral):
            want = "a size >= 0, of the feature axes of x"
            raise errors.wrong_type("RMSNorm", "num_features", num_features, want, "pass x.shape[-1]")
        check_options(reduction_axes, feature_axes, dtype)
        param_dtype = parameter_dtype("RMSNorm", param_dtype)
        self.variant: Variant = derive("RMSNorm", variant, epsilon, partial)
        known = inspect.signature(nnx.RMSNorm.__init__).parameters  # neither of these two is, in Flax 0.11
        offset = self.variant.scale_offset
        younger = {"promote_dtype": promote_dtype, "scale_metadata": scale_metadata}
        super().__init__(
            num_features,
            epsilon=self.variant.eps,
            dtype=dtype,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init or _UNIT.get(offset, initializers.constant(1 - offset)),
            reduction_axes=_hashable(reduction_axes),
            feature_axes=_hashable(feature_axes),
            axis_name=_hashable(axis_name),
            axis_index_groups=_hashable(axis_index_groups),
            use_fast_variance=use_fast_variance,
            rngs=rngs,
            **{name: value for name, value in younger.items() if name in known},
        )
        if self.scale is not None and "scale_metadata" not in known:
            self.scale: Any = nnx.Param(self.scale[...], **scale_metadata)
        self.promote_dtype = promote_dtype
        self.use_bias = self.variant.bias if use_bias is None else use_bias
        self.bias: nnx.Param[jax.Array] | None
        if self.use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_features,), param_dtype), **bias_metadata)
        else:
            self.bias = nnx.data(None)

    @overload
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, residual: None = None, gate: jax.Array | None = None
    ) -> jax.Array: ...
    @overload
    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array, gate: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]: ...
    @overload
    def __call__(
        self, x: jax.Array, mask: jax.Array | None, residual: jax.Array, gate: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]: ...
    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        gate: jax.Array | None = None,
    ) -> Any:
        """Normalize x, or x + residual.

            y = h / rho * (o + scale) + bias,    h = x + residual

        Args:
            x: floating-point.
            mask: bool, broadcasting to x: True counts in the statistic. Elsewhere y is normalised likewise but constant
                to every derivative, and a row with nothing counted gives 0.
            residual: added to x first, in promote(x, residual).
            gate: z, shaped as x: y is multiplied by f(z), or h is before it is normalised, as ``gate_function`` and
                ``gate_position`` of the variant say.

        Returns:
            y, shaped as x; with ``residual`` (y, x + residual).

        Raises:
            TypeError: x, the residual or the gate is not floating-point, the mask is not bool.
            ValueError: the parameters, the mask, the residual or the gate do not fit x, or an axis does not.

        Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

        Example:
            >>> import jax.numpy as jnp
            >>> layer = RMSNorm(2, use_scale=False, rngs=nnx.Rngs(0))
            >>> y, a = layer(jnp.array([1.0, 3.0]), residual=jnp.array([2.0, 1.0]))
            >>> y, a
            (Array([0.8485281, 1.1313708], dtype=float32), Array([3., 4.], dtype=float32))
        """
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        out_dtype = self.dtype
        if self.promote_dtype not in (None, dtypes.promote_dtype):
            promote = bind(self.promote_dtype, dtype=self.dtype)
            out_dtype = jax.eval_shape(promote, (x, scale))[0].dtype
        return normalise_over(
            (self.variant, self.epsilon, None, self.reduction_axes, self.feature_axes, out_dtype),
            x, scale, bias, mask, residual, gate, self.axis_name, self.axis_index_groups,
        )  # fmt: skip


class _Positions(inspect.Signature):
    """The signature that Flax's transforms see. They bind a call, fill in defaults and count the arguments: nnx.vmap
    with ``in_axes=(0, 0)`` is for x and mask. So residual and gate, which the built-in layer does not take, count only
    in a call that passes them."""

    def bind(self, *arguments: Any, **named: Any) -> inspect.BoundArguments:
        bound = super().bind(*arguments, **named)
        names = list(self.parameters)
        count = 1 + max(names.index(name) for name in ("mask", *bound.arguments))
        shorter = inspect.Signature(list(self.parameters.values())[:count])
        return inspect.BoundArguments(shorter, bound.arguments)


_signature = inspect.signature(RMSNorm.__call__)
RMSNorm.__call__.__signature__ = _Positions(  # type: ignore[attr-defined]
    list(_signature.parameters.values()), return_annotation=_signature.return_annotation
)


def check_options(axis: Any, feature_axis: Any, dtype: Any) -> None:
    """Refuse axes that are no integers, and a y that is no numbers with a fraction."""
    check_axis("RMSNorm", "reduction_axes", axis)
    check_axis("RMSNorm", "feature_axes", feature_axis)
    if dtype is not None:
        errors.dtype_named("RMSNorm", "dtype", dtype)


def parameter_dtype(layer: str, dtype: Any) -> Any:
    return jnp.dtype(errors.dtype_named(layer, "param_dtype", dtype))


def normalise_over(
    options: Options, x: Any, scale: Any, bias: Any, mask: Any, residual: Any, gate: Any, axis_name: Any,
    axis_index_groups: Any,
) -> Any:  # fmt: skip
    """rms_norm, with rows that may be spread over devices. Parameters may have one axis for several feature axes, as
    the built-in layer has them: shape (12,) for sizes 3 and 4."""
    *others, feature_axis, out_dtype = options
    if out_dtype is not None:
        out_dtype = jax.dtypes.canonicalize_dtype(errors.dtype_named("RMSNorm", "dtype", out_dtype)).name
    sizes = () if isinstance(feature_axis, int) else feature_sizes(x, options)
    if len(sizes) > 1:
        merged = (math.prod(sizes),)
        scale, bias = (p.reshape(sizes) if p is not None and p.shape == merged else p for p in (scale, bias))
    space = Space(_hashable(axis_name), _hashable(axis_index_groups))
    return forward((*others, feature_axis, out_dtype), False, x, scale, bias, mask, residual, gate, space)


def feature_sizes(x: Any, options: Options) -> tuple[int, ...]:
    """Sizes of x along the feature axes, in the order of x."""
    (x,) = arrays("rms_norm", x=x)
    return tuple(x.shape[axis] for axis in prepare("rms_norm", options, x).call.feature_axes)


def _hashable(value: Any) -> Any:
    """Lists as tuples: a static attribute and an argument of a compiled function must be hashable."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
