"""Decides whether a layer may be replaced: what it computes, and that its replacement does the same."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import of_replacement
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.conversion.replacement.in_kit import is_asked, require_golden
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import UNSUPPORTED, NoNorm, Roundings, Unproven, recognised
from rmsnorm.identify import Identity, Target, TargetError
from rmsnorm.identify.layout import find_axes, parameters, size_of_gain
from rmsnorm.identify.solve import identify_opened
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.targets.arguments import argument_named
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import random_state_kept

_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
_SPECIAL: Final = {"zeros": 0.0, "NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf}
_TIME: Final = 600.0  # seconds for identify
_ELEMENTS: Final = 2**20  # of y in 16 bits: a handful of them are not the nearest number after float32 arithmetic


class Proof(NamedTuple):
    """What a layer computes, where, and how y of its replacement is rounded in 16 bits."""

    norm: Norm
    identity: Identity
    roundings: Roundings | None


@random_state_kept()
def decide(
    target: Target,
    call: Callable[..., Any],
    replaced: Callable[[Norm], Target],
    own: tuple[str, str],
    asked: Target | None = None,
) -> Proof:
    """What a layer computes, if its replacement computes the same.

    Args:
        target: the layer, or a copy of it.
        call: its own call, whose first parameter is x, and whose second one may be a gate.
        replaced: makes the replacement of a copy.
        own: the dtypes in which the layer computes and has its parameters.
        asked: the same layer without what no variant says, such as another dtype of y; None for the layer itself.

    Raises:
        Unproven: the layer must stay as it is, and why.
    """
    x, gate = first_parameter(call), _gate_parameter(call)
    if "gate_vector" in target.arguments or ("gate" in target.arguments and gate is None):
        raise Unproven(UNSUPPORTED)
    with target.evaluating():
        norm, identity = _identified(target, asked or target, x, gate)
    try:
        ours = replaced(norm)
    except Exception as error:  # of the layer's class, which may do anything when it is inherited from
        raise Unproven(f"it cannot be replaced ({type(error).__name__}: {error})") from None
    in_kit = is_asked(target, norm)
    proven, reasons = [], []
    for shape in norm.shapes:
        try:
            every = not target.bridge.compiles or shape is norm.shapes[-1]  # compilers take seconds
            for dtype in _DTYPES if every else _DTYPES[:1]:
                _compare(target, ours, norm, shape, [("", dtype)])
            proven.append(shape)
        except Unproven as error:
            reasons.append(error)
    if target.returned:
        raise Unproven(f"it returns {' and '.join(sorted(target.returned))}")
    if not proven:
        raise reasons[0]
    ways = [*_SPECIAL, "with outliers", *(["in memory"] if target.bridge.strided and not in_kit else [])]
    _compare(target, ours, norm, proven[-1], [(way, "float32") for way in ways])
    unlike = tuple(len(shape) for shape in norm.shapes if shape not in proven)
    norm = replace(norm, shapes=tuple(proven), unlike=unlike)
    if in_kit:
        require_golden(target, ours, norm)
    return Proof(norm, identity, _roundings(target, ours, norm, *own))


def _roundings(theirs: Target, ours: Target, norm: Norm, dtype: str, of_parameters: str) -> Roundings | None:
    """How y differs in the dtype in which a layer computes; None for one of more than 16 bits, or of few rows."""
    if dtype not in dtypes.HALF:
        return None
    try:
        layout = norm.example
        x, _, arrays = _inputs(theirs, layout.shape(_ELEMENTS // layout.n), dtype)
        arrays = {name: array if name == "gate" else array.astype(of_parameters) for name, array in arrays.items()}
        count, results = x.size // layout.n, []
        for target in (theirs, ours):
            with target.evaluating():
                results.append(layout.to_rows(_quick(target).forward(x, **arrays), count))
    except (Unproven, TargetError):  # it takes no more rows
        return None
    if any(y.dtype != x.dtype for y in results):
        return None
    far = ulps(*results)
    differ = far.any(axis=1)
    rows, gate = (layout.to_rows(each, count)[differ] for each in (x, arrays.get("gate", x)))
    scale, bias = (layout.spread(arrays[name], count)[differ] if name in arrays else None for name in ("scale", "bias"))
    known: dict[str, Any] = {"variant": norm.known, "out_dtype": x.dtype}
    exact = rms_norm(rows, scale, bias, feature_axis=(0, 1), gate=gate if norm.gate else None, **known)
    wrong = (int(np.count_nonzero(ulps(y[differ], exact))) for y in results)
    return Roundings(dtype, far.size, int(np.count_nonzero(far)), float(far.max()), *wrong)


def _identified(target: Target, asked: Target, x: str, gate: str | None) -> tuple[Norm, Identity]:
    """What a layer computes, and where.

    Raises:
        Unproven: that is no RMSNorm, or is more than one.
    """
    arguments = tuple(entry for entry in ("scale", "bias", "gate") if entry in target.arguments)

    def ask(width: int | None) -> tuple[Norm, Identity]:
        sized, called = (replace(each, width=width, arguments=arguments) for each in (target, asked))
        norm = _placed(_quick(sized), x, gate)
        return norm, identify_opened(called, layout=norm.example, gradients=False, time_limit=_TIME)

    norm, identity = ask(target.width)
    vector, width = size_of_gain(target, norm.shapes[-1]), identity["divisor"]
    if not vector and isinstance(width, int) and width > 1:  # a fixed factor of y may say for which width it is
        fixed = ask(width)
        if fixed[1].plain:
            norm, identity = replace(fixed[0], width=width), fixed[1]
    variant, group = recognised(identity, gated=gate is not None), identity["group_size"]
    if group:  # of this size, or of this number
        width = target.width or 2 * group
        shapes = tuple((*shape[:-1], width) for shape in norm.shapes)
        norm = replace(norm, shapes=shapes, width=width, group=group)
    offset = variant.scale_offset if norm.scale and not vector else 0.0
    return replace(norm, variant=variant, offset=offset), identity


def _placed(target: Target, x: str, gate: str | None) -> Norm:
    """Where a layer with these names of x and of its gate normalises; the variant is not known yet.

    Raises:
        NoNorm, Unproven: it normalises no axes, cannot be called, or returns more than y.
    """
    failure: Unproven = NoNorm("it computes something else")
    try:
        where = find_axes(target)
    except TargetError as error:
        where, failure = None, NoNorm(f"it cannot be called: {error}")
    if target.returned:
        raise (NoNorm if gate is None else Unproven)(f"it returns {' and '.join(sorted(target.returned))}")
    if where is None:
        raise failure
    return Norm(**vars(where), scale=target.names.get("scale"), bias=target.names.get("bias"), x=x, gate=gate)


def require_gain_alone(target: Target, names: list[str]) -> None:
    """Of the parameters and buffers with these names, each must be the gain or the bias.

    Raises:
        NoNorm: another one is there.
    """
    if set(names) - set(target.names.values()) or "factor" in target.names:
        raise NoNorm(f"it holds {', '.join(names)}, expected a gain and perhaps a bias")


def first_parameter(call: Callable[..., Any]) -> str:
    """Its name of x."""
    return next(iter(inspect.signature(call).parameters), "")


def _gate_parameter(call: Callable[..., Any]) -> str | None:
    """The name of its second parameter, if that is a gate.

    Raises:
        NoNorm: a call with x alone, or with x and a gate, is not enough.
    """
    others = list(inspect.signature(call).parameters.values())[1:]
    gate = next((entry.name for entry in others[:1] if argument_named(entry.name) == "gate"), None)
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in others if p.kind in named and p.default is p.empty and p.name != gate]
    if required:
        raise NoNorm(f"its call needs {', '.join(required)}, expected x alone, or x and a gate")
    return gate


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of the attributes that calls have changed: numbers, texts, arrays, and containers of these."""
    was, now = ({name: _text(value) for name, value in entry.items()} for entry in (before, after))
    return sorted({name for name, _ in was.items() ^ now.items()})


