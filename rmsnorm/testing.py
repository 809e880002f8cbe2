"""Judges arrays: is y, and are its gradients, what a variant of RMSNorm gives? No tolerance is needed."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS, framework_of
from rmsnorm.specification.variants import Preset, Variant, derive

if TYPE_CHECKING:
    from rmsnorm.parity.arrays import Arrays
    from rmsnorm.specification.call import Axis

__all__ = ["assert_rms_norm", "rms_norm_interval"]

_MOST: Final = 3  # quantities that a message has
_WANTED: Final = "an array of NumPy, PyTorch, TensorFlow or JAX"


def assert_rms_norm(
    y: Any,
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    variant: Preset | Variant,
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    residual: Any = None,
    gate: Any = None,
    mask: Any = None,
    out_dtype: str | None = None,
    h: Any = None,
    dy: Any = None,
    dh: Any = None,
    dx: Any = None,
    dscale: Any = None,
    dbias: Any = None,
    dresidual: Any = None,
    dgate: Any = None,
    exact: bool = False,
) -> None:
    """Assert that y is the RMSNorm of x, and that each gradient that is given is one of y.

    Each element must lie in its interval: what the variant's formula gives in float32 arithmetic with sums in any
    order, and with the roundings that the variant names. A kernel that computes so never fails, and one that rounds
    elsewhere does. The arrays may be of NumPy, PyTorch, TensorFlow or JAX, on any device, in float16, bfloat16, float32
    or float64; nothing is called, and nothing is written to.

    Args:
        y: the result; None where only gradients are judged.
        x, scale, bias, eps, partial, axis, feature_axis, residual, gate, mask, out_dtype: of the call, as of rms_norm.
        variant: what y should be.
        h: x + residual, as it was returned.
        dy, dh: the gradients of the loss for y and for h, from which the others come.
        dx, dscale, dbias, dresidual, dgate: the gradients to judge.
        exact: whether sums must be better than terms that are added one after the other in float32.

    Raises:
        AssertionError: an element is outside of its interval, or a shape or dtype is another one. The first line says
            which element, what is expected, and which variant or mistake explains y, if one does.
        ValueError, TypeError: the arrays make no call, or no gradient can be judged without ``dy``.

    Example:
        >>> import numpy as np
        >>> x, scale = np.array([[3.0, 4.0]], "float32"), np.array([1.0, 0.5], "float32")
        >>> y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(1e-6)) * scale
        >>> assert_rms_norm(y, x, scale, variant="standard")
        >>> assert_rms_norm(y, x, scale, variant="gemma")
        Traceback (most recent call last):
        AssertionError: y is not gemma: y[0,1] is 0.565685391, expected 1.69705498 to 1.69705737, 13133911 ulp away; \
