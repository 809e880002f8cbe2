"""One check: every question that a target is asked, and what comes of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from rmsnorm.identify import identify
from rmsnorm.parity import asking
from rmsnorm.parity.batches import BATCHES, batches
from rmsnorm.parity.circumstances import EDGES, OPTIONS, Circumstance
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled
from rmsnorm.parity.first import ASKED, first_parameters
from rmsnorm.parity.judge import failed
from rmsnorm.parity.lines import skips
from rmsnorm.parity.questions import Question
from rmsnorm.parity.refusals import Refusals
from rmsnorm.parity.report import sentences
from rmsnorm.specification import errors
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.target import TO_RETURN

_QUICK: Final = 1  # the strength with which fewer levels are asked


@dataclass
class Judging:
    """A target, what it should be, and what it has shown so far.

    Attributes:
        target, variant, types, group_size: what is asked, and in which dtypes of x.
        run: gets the comparisons and what was not compared.
        gradients, compiled, extremes, strength: as of ``check``.
    """

    target: Target
    variant: Variant
    types: tuple[str, ...]
    run: Run
    group_size: int | None
    gradients: bool
    compiled: bool
    extremes: bool
    strength: int
    refusals: Refusals = field(default_factory=Refusals)
    elements: int = 0

    def ask(self, *, batch_invariant: bool) -> None:
        """Everything: the circumstances, those of the compiled target, the first parameters, and what was asked for."""
        self._say_what_is_left_out()
        if not self._circumstances(self.target):
            return
        self.refusals.conclude(self.run, self.target, self.variant, self.group_size)
        if not self.elements:  # it raised in every call: the edges say nothing
            self.run.skipped = [skip for skip in self.run.skipped if not skip.edge]
        if self.compiled:
            self._circumstances(self.target.compiled, "compiled: ")
        if not self.elements:
            return
        if self.target.is_new and all(comparison.passed for comparison in self.run.records):
            self._add(first_parameters(self.target, self.variant), ASKED, "first parameters")
        if batch_invariant:
            self._batches(self.target)
            if self.compiled:
                self._batches(self.target.compiled)

    def _batches(self, target: Target) -> None:
        differentiated = self.gradients and target.differentiable
        try:
            answers = batches(target, self.variant, self.types, self.group_size, gradients=differentiated)
        except TargetError as error:
            self.run.skipped.append(Skip(BATCHES, "", str(error)))
        else:
            self._add(answers, self.types[0], BATCHES)

    def _add(self, comparisons: Sequence[Comparison], dtype: str, name: str) -> None:
        self.run.records += labelled(comparisons, self.variant.name, dtype, name)

    def _say_what_is_left_out(self) -> None:
        target, skipped = self.target, self.run.skipped
        if self.gradients and not target.differentiable:
            without = f"{target.framework} has no automatic differentiation"
            skipped.append(Skip("gradients", "", without if target.automatic else "it writes its results to arguments"))
        if not self.extremes:
            reason = "only with extremes=True, or --extremes"
            skipped += [Skip(level, "", reason) for level in ("huge", "tiny")]
        only = target.dtypes.get("x")
        if only not in (None, *self.types):
            skipped.append(Skip("every call", "", f"it takes x in {only} alone"))
        for option in OPTIONS:
            if option not in target.arguments:
                skipped.append(Skip(option, "", "it has no argument of that name"))
        if self.strength == _QUICK:
            skipped.append(Skip("some rows, widths and calls before", "", "only with strength=2 or more, or --all"))

    def _circumstances(self, target: Target, words: str = "") -> bool:
        """Compare calls in which every pair of circumstances occurs; whether it returned arrays of its library."""
        for circumstance, question, answer in asking.in_circumstances(
            target, self.variant, self.types, gradients=self.gradients and target.differentiable,
            group_size=self.group_size, quick=self.strength == _QUICK or bool(words), extremes=self.extremes,
            strength=max(2, self.strength if not words else 2),
        ):  # fmt: skip
            dtype, name = circumstance["x"], circumstance.name
            if target.returned:
                came, wanted = " and ".join(sorted(target.returned)), target.bridge.array
                sentence = f"it returns {came}, expected {wanted.__module__}.{wanted.__qualname__}; {self._mend(came)}"
                self.run.message = sentence
                self.run.records = labelled([failed("y", sentence)], self.variant.name, dtype, name)
                return False
            if isinstance(answer, str):
                self._refused(circumstance, question, words + answer)
                continue
            self.refusals.answered(question.facts, circumstance.levels)
            self.run.cases, self.elements = self.run.cases + 1, self.elements + question.order.size
            self._add([replace(one, detail=one.detail and words + one.detail) for one in answer], dtype, name)
        return True

    @staticmethod
    def _mend(came: str) -> str:
        return TO_RETURN if came == "None" else "return y, or y and x + residual"

    def _refused(self, circumstance: Circumstance, question: Question, message: str) -> None:
        """Note an exception: one of an edge is no failure unless the extremes are asked for."""
        edges = [level for level in circumstance.levels.values() if level in EDGES]
        if edges and not self.extremes:
            reason = f"x of shape {question.data.x.shape} is refused: {message.partition(': ')[2] or message}"
            if (edges[0], circumstance["x"]) not in {(skip.case, skip.dtype) for skip in self.run.skipped}:
                self.run.skipped.append(Skip(edges[0], circumstance["x"], reason, edge=True))
        else:
            self.refusals.refused(circumstance.name, circumstance["x"], question.facts, circumstance.levels, message)

    def conclude(self, quantities: Sequence[str], exact: bool, seconds: float) -> None:
        """The status of the run, and what the target is instead where it differs. ``quantities``: those that count."""
        run = self.run
        if exact:
            run.records = [
                replace(record, passed=False, detail=record.inexact) if record.inexact else record
                for record in run.records
            ]
        if quantities:
            run.records = [record for record in run.records if record.quantity in quantities]
            names = {record.quantity for record in run.records}
            absent = [failed(name, "it was compared in no case") for name in quantities if name not in names]
            self._add(absent, "float32", "none")
        run.seconds = seconds
        run.conclude()
        if not self.elements and not run.failures:
            raise errors.nothing_compared("check", self.target.name, dict.fromkeys(reason for *_, reason in skips(run)))
        if run.failures and not run.message:
            try:
                run.identity = identify(self.target)
            except Exception as error:  # a failure of identify must not hide the differences
                run.message = f"identify failed: {type(error).__name__}: {error}"
            else:
                run.message = "; ".join(sentences(run, self.variant))
