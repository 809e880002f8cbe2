"""What happened to a module, and what the report calls it; for models of every framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, assert_never, get_args

from rmsnorm.identify import Identity
from rmsnorm.specification.variants import GateFunction, Variant

UNSUPPORTED: Final = "it has a gate or groups that replace does not support there"


class Unproven(Exception):
    """A module stays as it is; the message is the reason."""


class NoNorm(Unproven):
    """It normalises nothing: only a module whose class has "norm" in its name is worth a line in the report."""


def first_line(error: BaseException) -> str:
    """The beginning of what an error says, for a reason."""
    return str(error).strip().partition("\n")[0][:200]


@dataclass(frozen=True)
class Replacement:
    """What happened to one module.

    Attributes:
        name: the module's name in the model; the first one if it has several.
        kind: the name of its class before.
        variant: the variant of the new layer, or None if the module was not replaced.
        why: "recognised", or what differs now; or the reason why the module was not replaced.
        done: whether the model was changed, False of a dry run.
        gated: whether it has a gate; its function and position are those of the variant.
        group: the number of neighbours that are normalised together, None for all.
    """

    name: str
    kind: str
    variant: Variant | None
    why: str
    done: bool = field(default=True, compare=False)
    gated: bool = False
    group: int | None = None

    def __str__(self) -> str:
        form = "" if self.variant is None else f"RMSNorm, variant {self.variant.name}, eps {self.variant.eps}"
        result = f"{'now' if self.done else 'would be'} {form}" if form else "left"
        return f"{self.name or 'the model'} ({self.kind}): {result}; {self.why}"


def nothing(kind: str, replaced: int) -> Replacement:
    """The report on a model in which nothing is left to replace."""
    why = 'no class of its modules has "norm" in its name, and none with a gain or a bias alone is RMSNorm'
    if replaced:
        why = f"its {replaced} RMSNorm are replaced already"
    return Replacement("", kind, None, why)


def recognised(identity: Identity, *, gated: bool) -> Variant:
    """The variant that a module computes, with what it does with its gate if it has one.

    Raises:
        NoNorm: it computes no RMSNorm.
        Unproven: it computes more than a variant says.
    """
    fits = identity.plain
    if gated or identity["group_size"]:
        known = identity.gate and identity.gate.function in get_args(GateFunction) if gated else not identity.gate
        fits = identity.recognised and identity.last_axes and bool(known)
    if not fits or identity.variant is None:
        raise _reason(identity)
    return identity.variant.replace(**identity.of_gate) if gated else identity.variant


def _reason(identity: Identity) -> Unproven:
    """Why a module that computes no variant alone stays as it is."""
    defects = "; ".join(identity.defects)
    match identity.kind:
        case "rmsnorm":
            return Unproven(defects or UNSUPPORTED)
        case "l2norm":
            return Unproven(f"it computes {identity.cluster}")
        case "layernorm" if identity["group_size"]:
            return NoNorm(defects or "it computes something else, in groups")
        case "layernorm":
            return NoNorm("it computes LayerNorm")
        case "none":
            evidence = next((finding.evidence for finding in identity.findings if finding.name == "kind"), "")
            return NoNorm(defects or f"it computes something else: {evidence}")
    assert_never(identity.kind)  # so that a kind without a reason fails the check of types
