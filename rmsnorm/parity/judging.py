"""One check: every case, circumstance and further question that a target can be asked, and what comes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from rmsnorm.identify import identify
from rmsnorm.identify.first import ASKED, first_parameters
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity import asking, beyond
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled
from rmsnorm.parity.eps import of_eps
from rmsnorm.parity.fitting import (
    applicable_cases,
    expect_in_groups,
    has_gradients,
    option_sets,
    requested_cases,
    uncompared,
)
from rmsnorm.parity.judge import Outcome, compare, failed, wrong_inverse_rms
from rmsnorm.parity.lines import skips
from rmsnorm.parity.refusals import Refusals, facts_of, levels_of
from rmsnorm.parity.report import sentences
from rmsnorm.specification import errors
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.target import TO_RETURN, WrongResult

_GRADIENTS: Final = {"x": "dx", "scale": "dscale", "bias": "dbias", "residual": "dresidual", "gate": "dgate"}


@dataclass
class Judging:
    """A target, what it should be, and what it has shown so far.

    Attributes:
        target, variant, types, group_size: what is asked, and in which dtypes of x.
        run: gets the comparisons and what was not compared.
        gradients, compiled, extremes, edges, all_cases: as of ``check``.
    """

    target: Target
    variant: Variant
    types: tuple[str, ...]
    run: Run
    group_size: int | None
    gradients: bool
    compiled: bool
    extremes: bool
    edges: bool
    all_cases: bool
    refusals: Refusals = field(default_factory=Refusals)
    elements: int = 0

    @property
    def differentiated(self) -> bool:
        """Whether gradients are compared."""
        return self.gradients and self.target.differentiable

    @property
    def is_quick(self) -> bool:
        """Whether it is asked fewer cases, as its library compiles each shape."""
        return self.target.bridge.compiles and not (self.all_cases or self.edges or self.extremes)

    def of_cases(self) -> bool:
        """Compare every case of ``cases.py`` that fits; whether it returned arrays of its library."""
        self._say_what_is_left_out()
        for called, data in applicable_cases(
            self.target, self.variant, self.types, self.run.skipped,
            extremes=self.extremes, group_size=self.group_size, quick=self.is_quick,
        ):  # fmt: skip
            comparisons = self._of_case(called, data)
            labels = (self.variant.name, data.x.dtype.name, data.case.name)
            if called.returned:
                came, wanted = " and ".join(sorted(called.returned)), called.bridge.array
                want = f"{wanted.__module__}.{wanted.__qualname__}"
                mend = TO_RETURN if came == "None" else "return y, or y and x + residual"
                sentence = f"it returns {came}, expected {want}; {mend}"
                self.run.records = labelled([failed("y", sentence)], *labels)
                return False
            if comparisons:
                self.run.records += labelled(comparisons, *labels)
        return True

    def _say_what_is_left_out(self) -> None:
        target, skipped = self.target, self.run.skipped
        if self.gradients and not target.differentiable:
            without = f"{target.framework} has no automatic differentiation"
            skipped.append(Skip("gradients", "", without if target.automatic else "it writes its results to arguments"))
        if self.is_quick and self.differentiated:
            skipped.append(Skip("gradients of most cases", "", "only with all_cases=True, or --all"))

    def _of_case(self, called: Target, data: Data) -> list[Comparison]:
        """The comparisons of a case that was answered; none where it was refused, which is noted."""
        case, dtype = data.case, data.x.dtype.name
        differentiated = self.gradients and called.differentiable and (not self.is_quick or has_gradients(case.name))
        called.noticed.forget()
        comparisons, refused = _comparisons(
            called, data, self.group_size, gradients=differentiated, compiled=self.compiled
        )
        if refused and case.edge and not (self.edges or called.returned):
            detail = next(comparison.detail for comparison in comparisons if comparison.quantity in refused)
            reason = f"x of shape {data.x.shape} is refused: {detail.partition(': ')[2] or detail}"
            self.run.skipped.append(Skip(case.name, dtype, reason, edge=True))
            comparisons = [comparison for comparison in comparisons if comparison.quantity not in refused]
            if not comparisons:
                return []
        if "y" in refused and not (called.returned or case.edge):
            self.refusals.refused(case.name, dtype, facts_of(data), levels_of(data), comparisons)
            return []
        self.refusals.answered(facts_of(data), levels_of(data))
        self._count(data.x.size)
        return comparisons

    def _count(self, elements: int) -> None:
        self.run.cases, self.elements = self.run.cases + 1, self.elements + elements

    def of_circumstances(self) -> None:
        """Compare calls in which every pair of circumstances occurs."""
        compiles = self.target.bridge.compiles
        for circumstance, question, answer in asking.in_circumstances(
            self.target, self.variant, self.types, gradients=self.differentiated, group_size=self.group_size,
            quick=compiles, strength=3 if self.all_cases and not compiles else 2,
        ):  # fmt: skip
            dtype, name = circumstance["x"], circumstance.name
            if isinstance(answer, str):
                self.refusals.refused(name, dtype, question.facts, circumstance.levels, [failed("y", answer)])
                continue
            self.refusals.answered(question.facts, circumstance.levels)
            self._count(question.order.size)
            self.run.records += labelled(answer, self.variant.name, dtype, name)

    def of_more(self, *, batch_invariant: bool, large: bool) -> None:
        """Ask what no single case can show."""
        run, types = self.run, self.types
        more = beyond.Beyond(
            self.target, self.variant, self.group_size, run.skipped, self.differentiated, self.compiled
        )  # fmt: skip
        answers = [(beyond.BATCHES, types[0], more.batches())] if batch_invariant else []
        if large:
            answers.append((beyond.LARGE.name, types[0], more.elements(types[0])))
        for name, dtype, comparisons in answers:
            run.records += labelled(comparisons, self.variant.name, dtype, name)

    def of_what_is_missing(self) -> None:
        """A failure for each case that was asked, and neither compared nor refused for a reason."""
        taken = option_sets(self.target.arguments)
        pairs = requested_cases(self.target, self.variant, self.types, extremes=self.extremes)
        answers_to = [pair for pair in pairs if pair not in self.refusals.cases or pair[0] in taken]
        for name, dtype, quantity, sentence in uncompared(self.target, self.run, answers_to) if self.elements else ():
            self.run.records += labelled([failed(quantity, sentence)], self.variant.name, dtype, name)

    def of_parameters(self) -> None:
        """Compare what a layer begins with, and what eps does."""
        run, name, target = self.run, self.variant.name, self.target
        if target.is_new and all(comparison.passed for comparison in run.records):
            run.records += labelled(_of_new(target, self.variant), name, ASKED, "first parameters")
        of_one = of_eps(target, self.variant, self.types, self.group_size)
        run.records += labelled(of_one, name, self.types[0], "eps")

    def conclude(self, quantities: Sequence[str], seconds: float) -> None:
        """The status of the run, and what the target is instead where it differs. ``quantities``: those that count."""
        run = self.run
        if quantities:
            run.records = [record for record in run.records if record.quantity in quantities]
            names = {record.quantity for record in run.records}
            absent = [failed(name, "it was compared in no case") for name in quantities if name not in names]
            run.records += labelled(absent, self.variant.name, "float32", "none")
        run.seconds = seconds
        run.conclude()
        if not self.elements and not run.failures:
            reasons = dict.fromkeys(reason for *_, reason in skips(run))
            raise errors.nothing_compared("check", self.target.name, reasons)
        if run.failures:
            try:
                run.identity = identify(self.target)
            except Exception as error:  # a failure of identify must not hide the differences
                run.message = f"identify failed: {type(error).__name__}: {error}"
            else:
                run.message = "; ".join(sentences(run, self.variant))


def _of_new(target: Target, variant: Variant) -> list[Comparison]:
    """What is wrong with y of a layer that has the parameters that it was made with; nothing where it takes no rows."""
    x = (8 * np.random.default_rng(23).normal(size=(4, target.width or 64))).astype(ASKED)
    own = {name: value for name, value in (("scale", 1 - variant.scale_offset), ("bias", 0.0))
           if name in target.arguments}  # fmt: skip
    gate = {"gate": np.full_like(x, 2.0)} if "gate" in target.arguments else {}
    if not own:
        return []
    try:
        one = {name: np.full(target.shape_of(name, x.shape), value, ASKED) for name, value in own.items()}
        with target.evaluating():
            y = target.forward(x, **gate), target.forward(-x, **gate), target.forward(x, **one, **gate)
    except TargetError:
        return []
    there, back, unit = (array.astype(np.float64) for array in y)
    _, sentences = first_parameters(there, back, unit, variant.scale_offset)
    return [failed("y", sentence) for sentence in sentences]


def _comparisons(
    target: Target, data: Data, group_size: int | None, *, gradients: bool, compiled: bool
) -> tuple[list[Comparison], set[str]]:
    """A comparison of each quantity, and those quantities for which the target raised and gave no wrong answer.

    It is that on the first way to call the target in which it differs, else raises, else on the first way.
    """
    counted = ("y", *tuple(_GRADIENTS.values()) * gradients)
    expected = expect_in_groups(data, counted, group_size)
    comparisons: dict[str, Comparison] = {}
    refused: set[str] = set()
    first: dict[str, Array] = {}
    for way, called, view, scope, differentiated in _ways(target, data, compiled=compiled):
        with scope:
            results, wrong, refusals = _results(called, view, gradients=gradients and differentiated)
        judged = [failed(name, sentence) for name, sentence in (refusals | wrong).items()]
        names = results if refusals or wrong else expected if gradients and differentiated else ("y",)
        same = {name for name, y in results.items() if name in first and _same(first[name], y)}
        wanted = {name: want for name, want in expected.items() if name in names and name not in same}
        for comparison in [*judged, *compare(Outcome({name: [y] for name, y in results.items()}), wanted)]:
            name, before = comparison.quantity, comparisons.get(comparison.quantity)
            answers = name not in refusals or name in results
            if before is None or (not comparison.passed and (before.passed or (name in refused and answers))):
                detail = f"{way}: {comparison.detail}" if way and comparison.detail else comparison.detail
                comparisons[name] = replace(comparison, detail=detail)
                refused = refused - {name} if answers else refused | {name}
        first = first or results
    if target.touched:
        touched = ", ".join(sorted(target.touched))
        comparisons, refused = {name: failed(name, f"inputs written to: {touched}") for name in comparisons}, set()
    return list(comparisons.values()), refused


def _same(one: Array, other: Array) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()


def _ways(
    target: Target, data: Data, *, compiled: bool
) -> Iterator[tuple[str, Target, Data, contextlib.AbstractContextManager[Any], bool]]:
    """The ways to call a target that must not change what it computes: name, target, data, context, differentiated.

    The first one has no name. All other circumstances of a call are those of ``circumstances.py``.
    """
    same = contextlib.nullcontext()
    yield "", target, data, same, True
    if compiled:
        yield "compiled", target.compiled, data, same, True


def _results(target: Target, data: Data, *, gradients: bool) -> tuple[dict[str, Array], dict[str, str], dict[str, str]]:
    """The quantities by their names, a sentence for what was returned instead, and one for what raised."""
    primals = (data.x, data.scale, data.bias)
    try:
        results = {"y": target.forward(*primals, **data.arrays)}
    except TargetError as error:
        sentence = {"y": str(error)}
        return ({}, sentence, {}) if isinstance(error, WrongResult) else ({}, {}, sentence)
    wrong = {} if target.second is None else _wrong_sum(target.second, data)
    wrong |= wrong_inverse_rms(target.noticed.inverse_rms, data)
    if not gradients:
        return results, wrong, {}
    try:
        inputs = {**dict(zip(("x", "scale", "bias"), primals, strict=True)), **data.arrays}
        derivatives = target.all_gradients(data.dy, **{name: a for name, a in inputs.items() if a is not None})
    except TargetError as error:
        return results, wrong, {"dx": str(error)}
    results |= {d: g for name, d in _GRADIENTS.items() if (g := derivatives.get(name)) is not None}
    return results, wrong, {}


def _wrong_sum(got: Array, data: Data) -> dict[str, str]:
    """A sentence on the second result where that is not x + residual, rounded once to its dtype."""
    want = add(data.x, data.residual, data.call.sum_dtype)
    if got.shape == want.shape and got.dtype == want.dtype and np.array_equal(got, want, equal_nan=True):
        return {}
    came, wanted = (errors.describe(a.shape, a.dtype.name) for a in (got, want))
    return {"y": f"the second result is another {came}, expected x + residual, {wanted}"}
