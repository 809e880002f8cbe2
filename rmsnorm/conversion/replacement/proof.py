"""Decides whether a layer may be replaced: identify names it, and check asks it and its replacement for the same."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import UNSUPPORTED, NoNorm, Unproven, recognised
from rmsnorm.identify import Identity, Target
from rmsnorm.identify.search import identify_opened
from rmsnorm.parity.asking import Refused, ask, in_circumstances
from rmsnorm.parity.comparison import Run, labelled
from rmsnorm.parity.design import AXES
from rmsnorm.parity.lines import places, shortened
from rmsnorm.targets.arguments import argument_named, means_eps
from rmsnorm.targets.target import WIDTH, random_state_kept

_TIME: Final = 600.0  # seconds for identify
_MOST: Final = 5  # axes of x
_TYPES: Final = ("float32", "bfloat16", "float16")
_FEW: Final = {  # what every number of axes is asked
    "gain": ("gain of x's dtype",), "layout": ("contiguous",), "gain's memory": ("dense gain",), "values": ("normal",),
    "gradients": ("all",), "dy": ("dense dy",), "mode": ("plain",), "history": ("first call",),
}  # fmt: skip
_BOTH_MODES: Final = {**_FEW, "mode": ("plain", "training")}
_VALUES: Final = ("heavy tails", "zeros", "NaN in a row", "zeros in the gain")
_CALLS: Final = {  # of PyTorch, so that a kind of norm takes about two seconds
    "rows": ("1 row", "few rows", "257 rows", "thousands of rows", "8,209 rows"),
    "width": ("33", "768", "1024", "4096"), "dy": ("dense dy",),
    "gain": ("gain of x's dtype", "gain float32", "no gain"),
}  # fmt: skip


class Proof(NamedTuple):
    """What a layer computes, and where."""

    norm: Norm
    identity: Identity


@random_state_kept()
def decide(
    target: Target, call: Callable[..., Any], names: list[str], own: Mapping[str, Any],
    replaced: Callable[[Norm], Target],
) -> Proof:  # fmt: skip
    """What a layer computes, if its replacement computes the same.

    Args:
        target: the layer, or a copy of it.
        call: its own call, whose first parameter is x, and whose second one may be a gate.
        names: of its parameters and buffers.
        own: its other attributes.
        replaced: makes the replacement of a copy.

    Raises:
        Unproven: the layer must stay as it is, and why.
    """
    _require_gain_alone(target, names)
    require_no_arrays(own)
    gate = _gate_parameter(call)
    if "gate_vector" in target.arguments or ("gate" in target.arguments and gate is None):
        raise Unproven(UNSUPPORTED)
    target = replace(target, arguments=tuple(a for a in ("scale", "bias", "gate") if a in target.arguments))
    identity = identify_opened(target, gradients=False, time_limit=_TIME)
    if target.returned:
        raise (NoNorm if gate is None else Unproven)(f"it returns {' and '.join(sorted(target.returned))}")
    if not identity.answered:
        raise NoNorm(f"it cannot be called with x alone: {'; '.join(identity.defects)}{_may_need(call, gate)}")
    norm = _norm(target, identity, first_parameter(call), gate)
    try:
        ours = replaced(norm)
    except Exception as error:  # of the layer's class, which may do anything when it is inherited from
        raise Unproven(f"it cannot be replaced ({type(error).__name__}: {error})") from None
    pair = _Pair(target, replace(ours, arguments=target.arguments), norm)
    ranks = tuple(rank for rank in range(len(norm.sizes), _MOST + 1) if pair.agrees_on_few(rank))
    if not ranks:
        raise NoNorm("it answers in none of the circumstances of a call that check tries")
    pair.agrees_on_more(ranks)
    return Proof(replace(norm, ranks=ranks, of_eps=_attributes_of_eps(own, norm.known.eps)), identity)


def _norm(target: Target, identity: Identity, x: str, gate: str | None) -> Norm:
    """What a layer computes, of the variant that identify has found.

    Raises:
        Unproven: it is no RMSNorm, or one along other axes than the last ones.
    """
    if identity.kind == "rmsnorm" and not identity.last_axes:
        where = f"axis {', '.join(map(str, identity.axes))} of {identity.rank}"
        raise Unproven(f"it normalises {where}; only norms along the last axes are replaced")
    variant, group = recognised(identity, gated=gate is not None), identity["group_size"]
    width = target.width or (2 * group if group else WIDTH)  # a layer without a gain may have a number of groups
    shape = (*[2] * (identity.rank - 1), width)
    sizes = next((target.shape_of(name, shape) for name in ("scale", "bias") if name in target.arguments), (width,))
    if len(sizes) != len(identity.axes) or (math.prod(sizes) == 1 < width):
        raise Unproven(f"its gain has the shape {sizes}, expected one number for each element of a row")
    axes = tuple(range(-len(sizes), 0))
    names = target.names.get("scale"), target.names.get("bias")
    return Norm(axes, axes, *names, x, variant=variant, sizes=sizes, gate=gate, group=group)


class _Pair:
    """A layer and its replacement, both of which are asked for what the golden computes.

    Each question says whether the layer takes such calls at all, and raises Unproven where it or its replacement
    differs by more than the bounds of ``check``.
    """

    def __init__(self, theirs: Target, ours: Target, norm: Norm) -> None:
        known: dict[str, Any] = {"width": math.prod(norm.sizes), "shape_of": lambda argument, shape: norm.sizes}
        if norm.scale is None and norm.bias is None and norm.group is None:  # of any width
            known = {}
        self.theirs, self.ours, self.norm = replace(theirs, **known), replace(ours, **known), norm

    def agrees_on_few(self, rank: int) -> bool:
        """On few rows of x with so many axes, in every dtype; where shapes are compiled, of most axes alone."""
        answers = False
        for dtype in _TYPES if rank == _MOST or not self.theirs.bridge.compiles else _TYPES[:1]:
            # Of float16 in which all is computed, the derivative of 1 / rho overflows for rows that are small.
            narrow = dtype == "float16" and self.norm.known.rounding == "input_dtype"
            levels = {**_FEW, "values": ("size 1",)} if narrow else _FEW
            answers |= self._agrees([rank], levels if dtype != _TYPES[0] else _BOTH_MODES, [dtype])
        return answers

    def agrees_on_more(self, ranks: Sequence[int]) -> None:
        """On rows of zeros, infinity, NaN and outliers; of PyTorch in the circumstances of a call.

        Others compile each shape for minutes.
        """
        self._agrees(ranks[-1:], {**_BOTH_MODES, "values": _VALUES}, _TYPES[:1])
        # A row with infinity has no gradient: what comes in its place depends on the order of the operations.
        no_gradients = {"values": ("zeros and infinity in rows",), "gradients": ("none",)}
        self._agrees(ranks[-1:], {**_BOTH_MODES, **no_gradients}, _TYPES[:1])
        if self.theirs.framework == "torch":
            # In 16 bits the sums of one that computes in the dtype of x are not exact enough for the kit's bounds.
            types = _TYPES[:1] if self.norm.known.rounding == "input_dtype" else _TYPES
            self._agrees(ranks, _CALLS, types)
            self._agrees(ranks[-1:], {**_FEW, "dy": ("expanded dy",), "rows": ("few rows", "257 rows")}, types)

    def _agrees(self, ranks: Sequence[int], levels: Mapping[str, Sequence[str]], types: Sequence[str]) -> bool:
        """In pairs of these levels, of those factors of which not all are asked."""
        norm, variant = self.norm, self.norm.known
        only = {
            "rows": ["1 row" if [*ranks] == [len(norm.sizes)] else "few rows"], **levels,
            "axes": [level for level, rank in AXES.items() if rank + len(norm.sizes) - 1 in ranks],
            "gate": ["gate"] if norm.gate else ["no gate"],  # without one it runs its own code
        }  # fmt: skip
        only.setdefault("width", [str(self.theirs.width or WIDTH)])
        runs = Run(self.theirs.framework), Run(self.theirs.framework)
        for theirs, ours in self._ways():
            for circumstance, question, answer in in_circumstances(
                theirs, variant, types, gradients=theirs.differentiable, group_size=norm.group, only=only
            ):
                if theirs.returned:
                    raise Unproven(f"it returns {' and '.join(sorted(theirs.returned))}")
                if isinstance(answer, str):  # it does not take such a call: the replacement may
                    continue
                try:
                    answers = answer, ask(ours, question, norm.group)
                except Refused as error:
                    raise Unproven(f"its replacement fails in {circumstance.name!r}: {error}") from None
                for run, comparisons in zip(runs, answers, strict=True):
                    run.records += labelled(comparisons, variant.name, circumstance["x"], circumstance.name)
        for run, name in zip(runs, ("it", "its replacement"), strict=True):
            if run.failures:
                agrees = f"{name} agrees on the rows that identify tries, and not in {places(run)}"
                raise Unproven(f"{agrees}: {' '.join(shortened(run.failures[0], self.theirs.name).split())}")
        return bool(runs[0].records)

    def _ways(self) -> Iterator[tuple[Target, Target]]:
        """Both; where shapes are compiled, as one program in place of one for each operation, for each mode."""
        if not self.theirs.bridge.compiles:
            yield self.theirs, self.ours
            return
        for mode in (True, False) if self.theirs.training else (False,):
            with self.theirs.in_mode(mode), self.ours.in_mode(mode):
                theirs, ours = (replace(each.compiled, training=None) for each in (self.theirs, self.ours))
                yield theirs, ours


def _require_gain_alone(target: Target, names: list[str]) -> None:
    """Of the parameters and buffers with these names, each must be the gain or the bias.

    Raises:
        NoNorm, Unproven: another one is there.
    """
    named_eps = [name for name in names if means_eps(name)]
    if named_eps and len(names) == len(named_eps) + 1:
        raise Unproven(f"its {named_eps[0]} is a parameter or buffer, which may change, expected a number of Python")
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


def _attributes_of_eps(attributes: Mapping[str, Any], eps: float | None) -> tuple[str, ...]:
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


def _may_need(call: Callable[..., Any], gate: str | None) -> str:
    """The arguments that it may be called without, and that it may need none the less."""
    others = list(inspect.signature(call).parameters.values())[1:]
    none = [parameter.name for parameter in others if parameter.default is None and parameter.name != gate]
    return f"; does its call need {', '.join(none)}?" if none else ""


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
