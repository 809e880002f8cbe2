"""What the judge says of a target that was recognised: its failures are defects, each with its cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Final

import numpy as np

from rmsnorm.identify import mistakes
from rmsnorm.identify.asking import Probe
from rmsnorm.identify.candidates import Candidate, of_call
from rmsnorm.identify.gradients import explanation
from rmsnorm.identify.instead import mistaken
from rmsnorm.parity.asking import Refused, ask, questions
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.design import OPTIONS
from rmsnorm.parity.questions import Question
from rmsnorm.targets.target import Target, TargetError

Levels = Mapping[str, str]
# The level of each factor that is plain. What of a failing circumstance cannot be made plain is the cause.
_PLAIN: Final[Levels] = MappingProxyType({
    "axes": "2 axes", "rows": "few rows", "width": "33", "mode": "plain", "values": "normal", "history": "first call",
    "dy": "dense dy", "layout": "contiguous", "gain's memory": "dense gain", "gradients": "all", "mask": "no mask",
    "gate": "no gate", "residual": "no residual", "bias": "no bias", "gain": "gain of x's dtype", "x": "float32",
    "eps": "eps of the variant",
})  # fmt: skip
_COMPILED: Final = MappingProxyType({  # where a library compiles each shape, two of them
    "rows": ("257 rows",), "width": ("33", "1531"), "axes": ("3 axes",), "x": ("float32",), "gradients": ("all",),
    "values": ("normal",), "gain": ("gain of x's dtype",),
})  # fmt: skip
_GRADIENTS: Final = ("none", "all", "frozen gain", "frozen x", "dy alone")
_WHERE: Final[Levels] = MappingProxyType({  # by a level, or by its factor
    "training": "in training", "no_grad": "under no_grad", "inference": "in inference mode", "autocast": "in autocast",
    "deterministic": "where memory that nobody wrote to is NaN", "NaN in a row": "beside a row with NaN",
    "no gain": "without a gain", "results kept": "after another call", "two threads at once": "in two threads at once",
    "gain and x updated in place": "after the gain and x are updated in place", "rows": "in a call of {}",
    "axes": "for x of {}", "x": "for {} x", "layout": "where x is {}", "residual": "with a residual",
    "gate": "with a gate", "mask": "with a mask", "mode": "in the mode {}",
})  # fmt: skip
_QUANTITIES: Final = {
    "y": "y", "dx": "the gradient for x", "dscale": "the gradient for the gain", "dbias": "the gradient for the bias",
    "dgate": "the gradient for the gate", "dresidual": "the gradient for the residual",
}  # fmt: skip
_ELEMENTS: Final = 2**21  # of a call in which a mistake is looked for


@dataclass
class Judge:
    """The questions of the judge to one target, as a candidate without mistakes describes it."""

    probe: Probe
    candidate: Candidate
    gradients: bool

    def _questions(self, levels: Levels | None = None) -> Iterator[tuple[Target, Question]]:
        """A few circumstances in which every level occurs; or the one of these levels, where there is one."""
        types = [dtype for dtype in self.probe.accepts if dtype != "float64"] or list(self.probe.accepts)
        only: dict[str, tuple[str, ...]] = {factor: (level,) for factor, level in (levels or {}).items()}
        if levels is None:
            only |= _COMPILED if self.probe.target.bridge.compiles else {"gradients": _GRADIENTS}
        if self.candidate.variant.rounding == "input_dtype":  # other values overflow in 16 bits, and such code rounds
            only |= {"values": ("size 1",), "gain": ("gain of x's dtype", "gain float32", "no gain")}  # narrower gains
        if "gate" in self.probe.passes:
            only["gate"] = ("gate",)
        yield from questions(
            self.probe.target, self.candidate.variant, types, gradients=self.gradients,
            group_size=self.probe.layout.group, quick=True, strength=1, only=only,
        )  # fmt: skip

    def failures(self, levels: Levels | None = None) -> Iterator[tuple[Target, Question, dict[str, str]]]:
        """Of each circumstance what differs, by the quantity, with its detail."""
        for sized, question in self._questions(levels):
            self.probe.check_time()
            if question.circumstance["values"] == "a row of zeros" and not question.data.call.eps:
                continue  # 0 / 0, whose gradient depends on the order of operations
            try:
                comparisons = ask(sized, question, self.probe.layout.group)
            except Refused:  # it takes no such call: that is no finding of identify
                continue
            yield sized, question, {entry.quantity: entry.detail for entry in comparisons if not entry.passed}

    def defects(self) -> list[str]:
        """The sentences on what differs, y first."""
        said: dict[str, list[str]] = {}
        target = self.probe.target
        options = [] if target.bridge.compiles else [name for name in OPTIONS if name in target.arguments]
        with_options = (self.failures({**_PLAIN, name: name}) for name in options)  # with all gradients
        for sized, question, failing in chain(*with_options, self.failures()):
            first = ("y",) if "y" in failing else tuple(failing)  # what is wrong in y is wrong in its gradients
            for quantity, detail in failing.items():
                if quantity in first and quantity not in said:
                    said[quantity] = self._sentences(sized, question, quantity, detail)
        ordered = sorted(said, key=list(_QUANTITIES).index)
        return list(dict.fromkeys(sentence for quantity in ordered for sentence in said[quantity]))

    def _sentences(self, sized: Target, question: Question, quantity: str, detail: str) -> list[str]:
        if detail.startswith("inputs written to: "):
            names = detail.removeprefix("inputs written to: ").split(", ")
            of_x, of_dy = [name for name in names if name not in ("dy", "dh")], "dy" in names
            said = [f"it writes to its arguments: {', '.join(of_x)}"] if of_x else []
            return [*said, "its backward pass writes to the gradient of y"] if of_dy else said
        sized, question, detail = self._simplified(sized, question, quantity, detail)
        mistake = self._mistake(sized, question, quantity)
        where = ", ".join(_where(question, quantity, mistake))
        words = mistake or f"{_QUANTITIES[quantity]} is another one: {detail}"
        words = detail if detail.startswith("the second result") else words
        return [f"{where}, {words}" if where else words]

    def _simplified(
        self, sized: Target, question: Question, quantity: str, detail: str
    ) -> tuple[Target, Question, str]:
        """The same failure in a circumstance in which every level is plain that may be."""
        levels = dict(question.circumstance.levels)
        for factor, plain in _plain(quantity).items():
            if levels[factor] == plain:
                continue
            for other, asked, failing in self.failures({**levels, factor: plain}):
                if quantity in failing and dict(asked.circumstance.levels) != levels:
                    levels, sized, question = dict(asked.circumstance.levels), other, asked
                    detail = failing[quantity]
        return sized, question, detail

    def _mistake(self, sized: Target, question: Question, quantity: str) -> str:
        """The known mistake that explains it, empty where none does."""
        data, circumstance = question.data, question.circumstance
        if data.x.size > _ELEMENTS or self.probe.layout.group:
            return ""
        names = ("x", "scale", "bias", "gate", "residual", "mask")
        arrays = {name: array for name in names if (array := getattr(data, name)) is not None}
        is_trained = circumstance["mode"] == "training"
        try:
            with sized.in_mode(is_trained):
                called = sized.called(arrays, [name for name in arrays if name != "mask" and quantity != "y"])
                if quantity != "y":
                    dh = data.dh if called.sum is not None else None
                    got = called.gradients(data.dy, dh).get(quantity.removeprefix("d"))
                    return "" if got is None else explanation(quantity, replace(data, dh=dh), got)
        except TargetError:
            return ""
        known = [*mistakes.of_options({*arrays} & {"mask", "residual", "gate"}, data.x.dtype.name)]
        known += [*mistakes.of_width(int(data.call.n)), *mistakes.of_rows(data.x.size // max(1, int(data.call.n)))]
        if circumstance["eps"] != _PLAIN["eps"]:
            known = [mistakes.eps_ignored(self.candidate.variant.eps_for(data.x.dtype.name)), *known]
        return mistaken(known, data, called.y) or (
            "y is another one than in evaluation" if is_trained else _place(data, called.y)
        )


def _place(data: Data, y: Array) -> str:
    """Where y begins to be another one; empty where all of it is."""
    alike = of_call(data).gives(data, y)
    for axis, word, of in ((1, "row", ""), (0, "element", " of a row")):
        wrong = np.flatnonzero(~alike.reshape(-1, int(data.call.n)).all(axis))
        if len(wrong) and wrong[0] > 0:
            return f"y of {len(wrong)} {word}{'s' * (len(wrong) > 1)}{of} is another one, from {word} {wrong[0]} on"
    return ""


def _plain(quantity: str) -> Levels:
    """The plain levels: a y that is wrong is wrong without gradients."""
    return {**_PLAIN, "gradients": "none"} if quantity == "y" else _PLAIN


def _where(question: Question, quantity: str, mistake: str) -> Iterator[str]:
    """What is not plain in a circumstance, in words, and the width where nothing else is; but what the mistake says."""
    levels, plain = question.circumstance.levels, _plain(quantity)
    unusual = [factor for factor, level in levels.items() if level != plain[factor]]
    if {*unusual} <= {"width", "x"} and "elements" not in mistake:
        yield f"with {levels['width']} elements in a row"
    for factor in unusual:
        if factor != "width" and (factor != "eps" or "its eps" not in mistake):
            words = _WHERE.get(levels[factor], _WHERE.get(factor, "with {}"))
            yield words.format(levels[factor].removeprefix("x ").removeprefix("alone "))


def judge(probe: Probe, candidate: Candidate, *, gradients: bool) -> None:
    """Ask the judge about what was candidate, and record its failures as defects."""
    last = probe.layout.axes == tuple(range(len(probe.layout.sizes) - len(probe.layout.axes), len(probe.layout.sizes)))
    if not (candidate.is_plain and last and probe.layout.unlimited) or probe.layout.groups or probe.is_short_of_time:
        return
    differentiated = gradients and probe.target.differentiable
    probe.findings.defect(*Judge(probe, candidate, differentiated).defects())