it is standard: it multiplies by the gain, not by 1 + gain
        2 of 2 elements of y are outside of their intervals
    """
    __tracebackhide__ = True
    op = "assert_rms_norm"
    given = _given(op, variant, eps, partial, axis, feature_axis, out_dtype, x=x, scale=scale, bias=bias,
                   residual=residual, gate=gate, mask=mask, dy=dy, dh=dh)  # fmt: skip
    gradients = {"dx": dx, "dscale": dscale, "dbias": dbias, "dresidual": dresidual, "dgate": dgate}
    results = _fetched(op, {"y": y, "h": h, **gradients})
    if not results:
        raise errors.out_of_domain(op, "y", None, _WANTED, "pass it, or a gradient and dy")
    if dy is None and dh is None and {*gradients} & {*results}:
        raise errors.out_of_domain(op, "dy", None, "the gradient of the loss for y", "pass it beside the gradients")
    if message := _message(given, results, exact):
        raise AssertionError(message)


def rms_norm_interval(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    variant: Preset | Variant,
    of: str = "y",
    eps: float | None = None,
    partial: float | Fraction | None = None,
    axis: Axis = -1,
    feature_axis: Axis | None = None,
    residual: Any = None,
    gate: Any = None,
    mask: Any = None,
    out_dtype: str | None = None,
    dy: Any = None,
    dh: Any = None,
    exact: bool = False,
) -> tuple[Any, Any]:
    """The least and the greatest right number for every element of y, or of a gradient: (low, high).

    Args:
        of: y, dx, dscale, dbias, dresidual or dgate; a gradient needs ``dy``.
        x, scale, bias and all others: as of ``assert_rms_norm``.

    Returns:
        Two arrays of the library of x, in the shape and the dtype of the quantity; NaN where only NaN is right.

    Raises:
        ValueError, TypeError: as of ``assert_rms_norm``; or the call has no such quantity.

    Example:
        >>> import numpy as np
        >>> low, high = rms_norm_interval(np.array([[3, 4]], "float32"), variant="standard")
        >>> low, high
        (array([[0.8485275, 1.1313701]], dtype=float32), array([[0.8485287, 1.1313715]], dtype=float32))
    """
    from rmsnorm.parity import arrays as judge
    from rmsnorm.targets.bridges import bridge

    op = "rms_norm_interval"
    given = _given(op, variant, eps, partial, axis, feature_axis, out_dtype, x=x, scale=scale, bias=bias,
                   residual=residual, gate=gate, mask=mask, dy=dy, dh=dh)  # fmt: skip
    known = judge.result_dtypes(given.call, given.arrays)
    known.pop("h", None)  # it is exact
    if of not in known:
        raise errors.not_a_choice(op, "of", of, known)
    if of != "y" and dy is None and dh is None:
        raise errors.out_of_domain(op, "dy", None, "the gradient of the loss for y", f"pass it for {of}")
    low, high = judge.interval(given, of, known[of].dtype, known[of].shape, exact=exact)
    if (key := str(framework_of(x))) == "numpy":
        return low, high
    ends: list[Any] = [bridge(key).send(end) for end in (low, high)]
    return tuple(end.to(x.device) for end in ends) if key == "torch" else tuple(ends)


def _given(
    op: str, variant: Any, eps: float | None, partial: Any, axis: Axis, feature_axis: Axis | None,
    out_dtype: str | None, **arrays: Any,
) -> Arrays:  # fmt: skip
    from rmsnorm.parity.arrays import arrays_of

    fetched = _fetched(op, arrays)
    if "x" not in fetched:
        raise errors.wrong_type(op, "x", arrays["x"], _WANTED, "pass the array that was normalised")
    return arrays_of(op, fetched, derive(op, variant, eps, partial), axis, feature_axis, out_dtype)


def _fetched(op: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays in NumPy, without those that are None."""
    from rmsnorm.targets.bridges import bridge

    fetched = {}
    for name, array in arrays.items():
        if array is None:
            continue
        key = framework_of(array)
        if key is None:
            row = ", ".join(f"{FRAMEWORKS[known].title}'s" for known in FRAMEWORKS)
            fix = "pass the array inside of it" if hasattr(array, "value") else f"make it one of {row}"
            raise errors.wrong_type(op, name, array, _WANTED, fix)
        try:
            fetched[name] = bridge(key).fetch(array)
        except (RuntimeError, TypeError) as error:  # It has no values here, or it is not dense.
            raise errors.wrong_type(op, name, array, _WANTED, "pass a dense array that has values") from error
    return fetched


def _message(given: Arrays, results: Mapping[str, Any], exact: bool) -> str:
    """What is wrong, empty where all holds."""
    from rmsnorm.identify.instead import explained
    from rmsnorm.parity.arrays import judged, of_few_rows, result_dtypes
    from rmsnorm.specification.call import Spec

    name, known = given.call.variant.label, result_dtypes(given.call, given.arrays)
    for quantity, array in results.items():
        if quantity not in known:
            of = {"h": "residual"}.get(quantity, quantity.removeprefix("d"))
            raise errors.out_of_domain(
                "assert_rms_norm", of, None, f"the {of} of the call that has {quantity}", "pass it"
            )
        if (got := Spec(array.shape, array.dtype.name)) != known[quantity]:
            fix = "; pass out_dtype if that is meant" if quantity == "y" else ""
            return f"{quantity} is not {name}: it is {got}, expected {known[quantity]}{fix}"
    wrong = judged(given, results, exact=exact)
    if not wrong:
        return ""
    first = wrong[0]
    few = of_few_rows(given, results, first)
    instead = explained(first.quantity, *few) if few else ""
    lines = [f"{first.quantity} is not {name}: {first.words}{f'; {instead}' if instead else ''}"]
    lines += [f"{verdict.count} of {verdict.size} elements of {verdict.quantity} are outside of their intervals"
              for verdict in wrong[:_MOST]]  # fmt: skip
    return "\n".join(lines)
