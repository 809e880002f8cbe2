"""What a comparison with the golden came to: of one quantity of one case, and of all cases of one implementation.

Text and JSON are written from these.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rmsnorm.identify.identity import Identity


@dataclass(frozen=True)
class Comparison:
    """One quantity of one case.

    Attributes:
        quantity: its name, such as ``dx``.
        parity_ratio: largest |got - golden| in unit roundoffs of the sizes of the terms.
        bound: largest parity ratio that is allowed.
        bit_identical: share of elements that equal the golden bit for bit (all NaN count as one).
        max_ulp: largest distance to the golden, counted in representable numbers.
        passed: whether each element lies in its interval.
        detail: why it did not pass, else empty.
        inexact: where it passed because terms may be added one after the other: what is outside of the usual interval.
        variant, dtype, case: of the case; the dtype is that of x. Empty until ``labelled``.
    """

    quantity: str
    parity_ratio: float
    bound: float
    bit_identical: float
    max_ulp: float
    passed: bool
    detail: str
    variant: str = ""
    dtype: str = ""
    case: str = ""
    inexact: str = ""


def labelled(comparisons: Sequence[Comparison], variant: str, dtype: str, case: str) -> list[Comparison]:
    """The comparisons with what they are of."""
    return [replace(comparison, variant=variant, dtype=dtype, case=case) for comparison in comparisons]


class Skip(NamedTuple):
    """A case that was not compared in a dtype of x, or what was compared in no case (no ``dtype``), and the reason.

    ``edge``: whether the target refused it, as an implementation may refuse empty or very long rows.
    """

    case: str
    dtype: str
    reason: str
    edge: bool = False


class Refusal(NamedTuple):
    """A call in which a target raised: in which case, what it raised, and whether limits explain it.

    ``level``: the only circumstance that it shares with all such calls, and with no call that was answered.
    """

    case: str
    dtype: str
    message: str
    explained: bool = False
    level: str = ""


@dataclass
class Run:
    """All comparisons of a backend or a target.

    Its status is ``held``, ``differs``, ``refuses`` (what came back agrees, and some calls raised), ``absent``,
    ``refused``, ``crashed`` or ``hung``. ``limits`` are the options that explain what was refused.
    ``identity`` is what ``identify`` says of a target that differs, where it says something.
    """

    name: str
    status: str = ""
    message: str = ""
    version: str = ""
    device: str = ""
    seconds: float = 0.0
    cases: int = 0
    records: list[Comparison] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    identity: Identity | None = None
    refusals: list[Refusal] = field(default_factory=list)
    limits: str = ""

    @property
    def failures(self) -> list[Comparison]:
        return [record for record in self.records if not record.passed]

    def conclude(self) -> None:
        """The status by the records. Without a record nothing has held."""
        self.status = "differs" if self.failures else "refuses" if self.refusals else "held"
        if not self.records:
            self.status, self.message = "refused", "no comparison was made"


def version_of(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return ""
