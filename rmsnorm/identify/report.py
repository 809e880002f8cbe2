"""An identity in words: a headline, and a line for each finding, defect and near preset."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Final

from rmsnorm.identify.identity import Finding, Identity
from rmsnorm.variants import PRESETS, Variant

_NEAR: Final = 6  # presets that are listed


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