def _text(value: Any) -> str:
    """What is equal for a value and its copy: of an object of an unknown class that is the name of the class."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list, set, frozenset)):
        return f"{type(value).__name__}{[_text(entry) for entry in value]}"
    if isinstance(value, dict):
        return f"dict{[(_text(key), _text(entry)) for key, entry in value.items()]}"
    array = value.detach() if hasattr(value, "detach") else value.numpy() if hasattr(value, "numpy") else value
    if hasattr(array, "tolist") and not getattr(array, "is_meta", False):
        return f"{type(value).__name__}{array.tolist()}"
    return type(value).__qualname__


def _compare(
    theirs: Target, ours: Target, norm: Norm, shape: tuple[int, ...], kinds: Sequence[tuple[str, str]]
) -> None:
    """The results of both in training and in evaluation must be the same, on x in each way and dtype."""
    asked = []
    for way, dtype in kinds:
        x, dy, arrays = _inputs(theirs, shape, dtype)
        views = _in_another_way(norm, x, way) if way else [("", x)]
        asked += [(words, view, dy, arrays) for words, view in views]
    for mode, trains in ((" in training", True), (" in evaluation", False)) if theirs.training else (("", False),):
        wanted = []
        with theirs.in_mode(trains):
            quick = _quick(theirs)
            for words, x, dy, arrays in asked:
                with contextlib.suppress(TargetError):  # it does not take such an x: the replacement may
                    wanted.append((words, x, dy, arrays, _results(quick, x, dy, arrays)))
        with ours.in_mode(trains):
            quick = _quick(ours)
            for words, x, dy, arrays, want in wanted:
                where = f"{mode} on {x.dtype.name}[{', '.join(map(str, x.shape))}]{words}"
                _require_results(norm, x, want, quick, dy, arrays, where)


def _require_results(
    norm: Norm, x: Array, want: dict[str, Any], ours: Target, dy: Array, arrays: dict[str, Array], where: str
) -> None:
    try:
        got = _results(ours, x, dy, arrays)
    except TargetError as error:
        raise Unproven(f"its replacement fails{where}: {error}") from None
    limits = limits_of(norm, x, dy, arrays, want["y"].dtype.name)
    special = ~np.isfinite(x.astype(np.float32)).all(norm.axes, keepdims=True)
    for name, value in want.items():
        other = got.get(name)
        if value is not None and other is not None:
            # What need not be kept: a gradient that does not exist, as that of a row with NaN, or of sqrt at 0; and in
            # 16 bits NaN of zeros, where eps is too small for the format.
            unknown = ~np.isfinite(value.astype(np.float64))
            if name == "y":
                unknown &= ~special & (x.dtype != np.float32)
            elif value.shape == x.shape:
                unknown |= special
            value, other = (np.where(unknown, 0, entry).astype(entry.dtype) for entry in (value, other))
        require_same(name, value, other, limits.get(name), where)


def limits_of(norm: Norm, x: Array, dy: Array, arrays: dict[str, Array], result: str) -> dict[str, Array]:
    """How far the results of a layer, whose y is of the dtype ``result``, and of its replacement may be apart.

    Each element has the bound of its terms. What cancels in a row, or in the sum over rows, counts by what it is made
    of. Both may compute in float32 inside, in float64 too.
    """
    layout = norm.layout(x.shape)
    count, narrow = x.size // layout.n, max(x.dtype.name, result, "float32", key=dtypes.unit_roundoff)
    rows, slopes = (layout.to_rows(each, count) for each in (x, dy))
    scale, bias = (layout.spread(arrays[name], count) if name in arrays else None for name in ("scale", "bias"))
    gate = layout.to_rows(arrays["gate"], count) if norm.gate else None
    known: dict[str, Any] = {"variant": norm.known, "feature_axis": (0, 1), "tangents": (rows, None, None)}
    sizes = term_sizes(rows, scale, bias, dy=slopes, gate=gate, **known)
    inverse = np.broadcast_to(np.nan_to_num(sizes["inverse_rms"], posinf=1.0), rows.shape)
    limits = {}
    for name, argument in {"y": "x", "dx": "x", "dscale": "scale", "dbias": "bias", "dgate": "gate"}.items():
        array = arrays.get(argument, x if argument == "x" else None)
        if array is not None:
            terms = layout.to_x(sizes[name])
            number: Any = 1
            if array.shape != x.shape:
                others = range(x.ndim) if array.size == 1 else set(range(x.ndim)) - set(layout.feature_axes)
                terms, number = terms.sum(tuple(others)).reshape(array.shape), x.size // array.size
            ratio = of_replacement(name, _call(norm, (number, layout.n), arrays, x.dtype.name), narrow)
            # A step that underflows errs by half a spacing, which 1 / rho or the sum over rows multiplies.
            times = np.maximum(1.0, layout.to_x(inverse)) if argument == "x" and name != "y" else number
            unit = np.maximum(dtypes.unit_roundoff(narrow) * terms, times * dtypes.smallest_subnormal(narrow) / 2)
            limit = ratio * unit
            if name in ("dx", "dgate") and norm.known.rounding == "input_dtype":
                # The derivative of 1 / rho is 1 / rho^3 / 2, which underflows first: of float16, at rho of 100.
                with np.errstate(divide="ignore"):
                    limit += terms * np.minimum(1.0, dtypes.smallest_subnormal(narrow) / layout.to_x(inverse) ** 3)
            limits[name] = np.where(np.isfinite(terms), limit, 0.0)
    return limits


def _call(norm: Norm, shape: tuple[int, int], arrays: dict[str, Array], dtype: str) -> Call:
    """The call on this number of rows, in float32 in place of float64."""
    named = {name: "float32" if array.dtype == np.float64 else array.dtype.name for name, array in arrays.items()}
    specs: dict[str, Any] = {name: Spec(shape if name == "gate" else shape[1:], named[name]) for name in named}
    return resolve("replace", Spec(shape, "float32" if dtype == "float64" else dtype), variant=norm.known, **specs)


def _quick(target: Target) -> Target:
    """The target as one program in place of one for each operation, in the mode of now, where shapes are compiled."""
    return target.compiled if target.bridge.compiles else target


def _results(target: Target, x: Array, dy: Array, arrays: dict[str, Array]) -> dict[str, Any]:
    results: dict[str, Any] = {"y": target.forward(x, **arrays)}
    if target.differentiable:
        results |= {f"d{name}": gradient for name, gradient in target.all_gradients(dy, x=x, **arrays).items()}
    return results


def _inputs(target: Target, shape: tuple[int, ...], dtype: str) -> tuple[Array, Array, dict[str, Array]]:
    random = np.random.default_rng(len(shape))
    x = random.normal(0.1, 1.0, shape)
    x = (x * 10.0 ** random.uniform(-1, 1, (shape[0],) + (1,) * (len(shape) - 1))).astype(dtype)
    dy = random.normal(size=shape).astype(dtype)
    values = [functools.partial(random.normal, middle, 0.5) for middle in (1.0, 0.3)]
    arrays = parameters(target, x, scale=values[0], bias=values[1])
    if "gate" in target.arguments:
        arrays["gate"] = random.normal(0.5, 2.0, shape).astype(dtype)
        for column, value in enumerate((20.0, -20.0, 0.0)):  # beyond what somebody may cut off, and nothing
            arrays["gate"][..., column : column + 1] = value
    return x, dy, arrays


def _in_another_way(norm: Norm, x: Array, way: str) -> list[tuple[str, Array]]:
    """x with special rows or outliers, or in another order in memory.

    Zeros, NaN and infinity are in the last row alone, where one element is enough but for zeros, and everywhere.
    """
    layout = norm.layout(x.shape)
    rows = np.array(layout.to_rows(x, x.size))
    if way in _SPECIAL:
        value = _SPECIAL[way]
        rows[-1, slice(None) if value == 0 else 1] = value
        return [(f", with a row of {way}", layout.to_x(rows)), (f", of {way} alone", np.full_like(x, value))]
    if way == "with outliers":  # one in each row, of either sign: x / rho is as large as it can be
        rows, numbers = rows / np.float32(1000), np.arange(len(rows))
        rows[numbers, numbers % rows.shape[1]] = np.where(numbers % 2, -4, 4)
        return [(f", {way}", layout.to_x(rows))]
    if x.ndim < 2:
        return []
    return [(", not contiguous", np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)),
            (", sliced", np.concatenate([x, x], axis=-1)[..., : x.shape[-1]])]  # fmt: skip


def require_same(name: str, want: Array | None, got: Array | None, limit: Array | None, where: str) -> None:
    """Two results must be the same, but for roundings: each element may differ by its limit, or not where it has none.

    Raises:
        Unproven: they are not.
    """
    difference = _difference(want, got, limit)
    if difference:
        raise Unproven(f"{name} of its replacement {difference}{where}")


def _difference(want: Array | None, got: Array | None, limit: Array | None) -> str | None:
    """How two results differ by more than the roundings of both."""
    if want is None or got is None:
        other = want if got is None else got
        return None if other is None or not np.any(other) else "is missing on one side"
    if (want.shape, want.dtype) != (got.shape, got.dtype):
        return f"is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return "has NaN or infinity at other places"
    far, size = np.abs(got - want)[finite], np.abs(want[finite]).max(initial=0.0)
    if np.all(far <= (0.0 if limit is None else limit[finite])):
        return None
    return f"differs by {far.max() / size:.1g} of the largest element" if size else "is not 0"
