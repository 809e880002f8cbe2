"""The types of the functions: what they return depends on two of their options. No array library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import wraps
from typing import Any, Final, Literal, Never, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from rmsnorm.specification import errors
from rmsnorm.specification.call import Axis
from rmsnorm.specification.variants import Preset, Variant

F = TypeVar("F", bound=Callable[..., None])
In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


_INPUT: Final = "leave it out, as the layer takes the size from its input"
SIZES: Final = dict.fromkeys(("dim", "hidden_size", "d_model", "features", "num_features", "units"), _INPUT)


# The options of a call: variant, eps, partial, axis, feature_axis and out_dtype.
Options: TypeAlias = tuple[Any, Any, Any, Any, Any, Any]


class Keywords(TypedDict, total=False):
    """The options that do not change what is returned."""

    variant: Preset | Variant
    eps: float | None
    partial: float | Fraction | None
    axis: Axis
    feature_axis: Axis | None
    mask: Any
    out_dtype: Any


class Forward(Protocol[In_contra, Out_co]):
    """``rms_norm`` of a framework: y, (y, h), (y, 1 / rho) or (y, h, 1 / rho)."""

    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: In_contra | None = None, return_inverse_rms: Literal[False] = False,
        **options: Unpack[Keywords],
    ) -> Out_co: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: In_contra | None = None, return_inverse_rms: Literal[False] = False,
        **options: Unpack[Keywords],
    ) -> tuple[Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: In_contra | None = None, return_inverse_rms: Literal[True],
        **options: Unpack[Keywords],
    ) -> tuple[Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: In_contra | None = None, return_inverse_rms: Literal[True],
        **options: Unpack[Keywords],
    ) -> tuple[Out_co, Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra | None = None, gate: In_contra | None = None, return_inverse_rms: bool = False,
        **options: Unpack[Keywords],
    ) -> Any: ...  # fmt: skip


class Gradients(Protocol[In_contra, Out_co]):
    """``rms_norm_vjp`` of a framework: (dx, dscale, dbias), and dresidual and dgate where there are such.

    The gradients of parameters are Any, as they are None without the parameter.
    """

    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: None = None, **options: Unpack[Keywords],
    ) -> tuple[Out_co, Any, Any]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: None = None, **options: Unpack[Keywords],
    ) -> tuple[Out_co, Any, Any, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: In_contra, **options: Unpack[Keywords],
    ) -> tuple[Out_co, Any, Any, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: In_contra, **options: Unpack[Keywords],
    ) -> tuple[Out_co, Any, Any, Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra | None = None, gate: In_contra | None = None, **options: Unpack[Keywords],
    ) -> Any: ...  # fmt: skip


def declared(module: str, make: str, forward: Callable[..., Any], gradients: Callable[..., Any]) -> tuple[Any, Any]:
    """``rms_norm`` and ``rms_norm_vjp`` of a module: the signature and the docstring that all frameworks have.

    Args:
        module: its name.
        make: the function that makes an array in the examples, such as "torch.tensor".
        forward: computes the results from the options (``Options``), return_inverse_rms, x, scale, bias, mask,
            residual and gate.
        gradients: computes the gradients from the options, dy, dh, x, scale, bias, mask, residual and gate.
    """

    def rms_norm(
        x: Any,
        scale: Any = None,
        bias: Any = None,
        *,
        variant: Preset | Variant = "standard",
        eps: float | None = None,
        partial: float | Fraction | None = None,
        axis: Axis = -1,
        feature_axis: Axis | None = None,
        mask: Any = None,
        residual: Any = None,
        gate: Any = None,
        out_dtype: Any = None,
        return_inverse_rms: bool = False,
        **unknown: Never,
    ) -> Any:
        """Root mean square layer normalization.

            y = h / rho * (o + scale) + bias,    h = x + residual,    rho = sqrt(mean(h_i^2) + eps)

        with the place of eps, the offset o, the counted elements and the roundings of the variant.

        Args:
            x: floating-point, any shape of at least one axis: f16, bf16, f32 or f64.
            scale: gain g, of the sizes of x along the feature axes; None multiplies by 1, without the offset.
            bias: b, of the same sizes; None adds nothing.
            variant: name of a preset or a Variant.
            eps: replaces the variant's eps.
            partial: fraction of the elements, counted from the first, that the statistic uses; replaces the variant's.
            axis: normalised axis or axes.
            feature_axis: axis or axes of the parameters; None for the normalised ones.
            mask: bool, broadcasts to x: True counts in the statistic. Elsewhere y is normalised, too, but every
                derivative takes it as a constant, so values under the mask reach no gradient. A row without counted
                elements gives 0.
            residual: added to x first, in promote(x, residual); the sum h is returned beside y. ``residual_rounding``
                of the variant says whether y is that of h before or after it is rounded.
            gate: z, floating-point, shaped as x: y is multiplied by f(z), or h is before it is normalised, as
                ``gate_function`` and ``gate_position`` of the variant say.
            out_dtype: dtype of y; None for the variant's rule.
            return_inverse_rms: also return 1 / rho, 0 in rows without counted elements; derivatives take it as a
                constant.

        Returns:
            y, shaped as x; with ``residual`` (y, h). With ``return_inverse_rms`` 1 / rho follows: its normalised axes
            have size 1, its dtype is float32, or float64 for f64.

        Raises:
            TypeError: x, a parameter, the residual or the gate is not floating-point, the mask is not bool.
            ValueError: a shape does not fit, an axis is out of range or repeated, eps, partial or variant is not valid.

        Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

        Example:
            >>> {make} as array
            >>> y = rms_norm(array([[3.0, 4.0]]), array([1.0, 2.0]), variant="paper")
            >>> [round(float(value), 4) for value in y[0]]
            [0.8485, 2.2627]
        """
        if unknown:
            raise unknown_argument("rms_norm", rms_norm, unknown)
        options = variant, eps, partial, axis, feature_axis, out_dtype
        return forward(options, return_inverse_rms, x, scale, bias, mask, residual, gate)

    def rms_norm_vjp(
        dy: Any,
        x: Any,
        scale: Any = None,
        bias: Any = None,
        *,
        variant: Preset | Variant = "standard",
        eps: float | None = None,
        partial: float | Fraction | None = None,
        axis: Axis = -1,
        feature_axis: Axis | None = None,
        mask: Any = None,
        residual: Any = None,
        gate: Any = None,
        out_dtype: Any = None,
        **unknown: Never,
    ) -> Any:
        """Gradients of rms_norm: the product of dy with its Jacobian.

            dx = R^T u,  u = (o + scale) * dy,  dscale = sum of dy * h / rho over rows,  dbias = sum of dy over rows

        A rounding counts as the identity, as in automatic differentiation.

        Args:
            dy: gradient of the loss with respect to y, shaped as x; with ``residual`` it may be a pair (dy, dh).
            x, scale, bias and options: as for rms_norm; ``out_dtype`` has no effect.

        Returns:
            (dx, dscale, dbias), each in the dtype of its argument, None where that is None. With ``residual`` dresidual
            follows, and with ``gate`` dgate.

        Raises:
            TypeError, ValueError: as rms_norm; also when dy has another shape than x.

        Source: Zhang & Sennrich 2019, section 4.2 (the R matrix).

        Example:
            >>> {make} as array
            >>> x, ones = array([3.0, 4.0]), array([1.0, 1.0])
            >>> dx, dscale, _ = rms_norm_vjp(ones, x, ones, variant="paper")
            >>> [round(float(value), 4) for value in (*dx, *dscale)]
            [0.0453, -0.0339, 0.8485, 1.1314]
        """
        if unknown:
            raise unknown_argument("rms_norm_vjp", rms_norm_vjp, unknown)
        dy, dh = dy_and_dh(dy, residual)
        options = variant, eps, partial, axis, feature_axis, out_dtype
        return gradients(options, dy, dh, x, scale, bias, mask, residual, gate)

    package, _, name = make.rpartition(".")
    for function in (rms_norm, rms_norm_vjp):
        function.__module__, function.__qualname__ = module, function.__name__
        function.__doc__ = inspect.cleandoc(str(function.__doc__)).replace("{make}", f"from {package} import {name}")
    return rms_norm, rms_norm_vjp


def dy_and_dh(dy: Any, residual: Any) -> tuple[Any, Any]:
    """dy and dh of ``rms_norm_vjp``, where with a residual ``dy`` may be a pair of both; dh is None if it is not given.

    Raises:
        TypeError: ``dy`` is a tuple of another length.
    """
    if residual is None or not isinstance(dy, tuple):
        return dy, None
    if len(dy) != 2:
        fix = "pass the gradients with respect to y and to x + residual"
        raise errors.wrong_type("rms_norm_vjp", "dy", dy, "an array or a pair (dy, dh)", fix)
    return dy


def unknown_argument(op: str, function: Any, names: Iterable[str]) -> TypeError:
    """The error for arguments that a function does not have."""
    return errors.unknown_argument(op, next(iter(names)), _arguments(function))


def constructor(function: F) -> F:
    """A decorator of a layer's ``__init__``: for an unknown argument the error says which one is meant."""
    layer, known = function.__qualname__.partition(".")[0], _arguments(function)

    @wraps(function)
    def checked(self: Any, *arguments: Any, **options: Any) -> None:
        check_arguments(layer, options, known)
        function(self, *arguments, **options)

    return checked  # type: ignore[return-value]


def check_arguments(layer: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            sized = "num_features" in known or "normalized_shape" in known
            raise errors.unknown_argument(layer, name, known, None if sized else SIZES)


def _arguments(function: Any) -> list[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]
