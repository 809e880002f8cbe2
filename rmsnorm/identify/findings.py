"""What is written down while a target is solved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rmsnorm.identify.identity import Finding


@dataclass
class Notebook:
    """Findings in the order in which they came, and defects."""

    findings: dict[str, Finding] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)

    def found(self, name: str, value: Any, evidence: str) -> None:
        self.findings[name] = Finding(name, value, evidence)

    def unseen(self, name: str, why: str) -> None:
        self.findings[name] = Finding(name, None, why)

    def defect(self, sentence: str) -> None:
        if sentence not in self.defects:
            self.defects.append(sentence)

    def __getitem__(self, name: str) -> Any:
        return self.findings[name].value if name in self.findings else None
