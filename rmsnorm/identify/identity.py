"""What identify found out: the value that everything else here makes or shows."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any, Final, Literal

from rmsnorm.variants import PRESETS, Variant, get_variant

Kind = Literal["rmsnorm", "layernorm", "rms_scaling", "none"]
_NEAR: Final = 6  # presets that are listed
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
        return headline(self)

    @property
    def text(self) -> str:
        """The report, as lines of plain text."""
        return text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Fraction):
        return float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def headline(identity: Identity) -> str:
    """What it is, in one sentence."""
    name = identity.target
    if identity.kind == "none":
        reason = next((f.evidence for f in identity.findings if f.name == "kind"), None)
        return f"{name} is not recognised: {reason or next(iter(identity.defects), 'nothing is known of it')}"
    if identity.kind == "layernorm":
        where = "" if str(identity["axes"]).startswith("last") else f" along axis {identity['axes']}"
        return f"{name} is LayerNorm{where}, not RMSNorm"
    if identity.kind == "rms_scaling":
        return f"{name} is not RMSNorm: x is divided by the root of its variance, as keras_rms_scaling does"
    text = f"{name} is {'' if identity.recognised else 'close to '}RMSNorm: {described(identity)}"
    return text if identity.recognised else f"{text}; {len(identity.defects)} defect{'s' * (len(identity.defects) > 1)}"


def described(identity: Identity) -> str:
    """The variant by its name, or by the nearest one and what is otherwise."""
    assert identity.variant is not None  # noqa: S101  (what is RMSNorm has one)
    preset = closest(identity)
    others = identity.differences(preset)
    extras = [f"in groups of {identity['group_size']}"] if identity["group_size"] else []
    extras += [f"with a {identity['gate'].split(' ')[0].rstrip(',')} gate"] if identity["gate"] else []
    text = f"the variant {preset.name}"
    if others:
        text += " but " + ", ".join(sentence.split(", " + preset.name)[0] for sentence in others)
    return ", ".join([text, *extras])


def closest(identity: Identity) -> Variant:
    """The preset that differs in the fewest fields that were seen; of these the nearest one."""
    order = {name: place for place, (name, _) in enumerate(identity.nearest)}
    own = identity.variant.name if identity.variant else ""
    return min(
        PRESETS.values(),
        key=lambda preset: (len(identity.differences(preset)), preset.name != own, order.get(preset.name, len(order))),
    )


def lines(identity: Identity) -> list[tuple[str, str, str]]:
    """(name, value, evidence) of every line of the report."""
    rows = [(finding.name, shown(finding), finding.evidence) for finding in identity.findings]
    rows += [("defect", sentence, "") for sentence in identity.defects]
    if identity.nearest:
        near = ", ".join(f"{name} {distance:.1e}" for name, distance in identity.nearest[:_NEAR])
        rows.append(("nearest", near, "largest difference of y, as a share of the largest |y| of its row"))
    return rows


def shown(finding: Finding) -> str:
    return "not observable" if finding.value is None and finding.name != "partial" else _word(finding.value)


def _word(value: Any) -> str:
    if value is None or value is False:
        return "no"
    if value is True:
        return "yes"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def text(identity: Identity) -> str:
    """The report, as lines of plain text."""
    written = [headline(identity)]
    for name, value, evidence in lines(identity):
        start = f"  {name:<17} "
        line = f"{start}{value}{f' - {evidence}' if evidence else ''}"
        written += textwrap.wrap(
            line, 118, subsequent_indent=" " * len(start), break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(written)


def cluster(identity: Identity) -> str:
    """What puts two targets into the same cluster of a sweep: what they compute, not where."""
    if identity.kind == "none":
        return headline(identity).removeprefix(f"{identity.target} is ")
    if identity.kind != "rmsnorm":
        return {"layernorm": "LayerNorm", "rms_scaling": "rms_scaling"}[identity.kind]
    parts: Sequence[str] = [described(identity), *identity.defects]
    if identity["gain"] is False:
        parts = [parts[0] + ", without a gain", *parts[1:]]
    return "; ".join(part.replace(identity.target, "it") for part in parts)
