"""Calls a target in a circumstance, and compares what it returns with the golden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Array, Case, Data, call_of, make
from rmsnorm.parity.comparison import Comparison
from rmsnorm.parity.design import NAMED, Circumstance, circumstances, levels_for
from rmsnorm.parity.equations import Steps
from rmsnorm.parity.fitting import adapted, in_groups, requires_gate, without_groups
from rmsnorm.parity.judge import Expected, Outcome, compare, expect, failed, golden, wrong_inverse_rms
from rmsnorm.parity.questions import Question, case_of, in_memory, question
from rmsnorm.parity.sums import OF_ROWS, Sums, values_of
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.calling import with_values
from rmsnorm.targets.target import Called, WrongResult

_FLOATS: Final = ("x", "scale", "bias", "residual", "gate")
_FROZEN: Final = {  # what has no gradient
    "frozen gain": ("scale",), "frozen x": ("x", "residual"), "none": _FLOATS,
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
    extremes: bool = False,
    strength: int = 2,
    only: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[tuple[Target, Question]]:
    """Every circumstance, with the target as its shape needs it.

    ``only``: the levels of some factors that are asked, of those that the target takes and those of ``NAMED``.
    ``quick``, ``extremes``: fewer levels, and more values, as of ``levels_for``. ``strength``: 2 for pairs of levels, 3
    for triples and for very many rows.
    """
    types = [dtype for dtype in types if target.dtypes.get("x", dtype) == dtype]
    if not types:
        return
    gate = "gate" in target.arguments and _requires_gate(target, variant, types[0])
    levels = levels_for(
        target, types, gradients=gradients, group_size=group_size, required_gate=gate, quick=quick, extremes=extremes
    )  # fmt: skip
    for factor, some in only.items():
        known = (*levels[factor], *NAMED.get(factor, ()))
        levels[factor] = tuple(level for level in known if level in some) or levels[factor][:1]
    for circumstance in circumstances(levels, strength=strength):
        case = case_of(circumstance, variant)
        eps = case.options.get("eps")
        called = target if eps is None else with_values(target, optional=True, eps=eps)
        sized, fitting = adapted(called, case, group_size)
        yield sized, question(circumstance, replace(fitting, scale=case.scale, bias=case.bias), variant)


def _requires_gate(target: Target, variant: Variant, dtype: str) -> bool:
    sized, case = adapted(target, Case("gate", (4, 64)), None)
    return requires_gate(sized, make(case, variant, dtype))


class Answer(NamedTuple):
    """What a target returned in a circumstance: y and gradients by their names, and what came beside y.

    Attributes:
        results: of each quantity all that was computed: y with gradients and without.
        names: of the quantities that must be there.
        total: x + residual; inverse_rms: 1 / rho; None where they did not come back.
        wrong: why the result is no y, empty where it is one.
    """

    results: Mapping[str, list[Array]]
    names: Sequence[str]
    total: Array | None = None
    inverse_rms: Array | None = None
    wrong: str = ""


def answer(target: Target, question: Question) -> Answer:
    """Call a target in a circumstance.

    Raises:
        Refused: it raised, or gave another dtype in a mode that may change it.
    """
    level, data = question.circumstance, question.data
    target = replace(target, mode=level["mode"] if level["mode"] in target.bridge.modes else "")
    arrays = {name: array for name in (*_FLOATS, "mask") if (array := getattr(data, name)) is not None}
    named = {option for option in ("gate", "mask", "residual") if level[option] != f"no {option}"}
    if not named <= arrays.keys() <= named | {"x", "scale", "bias", "gate"}:
        raise RuntimeError(f"{level.name!r} was made with {', '.join(arrays)}")
    leaves = [name for name in _FLOATS if name in arrays and name not in _FROZEN.get(level["gradients"], ())]
    names = ["y", *(f"d{name}" for name in leaves)]
    target.noticed.forget()
    try:
        with target.in_mode(level["mode"] == "training"):
            called = _called(target, arrays, leaves, question)
            results, total = {"y": [called.y]}, called.sum
            if leaves:
                dy = None if level["gradients"] == "dh alone" and total is not None else data.dy
                dh = data.dh if total is not None else None
                times = 2 if level["history"] == "a second backward pass" else 1
                derivatives = [called.gradients(dy, dh) for _ in range(times)][-1]
                results |= {f"d{name}": [g] for name in leaves if (g := derivatives.get(name)) is not None}
                if level["history"] == "results kept":
                    target.called(_another(arrays), leaves).gradients(dy, dh)
                results["y"].append(target.called(arrays).y)  # without gradients
    except WrongResult as error:
        return Answer({}, names, wrong=str(error))
    except TargetError as error:
        raise Refused(str(error)) from error
    if level["mode"] == "autocast" and results["y"][0].dtype != (want := question.rows.call.result_dtype):
        raise Refused(f"in autocast y is {results['y'][0].dtype}, and not {want}")
    return Answer(results, names, total, called.inverse_rms)


def ask(target: Target, question: Question, group_size: int | None) -> list[Comparison]:
    """A comparison of each quantity that the circumstance has.

    Raises:
        Refused: the target raised.
    """
    given = answer(target, question)
    if given.wrong:
        return [failed("y", given.wrong)]
    comparisons = judged(question, group_size, given)
    if given.total is not None:
        comparisons += _sums(given.total, question)
    if given.inverse_rms is not None:
        comparisons += _inverse(given.inverse_rms, question, group_size)
    if target.touched:
        touched = ", ".join(sorted(target.touched))
        comparisons = [failed(entry.quantity, f"inputs written to: {touched}") for entry in comparisons]
    return comparisons


def judged(question: Question, group_size: int | None, given: Answer) -> list[Comparison]:
    """The comparison of each quantity. What is outside of its interval may hold if terms are added one by one."""
    outcome, with_sum = Outcome(given.results), given.total is not None
    comparisons = compare(outcome, expectations(question, group_size, given.names, with_sum=with_sum))
    wrong = [entry.quantity for entry in comparisons if not entry.passed]
    if not wrong:
        return comparisons
    wider = expectations(question, group_size, wrong, with_sum=with_sum, in_sequence=True)
    held = {entry.quantity for entry in compare(outcome, wider) if entry.passed}
    return [
        replace(entry, passed=True, detail="", inexact=entry.detail) if entry.quantity in held else entry
        for entry in comparisons
    ]


def _called(target: Target, arrays: Mapping[str, Array], leaves: Sequence[str], question: Question) -> Called:
    """The call that is judged, after what else happens in the history, or before it."""
    data, history, other = question.data, question.circumstance["history"], _another(arrays)
    if history == "called again":
        before = target.called(arrays, leaves)
        if leaves:
            before.gradients(data.dy)
    if history == "after another shape":
        has_rows = data.x.ndim > len({*data.call.axes, *data.call.feature_axes})
        of_rows = [name for name in arrays if has_rows and name not in ("scale", "bias") and arrays[name].ndim > 1]
        fewer = {name: _another_shape(array) if name in of_rows else array for name, array in arrays.items()}
        target.called(fewer, leaves)
    if history == "gain and x updated in place":
        layout = question.circumstance["layout"].removeprefix("x alone ")
        changed = {"scale": arrays["scale"] + arrays["scale"].dtype.type(1)}
        if layout not in ("x expanded", "read-only"):  # to which nobody writes
            changed["x"] = in_memory(other["x"], layout)
        sent = target.called({**arrays, **changed}).sent
        for name in changed:
            target.bridge.overwrite(sent[name], arrays[name])
        return target.called(arrays, leaves, sent=sent)
    if history == "two threads at once":
        wide = data.x.dtype == np.float64
        with target.bridge.scope(wide), ThreadPoolExecutor(2) as threads:  # modes of the process: else each puts back
            return next(threads.map(lambda each: target.called(each, leaves), [arrays, other, other, other]))
    called = target.called(arrays, leaves)
    if history in ("two before both backward passes", "results kept"):
        after = target.called(other, leaves)
        if leaves and history != "results kept":
            after.gradients(data.dy)
    return called


def _another(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arguments with another x, whose y and dx are other ones."""
    return {**arrays, "x": np.ascontiguousarray(-np.flip(arrays["x"]))}


