"""The record of what identify learns about a target: answers to questions, with the evidence, and defects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


class NotRms(Exception):
    """The target computes something else: the message says what was seen."""


@dataclass(frozen=True)
class Finding:
    """One thing that was learned, and its evidence.

    Attributes:
        name: the question, such as ``eps``; ``defect`` for a defect.
        value: a number, a word or a list, and a sentence for a defect; None where it is not observable.
        evidence: what was seen, or why nothing can be seen.
    """

    name: str
    value: Any
    evidence: str

    @property
    def is_defect(self) -> bool:
        return self.name == DEFECT

    @property
    def is_observable(self) -> bool:
        """Whether there is an answer: partial is None where every element counts."""
        return self.value is not None or self.name == "partial"

    @property
    def word(self) -> str:
        """The answer as text."""
        if not self.is_observable:
            return "not observable"
        if self.value is None or isinstance(self.value, bool):
            return "yes" if self.value else "no"
        return f"{self.value:.7g}" if isinstance(self.value, float) else str(self.value)


DEFECT: Final = "defect"
# answers that rest on the model, and are withdrawn where no model predicts y
_OF_THE_MODEL: Final = ("divisor", "factor", "widths", "eps_position", "eps", "statistic_dtype", "rounding", "float64")


class Findings:
    """All findings, in the order in which the questions were asked."""

    def __init__(self) -> None:
        self._all: list[Finding] = []

    def add(self, name: str, value: Any, evidence: str) -> None:
        """Record an answer, in the place of an earlier one to the same question."""
        finding, names = Finding(name, value, evidence), [entry.name for entry in self._all]
        if name in names:
            self._all[names.index(name)] = finding
        else:
            self._all.append(finding)

    def defect(self, *sentences: str) -> None:
        self._all += [Finding(DEFECT, sentence, "") for sentence in sentences if sentence not in self.defects]

    def __getitem__(self, name: str) -> Finding | None:
        """The answer to a question, None where it was not asked."""
        return next((entry for entry in self._all if entry.name == name), None)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def answers(self) -> tuple[Finding, ...]:
        return tuple(entry for entry in self._all if not entry.is_defect)

    @property
    def defects(self) -> tuple[str, ...]:
        """Their sentences."""
        return tuple(entry.value for entry in self._all if entry.is_defect)

    def withdraw_defects(self, after: int = 0) -> None:
        """Take back the defects after so many findings."""
        self._all[after:] = [entry for entry in self._all[after:] if not entry.is_defect]

    def withdraw_model(self, after: int) -> None:
        """Take back the answers that rest on a model that was not confirmed, and the defects after so many findings."""
        self.withdraw_defects(after)
        self._all = [
            Finding(entry.name, None, "no model was confirmed") if entry.name in _OF_THE_MODEL else entry
            for entry in self._all
            if not entry.name.startswith("eps in ")
        ]
