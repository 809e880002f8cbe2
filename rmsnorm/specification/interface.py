"""The types of the functions: what they return depends on two of their options. No array library."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import wraps
from typing import Any, Concatenate, Final, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

from rmsnorm.specification import errors
from rmsnorm.specification.call import Axis
from rmsnorm.specification.variants import Preset, Variant

F = TypeVar("F", bound=Callable[..., None])
In = TypeVar("In")
In_contra = TypeVar("In_contra", contravariant=True)
Out = TypeVar("Out")
Out_co = TypeVar("Out_co", covariant=True)


_INPUT: Final = "leave it out, as the layer takes the size from its input"
SIZES: Final = dict.fromkeys(("dim", "hidden_size", "d_model", "features", "num_features", "units"), _INPUT)


class Options(TypedDict, total=False):
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
        **options: Unpack[Options],
    ) -> Out_co: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: In_contra | None = None, return_inverse_rms: Literal[False] = False,
        **options: Unpack[Options],
    ) -> tuple[Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: In_contra | None = None, return_inverse_rms: Literal[True],
        **options: Unpack[Options],
    ) -> tuple[Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: In_contra | None = None, return_inverse_rms: Literal[True],
        **options: Unpack[Options],
    ) -> tuple[Out_co, Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra | None = None, gate: In_contra | None = None, return_inverse_rms: bool = False,
        **options: Unpack[Options],
    ) -> Any: ...  # fmt: skip


class Gradients(Protocol[In_contra, Out_co]):
    """``rms_norm_vjp`` of a framework: (dx, dscale, dbias), and dresidual and dgate where there are such.

    The gradients of parameters are Any, as they are None without the parameter.
    """

    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: None = None, **options: Unpack[Options],
    ) -> tuple[Out_co, Any, Any]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: None = None, **options: Unpack[Options],
    ) -> tuple[Out_co, Any, Any, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: None = None, gate: In_contra, **options: Unpack[Options],
    ) -> tuple[Out_co, Any, Any, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra, gate: In_contra, **options: Unpack[Options],
    ) -> tuple[Out_co, Any, Any, Out_co, Out_co]: ...  # fmt: skip
    @overload
    def __call__(
        self, dy: Any, x: In_contra, scale: In_contra | None = None, bias: In_contra | None = None, *,
        residual: In_contra | None = None, gate: In_contra | None = None, **options: Unpack[Options],
    ) -> Any: ...  # fmt: skip


def forward_of(array: type[Out]) -> Callable[[Callable[Concatenate[In, ...], Any]], Forward[In, Out]]:
    """A decorator for types: the function is ``rms_norm`` and returns such arrays."""

    def typed(function: Any) -> Any:
        return function

    return typed


def gradients_of(array: type[Out]) -> Callable[[Callable[Concatenate[Any, In, ...], Any]], Gradients[In, Out]]:
    """A decorator for types: the function is ``rms_norm_vjp`` and returns such arrays."""

    def typed(function: Any) -> Any:
        return function

    return typed


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