def _another_shape(array: Array) -> Array:
    """Fewer of its rows, or the same one twice."""
    return array[:1] if len(array) > 1 else np.concatenate([array, array])


def expectations(
    question: Question, group_size: int | None, names: Sequence[str], *, with_sum: bool, in_sequence: bool = False
) -> dict[str, Expected]:
    """What is expected of each quantity: y by the golden, gradients by the equations in float64.

    Both are computed for the different rows, and repeated as often as each is there. A sum over rows has each row's
    terms as often. Float64 is exact enough for results of at most 32 bits; of float64 x, whose rows all differ, the
    golden computes the gradients. ``in_sequence``: where terms may be added one by one. The question keeps them.
    """
    key = (group_size, *names, with_sum, in_sequence)
    if key not in question.known:
        rows = question.rows if with_sum else replace(question.rows, dh=None)
        few = rows if group_size is None else in_groups(rows, group_size)
        with np.errstate(all="ignore"):
            make_expected = _of_float64 if few.x.dtype == np.float64 else _of_float32
            question.known[key] = make_expected(question, few, group_size, names, in_sequence)
    return question.known[key]


def _of_float64(
    question: Question, few: Data, group_size: int | None, names: Sequence[str], in_sequence: bool
) -> dict[str, Expected]:
    expected = expect(few, names, automatic=True, in_sequence=in_sequence)
    return {name: _spread(question, few, name, want, group_size) for name, want in expected.items()}


