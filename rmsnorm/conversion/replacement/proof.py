"""Decides whether a layer may be replaced: what it computes, and that its replacement does the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.accuracy.bounds import bound
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.conversion.replacement.in_kit import Golden
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import UNSUPPORTED, NoNorm, Unproven, recognised
from rmsnorm.identify import Identity, Target, TargetError
from rmsnorm.identify.layout import find_axes, size_of_gain
from rmsnorm.identify.solve import identify_opened
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.targets.arguments import argument_named, means_eps
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import random_state_kept

_TIME: Final = 600.0  # seconds for identify
_LAST: Final = "only norms along the last axes are replaced"


class Proof(NamedTuple):
    """What a layer computes, and where."""

    norm: Norm
    identity: Identity


class Plain(NamedTuple):
    """A layer, and what makes the replacement of a copy."""

    theirs: Target
    replaced: Callable[[Norm], Target]


@random_state_kept()
def decide(
    target: Target,
    call: Callable[..., Any],
    replaced: Callable[[Norm], Target],
    plain: Plain | None = None,
) -> Proof:
    """What a layer computes, if its replacement computes the same.

    Args:
        target: the layer, or a copy of it.
        call: its own call, whose first parameter is x, and whose second one may be a gate.
        replaced: makes the replacement of a copy.
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
    return Proof(norm, identity)


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
    if norm.axes != tuple(range(-len(norm.axes), 0)):
        raise Unproven(f"it normalises axis {', '.join(map(str, norm.axes))}; {_LAST}")
    if not vector and (norm.scale or norm.bias):
        raise Unproven("its gain is one number, expected one for each element of a row")
    return replace(norm, variant=variant), identity


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


def require_no_arrays(attributes: Mapping[str, Any]) -> None:
    """The attributes of a layer, without its parameters and buffers, must be none that may change in place.

    Raises:
        Unproven: one is an array.
    """
    for name, value in attributes.items():
        if hasattr(value, "shape") and not isinstance(value, np.generic):
            raise Unproven(f"its {name} is no parameter or buffer, and may change where replace sees nothing of it")


def attributes_of_eps(attributes: Mapping[str, Any], eps: float | None) -> tuple[str, ...]:
    """The names of those attributes of a layer that hold its eps, which is this number."""
    return tuple(
        name for name, value in attributes.items()
        if means_eps(name) or (eps and isinstance(value, float) and math.isclose(value, eps, rel_tol=1e-3))
    )  # fmt: skip


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
