"""What identify found out: the value that everything else here makes or shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Literal

from rmsnorm.variants import Variant, get_variant

Kind = Literal["rmsnorm", "layernorm", "rms_scaling", "none"]
FIELDS = tuple(f.name for f in fields(Variant) if f.name not in ("name", "scale_name", "source"))


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and what shows it.

    Attributes:
        name: what it is about, such as ``eps``.
        value: a number, a word or a list; None where it is not observable.
        evidence: what was seen, or why nothing can be.
    """

    name: str
    value: Any
    evidence: str


@dataclass(frozen=True)
class Identity:
    """What a target computes, with the evidence.

    Attributes:
        target: its name.
        framework: the library that computes it.
        kind: ``rmsnorm``, ``layernorm``, ``rms_scaling`` (the variance in the denominator only) or ``none``.
        variant: the solved fields; those that are not observable are the standard variant's. None where no
            variant describes it.
        recognised: it is an RMSNorm, fresh data confirmed all that is said here, and it has no defect.
        plain: recognised, and the variant says it all: no gate, no groups.
        findings: one for each question, in the order of the report.
        defects: sentences.
        nearest: (preset, distance), nearest first: largest relative difference of y over rows of many sizes.
        seconds: how long it took.
    """

    target: str
    framework: str
    kind: Kind
    variant: Variant | None
    recognised: bool
    plain: bool
    findings: tuple[Finding, ...]
    defects: tuple[str, ...]
    nearest: tuple[tuple[str, float], ...]
    seconds: float = 0.0

    def __getitem__(self, name: str) -> Any:
        """The value of a finding, None where it is not observable or was not asked."""
        return next((finding.value for finding in self.findings if finding.name == name), None)

    def differences(self, variant: str | Variant) -> tuple[str, ...]:
        """Sentences on what is observable here and otherwise in a variant.

        Raises:
            ValueError: there is no preset of that name.
        """
        wanted = get_variant("Identity.differences", variant)
        if self.variant is None:
            return (f"kind is {self.kind!r}, {wanted.name} is RMSNorm",)
        seen = {finding.name for finding in self.findings if finding.value is not None}
        return tuple(
            f"{name} is {getattr(self.variant, name)!r}, {wanted.name} has {getattr(wanted, name)!r}"
            for name in FIELDS
            if name in seen and getattr(self.variant, name) != getattr(wanted, name)
        )

    @property
    def json(self) -> dict[str, Any]:
        """Everything, in what json.dumps takes; an infinite distance is None."""
        return _plain(asdict(self))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Identity:
        """The identity that ``json`` was made of."""
        variant = data["variant"]
        return Identity(**{
            **data,
            "variant": None if variant is None else Variant(**variant),
            "findings": tuple(Finding(**finding) for finding in data["findings"]),
            "defects": tuple(data["defects"]),
            "nearest": tuple((name, math.inf if far is None else far) for name, far in data["nearest"]),
        })  # fmt: skip

    @property
    def headline(self) -> str:
        """What it is, in one sentence."""
        from rmsnorm.identify.report import headline

        return headline(self)

    @property
    def text(self) -> str:
        """The report, as lines of plain text."""
        from rmsnorm.identify.report import text

        return text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Fraction):
        return float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
