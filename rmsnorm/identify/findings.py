"""The record of what identify learns about a target: answers to questions, with the evidence, and defects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class NotRms(Exception):
    """The target computes something else: the message says what was seen."""


@dataclass(frozen=True)
class Finding:
    """One thing that was learned, and its evidence.

    Attributes:
        name: the question, such as ``eps``.
        value: a number, a word or a list; None where it is not observable.
        evidence: what was seen, or why nothing can be seen.
    """

    name: str
    value: Any
    evidence: str

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


class Findings:
    """The answers by their names, in the order in which the questions were asked, and the sentences on defects."""

    def __init__(self) -> None:
        self._answers: dict[str, Finding] = {}
        self._defects: dict[str, None] = {}

    def add(self, name: str, value: Any, evidence: str) -> None:
        """Record an answer, in the place of an earlier one to the same question."""
        self._answers[name] = Finding(name, value, evidence)

    def defect(self, *sentences: str) -> None:
        self._defects |= dict.fromkeys(sentences)

    def __getitem__(self, name: str) -> Finding | None:
        """The answer to a question, None where it was not asked."""
        return self._answers.get(name)

    @property
    def answers(self) -> tuple[Finding, ...]:
        return tuple(self._answers.values())

    @property
    def defects(self) -> tuple[str, ...]:
        return tuple(self._defects)

    def withdraw_defects(self) -> None:
        self._defects.clear()
