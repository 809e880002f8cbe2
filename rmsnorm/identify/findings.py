"""The record of what identify learns about a target: findings with their evidence, and defects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rmsnorm.identify.identity import Finding


class NotRms(Exception):
    """The target computes something else: the message says what was seen."""


@dataclass
class Findings:
    """Findings by name, in the order of the report, and defects."""

    entries: dict[str, Finding] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)

    def add(self, name: str, value: Any, evidence: str) -> None:
        self.entries[name] = Finding(name, value, evidence)

    def not_observable(self, name: str, reason: str) -> None:
        self.entries[name] = Finding(name, None, reason)

    @property
    def unobservable(self) -> frozenset[str]:
        return frozenset(name for name, finding in self.entries.items() if finding.value is None)

    def withdraw(self, names: Iterable[str], defects: int, reason: str) -> None:
        """Take back findings, and the defects after the first so many."""
        for name in names:
            if name in self.entries:
                self.not_observable(name, reason)
        del self.defects[defects:]

    def defect(self, sentence: str) -> None:
        if sentence not in self.defects:
            self.defects.append(sentence)
