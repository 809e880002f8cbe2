"""Decides whether a layer may be replaced: what it computes, and that its replacement does the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.conversion.replacement.in_kit import Golden
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import UNSUPPORTED, NoNorm, Roundings, Unproven, recognised
from rmsnorm.identify import Identity, Target, TargetError
from rmsnorm.identify.layout import find_axes, parameters, size_of_gain
from rmsnorm.identify.solve import identify_opened
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.targets.arguments import argument_named
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import random_state_kept

_TIME: Final = 600.0  # seconds for identify
_ELEMENTS: Final = 2**20  # of y in 16 bits: a handful of them are not the nearest number after float32 arithmetic


class Proof(NamedTuple):
    """What a layer computes, where, and how y of its replacement is rounded in 16 bits."""

    norm: Norm
    identity: Identity
    roundings: Roundings | None


class Plain(NamedTuple):
    """A layer, and what makes the replacement of a copy."""

    theirs: Target
    replaced: Callable[[Norm], Target]


@random_state_kept()
def decide(
    target: Target,
    call: Callable[..., Any],
    replaced: Callable[[Norm], Target],
    own: tuple[str, str],
    plain: Plain | None = None,
) -> Proof:
    """What a layer computes, if its replacement computes the same.

    Args:
        target: the layer, or a copy of it.
        call: its own call, whose first parameter is x, and whose second one may be a gate.
        replaced: makes the replacement of a copy.
        own: the dtypes in which the layer computes and has its parameters.
        plain: the same two without what no variant says, such as another dtype of y; None where nothing is.

    Raises:
        Unproven: the layer must stay as it is, and why.
    """
    x, gate = first_parameter(call), _gate_parameter(call)
    if "gate_vector" in target.arguments or ("gate" in target.arguments and gate is None):
        raise Unproven(UNSUPPORTED)
    with target.evaluating():
        norm, identity = _identified(target, plain.theirs if plain else target, x, gate)
    try:
        ours = replaced(norm)
    except Exception as error:  # of the layer's class, which may do anything when it is inherited from
        raise Unproven(f"it cannot be replaced ({type(error).__name__}: {error})") from None
    golden = Golden(target, ours, norm) if plain is None else Golden(plain.theirs, plain.replaced(norm), norm)
    proven, reasons = [], []
    for shape in norm.shapes:
        try:
            golden.require_few(shape, every=not golden.compiles or shape is norm.shapes[-1])
            proven.append(shape)
        except Unproven as error:
            reasons.append(error)
    if not proven:
        raise reasons[0]
    golden.require_values(proven[-1])
    if target.framework == "torch":
        golden.require_calls(proven)
    unlike = tuple(len(shape) for shape in norm.shapes if shape not in proven)
    norm = replace(norm, shapes=tuple(proven), unlike=unlike)
    return Proof(norm, identity, _roundings(target, ours, norm, *own))


def _roundings(theirs: Target, ours: Target, norm: Norm, dtype: str, of_parameters: str) -> Roundings | None:
    """How y differs in the dtype in which a layer computes; None for one of more than 16 bits, or of few rows."""
    if dtype not in dtypes.HALF:
        return None
    try:
        layout = norm.example
        x, arrays = _inputs(theirs, layout.shape(_ELEMENTS // layout.n), dtype)
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


def limit_of_y(norm: Norm, x: Array, arrays: Mapping[str, Array]) -> Array:
    """How far y of a layer and of its replacement may be apart, by the bound of each."""
    layout = norm.layout(x.shape)
    count = x.size // layout.n
    rows = layout.to_rows(x, count)
    scale, bias = (layout.spread(arrays[name], count) if name in arrays else None for name in ("scale", "bias"))
    gate = layout.to_rows(arrays["gate"], count) if norm.gate else None
    known: dict[str, Any] = {"variant": norm.known, "feature_axis": (0, 1), "tangents": (rows, None, None)}
    sizes = term_sizes(rows, scale, bias, dy=rows, gate=gate, **known)["y"]
    specs: dict[str, Any] = {
        name: Spec(rows.shape if name == "gate" else (layout.n,), array.dtype.name) for name, array in arrays.items()
    }
    call = resolve("replace", Spec(rows.shape, x.dtype.name), variant=norm.known, **specs)
    ratio = 2 * bound("y", call, x.dtype.name, automatic=True).ratio
    return ratio * dtypes.unit_roundoff(x.dtype.name) * layout.to_x(sizes)


def _quick(target: Target) -> Target:
    """The target as one program in place of one for each operation, in the mode of now, where shapes are compiled."""
    return target.compiled if target.bridge.compiles else target


def _inputs(target: Target, shape: tuple[int, ...], dtype: str) -> tuple[Array, dict[str, Array]]:
    random = np.random.default_rng(len(shape))
    x = random.normal(0.1, 1.0, shape)
    x = (x * 10.0 ** random.uniform(-1, 1, (shape[0],) + (1,) * (len(shape) - 1))).astype(dtype)
    values = [functools.partial(random.normal, middle, 0.5) for middle in (1.0, 0.3)]
    arrays = parameters(target, x, scale=values[0], bias=values[1])
    if "gate" in target.arguments:
        arrays["gate"] = random.normal(0.5, 2.0, shape).astype(dtype)
        for column, value in enumerate((20.0, -20.0, 0.0)):  # beyond what somebody may cut off, and nothing
            arrays["gate"][..., column : column + 1] = value
    return x, arrays
