"""Calls a target in a circumstance, and compares what it returns with the golden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import USES_OF_INVERSE, bound
from rmsnorm.accuracy.rounding import cast
from rmsnorm.accuracy.terms import terms_of_dscale
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Array, Case, Data, call_of, make
from rmsnorm.parity.circumstances import NAMED, Circumstance, Question, case_of, circumstances, levels_for, question
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.equations import Steps
from rmsnorm.parity.fitting import adapted, in_groups, requires_gate, without_groups
from rmsnorm.parity.judge import Expected, Outcome, compare, expect, failed, further_error, golden
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.target import Called, WrongResult

_FLOATS: Final = ("x", "scale", "bias", "residual", "gate")
_FROZEN: Final = {  # what has no gradient
    "frozen gain": ("scale",), "frozen x": ("x", "residual", "gate"), "none": _FLOATS,
    "dh alone": ("scale", "bias", "gate"),
}  # fmt: skip


class Refused(Exception):
    """The target raised, or gave another dtype in a mode that may change it: the message says what."""


def in_circumstances(
    target: Target, variant: Variant, types: Sequence[str], *, group_size: int | None, **options: Any
) -> Iterator[tuple[Circumstance, Question, list[Comparison] | str]]:
    """The comparisons of every circumstance, or what the target raised in it; options as of ``questions``."""
    for sized, current in questions(target, variant, types, group_size=group_size, **options):
        try:
            comparisons = ask(sized, current, group_size)
        except Refused as refusal:
            yield current.circumstance, current, str(refusal)
        else:
            yield current.circumstance, current, comparisons


def questions(
    target: Target,
    variant: Variant,
    types: Sequence[str],
    *,
    gradients: bool,
    group_size: int | None,
    quick: bool = False,
    strength: int = 2,
    only: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[tuple[Target, Question]]:
    """Every circumstance, with the target as its shape needs it.

    ``only``: the levels of some factors that are asked, of those that the target takes and those of ``NAMED``.
    """
    types = [dtype for dtype in types if target.dtypes.get("x", dtype) == dtype]
    if not types:
        return
    gate = "gate" in target.arguments and _requires_gate(target, variant, types[0])
    levels = levels_for(
        target, types, gradients=gradients, group_size=group_size, required_gate=gate, quick=quick
    )  # fmt: skip
    for factor, some in only.items():
        known = (*levels[factor], *NAMED.get(factor, ()))
        levels[factor] = tuple(level for level in known if level in some) or levels[factor][:1]
    for circumstance in circumstances(levels, strength=strength):
        case = case_of(circumstance, variant)
        sized, fitting = adapted(target, case, group_size, every_row=True)
        yield sized, question(circumstance, replace(fitting, scale=case.scale, bias=case.bias), variant)


def _requires_gate(target: Target, variant: Variant, dtype: str) -> bool:
    sized, case = adapted(target, Case("gate", (4, 64), (variant.name,), ""), None)
    return requires_gate(sized, make(case, variant, dtype))


def ask(target: Target, question: Question, group_size: int | None) -> list[Comparison]:
    """A comparison of each quantity that the circumstance has.

    Raises:
        Refused: the target raised.
    """
    level, data = question.circumstance, question.data
    target = replace(target, mode=level["mode"] if level["mode"] in target.bridge.modes else "")
    arrays = {name: array for name in (*_FLOATS, "mask") if (array := getattr(data, name)) is not None}
    named = {option for option in ("gate", "mask", "residual") if level[option] == option}
    if not named <= arrays.keys() <= named | {"x", "scale", "bias", "gate"}:
        raise RuntimeError(f"{level.name!r} was made with {', '.join(arrays)}")
    leaves = [name for name in _FLOATS if name in arrays and name not in _FROZEN.get(level["gradients"], ())]
    target.noticed.forget()
    try:
        with target.in_mode(level["mode"] == "training"):
            called = _called(target, arrays, leaves, data, level["history"])
            results = {"y": called.y}
            total = called.sum
            if leaves:
                dy = None if level["gradients"] == "dh alone" and total is not None else data.dy
                dh = data.dh if total is not None else None
                times = 2 if level["history"] == "a second backward pass" else 1
                derivatives = [called.gradients(dy, dh) for _ in range(times)][-1]
                results |= {f"d{name}": g for name in leaves if (g := derivatives.get(name)) is not None}
                plain = target.called(arrays).y
    except WrongResult as error:
        return [failed("y", str(error))]
    except TargetError as error:
        raise Refused(str(error)) from error
    names = ["y", *(f"d{name}" for name in leaves)]
    expected = expectations(question, group_size, names, with_sum=total is not None)
    if level["mode"] == "autocast" and results["y"].dtype != expected["y"].value.dtype:
        raise Refused(f"in autocast y is {results['y'].dtype}, and not {expected['y'].value.dtype}")
    comparisons = compare(Outcome({name: [array] for name, array in results.items()}), expected)
    if leaves and plain.tobytes() != results["y"].tobytes() and comparisons[0].passed:
        different = int(np.sum(plain != results["y"]))
        comparisons[0] = failed(
            "y", f"{different} of {plain.size} elements differ from those of a call without gradients"
        )
    if total is not None:
        comparisons += _sums(total, question)
    if target.touched:
        touched = ", ".join(sorted(target.touched))
        comparisons = [failed(entry.quantity, f"inputs written to: {touched}") for entry in comparisons]
    return comparisons


def _called(target: Target, arrays: Mapping[str, Array], leaves: Sequence[str], data: Data, history: str) -> Called:
    """The call that is judged, after what else happens in the history, or before it."""
    if history == "called again":
        before = target.called(arrays, leaves)
        if leaves:
            before.gradients(data.dy)
    if history == "after another shape":
        has_rows = data.x.ndim > len({*data.call.axes, *data.call.feature_axes})
        of_rows = [name for name in arrays if has_rows and name not in ("scale", "bias")]
        fewer = {name: _another_shape(array) if name in of_rows else array for name, array in arrays.items()}
        target.called(fewer, leaves)
    called = target.called(arrays, leaves)
    if history in ("two before both backward passes", "y kept"):
        other = target.called({**arrays, "x": np.ascontiguousarray(-np.flip(arrays["x"]))}, leaves)
        if leaves and history != "y kept":
            other.gradients(data.dy)
    return called


def _another_shape(array: Array) -> Array:
    """Fewer of its rows, or the same one twice."""
    return array[:1] if len(array) > 1 else np.concatenate([array, array])


def expectations(
    question: Question, group_size: int | None, names: list[str], *, with_sum: bool
) -> dict[str, Expected]:
    """What is expected of each quantity: y by the golden, gradients by the equations in float64.

    Both are computed for the different rows, and repeated as often as each is there. A sum over rows has each row's
    terms as often. Float64 is exact enough for results of at most 32 bits. The question keeps them for other targets.
    """
    key = (group_size, *names, with_sum)
    if key not in question.known:
        question.known[key] = _expectations(question, group_size, names, with_sum=with_sum)
    return question.known[key]


def _expectations(
    question: Question, group_size: int | None, names: list[str], *, with_sum: bool
) -> dict[str, Expected]:
    rows = question.rows
    if not with_sum:
        rows = replace(rows, dh=None)
    few = rows if group_size is None else in_groups(rows, group_size)
    call = call_of(replace(few.case, shape=(*question.lead, *few.x.shape[1:])), few)
    with np.errstate(all="ignore"):
        steps = Steps(few, {})
        of_rows = {"dx": steps.dx, "dresidual": steps.dx, "dgate": steps.dgate if "dgate" in names else None}
        if question.circumstance["gradients"] == "dh alone" and few.dh is not None:  # of x + residual: whatever y is
            of_rows = dict.fromkeys(of_rows, steps.wide("dh"))
        values = {name: cast(of_rows[name], _dtype(few, name)) for name in names if name in of_rows}
        expected = expect(few, values=golden(few, ("y",)) | values, automatic=True)
        expected = {
            name: want.changed(
                lambda array: question.spread(without_groups(np.broadcast_to(array, few.x.shape), group_size))
            )
            for name, want in expected.items()
        }
        weights = question.counts.reshape(-1, *[1] * (few.x.ndim - 1))
        least = 0.0 if call.norm_dtype is None else dtypes.smallest_normal(call.norm_dtype)
        of_scale = terms_of_dscale(np.abs(steps.terms), np.abs(steps.v), least)
        for name, terms, sizes in (("dscale", steps.terms, of_scale), ("dbias", steps.v, np.abs(steps.v))):
            if name in names:
                of_sum = _of_sum(name, few, call, weights * terms, weights * sizes)
                expected[name] = of_sum.changed(lambda array: without_groups(array, group_size))
    return expected


def _of_sum(name: str, few: Data, call: Call, terms: Array, sizes: Array) -> Expected:
    """What is expected of a sum over rows, of its terms and their sizes."""
    axes, dtype = few.call.shared_axes, _dtype(few, name)
    value, size = np.sum(terms, axis=axes), np.sum(sizes, axis=axes)
    limit = bound(name, call, dtype, residual=few.residual is not None, automatic=True)
    error = further_error(few, automatic=True).max(initial=0.0) * USES_OF_INVERSE[name] / limit.ratio
    unit = np.maximum(size * (dtypes.unit_roundoff(dtype) + error), dtypes.smallest_subnormal(dtype) / 2)
    return Expected(cast(value, dtype), unit, limit)


def _dtype(few: Data, name: str) -> str:
    return str(getattr(few, name.removeprefix("d")).dtype.name)


def _sums(total: Array, question: Question) -> list[Comparison]:
    """The second result where that is not x + residual, rounded once to its dtype."""
    rows = question.rows
    want = question.spread(add(rows.x, rows.residual, rows.call.sum_dtype))
    if total.shape == want.shape and total.dtype == want.dtype and np.array_equal(total, want, equal_nan=True):
        return []
    return [failed("y", f"the second result is another {total.dtype} of shape {total.shape}, expected x + residual")]