def _of_float32(
    question: Question, few: Data, group_size: int | None, names: Sequence[str], in_sequence: bool
) -> dict[str, Expected]:
    call = call_of(replace(few.case, shape=(*question.lead, *few.x.shape[1:])), few)
    alone = question.circumstance["gradients"] == "dh alone" and few.dh is not None  # of x + residual: whatever y is
    steps = Steps(few, {"dx": lambda s, dx: s.wide("dh")} if alone else {})
    values = golden(few, [name for name in names if name == "y"])  # y comes first
    values |= values_of(steps, [name for name in names if name in OF_ROWS])
    expected = expect(few, values=values, automatic=True, in_sequence=in_sequence)
    expected = {name: _spread(question, few, name, want, group_size) for name, want in expected.items()}
    sums = Sums(call, [name for name in names if name in ("dscale", "dbias")], in_sequence)
    sums.add(steps, question.counts.reshape(-1, *[1] * (few.x.ndim - 1)), question.order)
    for name in sums.names:
        expected[name] = sums.expected(name, few).changed(lambda array: without_groups(array, group_size))
    return expected


def _spread(question: Question, few: Data, name: str, want: Expected, group_size: int | None) -> Expected:
    """What is expected of every row of x, of what is expected of the different ones; a sum over rows as it is."""
    if name in ("dscale", "dbias"):
        return want.changed(lambda array: without_groups(array, group_size))
    want = want.changed(lambda array: without_groups(np.broadcast_to(array, few.x.shape), group_size))
    return replace(want, order=question.order, lead=question.lead)


def _sums(total: Array, question: Question) -> list[Comparison]:
    """The second result where that is not x + residual, rounded once to its dtype."""
    rows = question.rows
    want = question.spread(add(rows.x, rows.residual, rows.call.sum_dtype))
    if total.shape == want.shape and total.dtype == want.dtype and np.array_equal(total, want, equal_nan=True):
        return []
    return [failed("y", f"the second result is another {total.dtype} of shape {total.shape}, expected x + residual")]


def _inverse(got: Array, question: Question, group_size: int | None) -> list[Comparison]:
    """A failure where 1 / rho, which may have any axes, is not the golden's in its own dtype."""
    if not got.size:
        return []
    rows = question.rows if group_size is None else in_groups(question.rows, group_size)
    want = expect(rows, ("inverse_rms",), automatic=True)["inverse_rms"]
    every = want.changed(lambda array: array.reshape(len(rows.x), -1)[question.order])
    if got.size != every.value.size:
        return []
    return wrong_inverse_rms(got, every)
