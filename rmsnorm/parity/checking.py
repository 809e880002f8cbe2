"""Compares anybody's function or layer with the golden: every question that it is asked, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rmsnorm.accuracy.bounds import QUANTITIES
from rmsnorm.identify import identify
from rmsnorm.parity import asking
from rmsnorm.parity.batches import BATCHES, batches
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled, version_of
from rmsnorm.parity.design import EDGES, OPTIONS, Circumstance
from rmsnorm.parity.first import ASKED, first_parameters
from rmsnorm.parity.judge import failed
from rmsnorm.parity.lines import skips
from rmsnorm.parity.questions import Question
from rmsnorm.parity.refusals import Refusals
from rmsnorm.parity.report import Report, sentences
from rmsnorm.specification import errors
from rmsnorm.specification.dtypes import HALF
from rmsnorm.specification.variants import Preset, Variant, get_variant
from rmsnorm.targets import Target, TargetError, open_target
from rmsnorm.targets.calling import with_values
from rmsnorm.targets.limits import Limits, limits_of
from rmsnorm.targets.target import TO_RETURN, random_state_kept

_JUDGED: Final = tuple(name for name in QUANTITIES if name not in ("inverse_rms", "jvp"))
_QUICK: Final = 1  # the strength with which fewer levels are asked


@random_state_kept()
def check(
    function: Any,
    variant: Preset | Variant = "standard",
    *,
    framework: str | None = None,
    gradients: bool = True,
    dtypes: Sequence[str] | str | None = None,
    device: str = "cpu",
    compiled: bool = False,
    group_size: int | None = None,
    init: Mapping[str, Any] | None = None,
    quantities: Sequence[str] | str | None = None,
    limits: Limits | Mapping[str, Any] | None = None,
    call: str | None = None,
    extremes: bool = False,
    exact: bool = False,
    strength: int | None = None,
    batch_invariant: bool = False,
) -> Report:
    """Compare a function or layer with the golden: values, and gradients by its framework's automatic differentiation.

    It is called along the last axis, with the gain and the bias that it takes, in calls in which every pair of
    circumstances occurs: rows, widths, axes, dtypes, memory, values, options, gradients, modes, what was called before
    (rmsnorm/parity/design.py). Of a mask, a residual, a gate and eps it is called with each that it takes, by
    the name of the argument, and without it. If it must have a gate, every call has one, and the variant says what is
    done with it. If it raises in some calls and answers others, the report names the limits that explain it. Sums in
    float32 that are as inexact as terms added one after the other hold, and the report says so. A function that
    quantises y is for ``check_quantised``.

    Args:
        function: of x, or of (x, weight), (x, weight, bias) and the like; a layer of PyTorch, Keras or Flax;
            its class; ``module:attribute``; an .onnx file.
        variant: what it should be.
        framework: torch, tf, keras, jax, flax or numpy, for a function that does not show whose arrays it takes.
        gradients: whether dx, dscale, dbias, dresidual and dgate count, where the framework differentiates.
        dtypes: of x; None for float16, bfloat16 and float32, or the one that an .onnx file declares.
        device: cpu or cuda.
        group_size: how many elements of the last axis are normalised together, as in Mamba-2; None for all of them.
        compiled: whether the function, as the compiler of its framework makes it, must agree as well.
        init: arguments for its constructor, or options for a function.
        quantities: those that count, such as ("y", "dx"); None for all.
        limits: of what x it takes: rank, multiple_of, widths, contiguous, same_dtype, max_rows. Calls get other shapes
            to fit. An exception is a refusal, and the check fails.
        call: the arguments of a function in their order, such as "out, x, weight, eps", or "x as out, residual as
            h_out, weight, eps" for one that writes y to x, and x + residual to the residual.
        extremes: whether x of no rows, rows of 66,001 elements and one mask for all rows must be taken, and rows be
            right whose squares leave the range of float32, and masks with NaN under them and with a row that counts
            nothing: few implementations pass these. Else a target may raise an exception for such a shape, and the
            report says so; a wrong answer counts always.
        exact: whether sums that are as inexact as terms added one after the other fail.
        strength: 1 for fewer rows, widths and calls before, as of a library that compiles each shape; 2 for every pair
            of levels; 3 for every triple, and for calls of 131,073 rows and of more than 2^24 elements. None for 1 in
            JAX, and for 2 elsewhere.
        batch_invariant: whether a row must have the same bits, in y and dx, alone and in calls of 2 to 4,096 rows, at
            every place, and dscale the same bits in equal calls.

    Raises:
        ValueError: there is no such function, variant or dtype, its width is not a multiple of ``group_size``, or no
            call can be compared.

    Example:
        >>> import numpy as np
        >>> def norm(x, weight):
        ...     wide = x.astype(np.float64)
        ...     y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
        ...     return y.astype(x.dtype)
        >>> check(norm, dtypes="float32", strength=1).passed
        True
        >>> print(check(norm, "gemma", dtypes="float32", strength=1).text.splitlines()[0].split(":")[1].strip())
        norm is not gemma
    """
    chosen, counted = get_variant("check", variant), quantities_named("check", quantities)
    if not gradients and (without := [name for name in counted if name != "y"]):
        raise errors.out_of_domain(
            "check", "quantities", ", ".join(without), "y without gradients", "leave gradients on"
        )
    gradients = gradients and {*counted} != {"y"}
    if strength not in (None, 1, 2, 3):
        raise errors.not_a_choice("check", "strength", strength, (1, 2, 3))
    named = dtypes_named(dtypes)
    declared = limits_of("check", limits)
    opened = open_target(function, framework=framework, init=init, device=device, call=call, op="check")
    target = with_values(opened, eps=chosen.eps, offset=chosen.scale_offset)
    target = replace(target, limits=declared, rank=target.rank or declared.rank)
    types = (target.dtypes["x"],) if dtypes is None and "x" in target.dtypes else named
    if group_size is not None and (group_size < 1 or (target.resized is None and (target.width or 0) % group_size)):
        want = "a positive divisor of the width" if group_size > 0 else "a positive number"
        raise errors.out_of_domain("check", "group_size", group_size, want, "pass the size that the norm was made with")
    run, began = Run(target.framework, version=version_of(target.framework), device=device), time.monotonic()
    judging = _Judging(
        target, chosen, types, run, group_size, gradients=gradients, compiled=compiled, extremes=extremes,
        strength=strength or (1 if target.bridge.compiles else 2),
    )  # fmt: skip
    judging.ask(batch_invariant=batch_invariant)
    judging.conclude(counted, exact, time.monotonic() - began)
    return Report(target.name, chosen, run)


def quantities_named(op: str, named: Sequence[str] | str | None) -> tuple[str, ...]:
    """The quantities that count; empty for all.

    >>> quantities_named("check", "y, dx")
    ('y', 'dx')
    """
    entries = named.split(",") if isinstance(named, str) else named or ()
    names = tuple(name.strip() for name in entries)
    for name in names:
        if name not in _JUDGED:
            raise errors.not_a_choice(op, "quantities", name, _JUDGED)
    return names


def dtypes_named(named: Sequence[str] | str | None) -> tuple[str, ...]:
    """The dtypes of x that were asked for, None for those of models.

    >>> dtypes_named("bf16"), dtypes_named(None)
    (('bfloat16',), ('float16', 'bfloat16', 'float32'))
    """
    every = (*HALF, "float32") if named is None else named if isinstance(named, (list, tuple)) else (named,)
    return tuple(errors.dtype_named("check", "dtype", entry) for entry in every or (None,))


@dataclass
class _Judging:
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
                mend = TO_RETURN if came == "None" else "return y, or y and x + residual"
                sentence = f"it returns {came}, expected {wanted.__module__}.{wanted.__qualname__}; {mend}"
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
