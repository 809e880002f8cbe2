"""The norms of a model that a name makes, by their places in it: what ``rmsnorm identify`` prints of a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rmsnorm.conversion.replacement import Replacement
from rmsnorm.identify.gains import starred


def together(report: Sequence[Replacement]) -> list[dict[str, Any]]:
    """The entries of a report as values of JSON, with one for all that differ in the numbers of their blocks alone.

    Example:
        >>> entries = [Replacement(f"blocks.{i}.norm", "LayerNorm", None, "it computes LayerNorm") for i in range(2)]
        >>> (entry,) = together(entries)
        >>> entry["place"], entry["count"], entry["names"]
        ('blocks.*.norm', 2, ['blocks.0.norm', 'blocks.1.norm'])
    """
    groups: dict[Any, list[str]] = {}
    for entry in report:
        place = starred(f"{entry.name}.weight").removesuffix(".weight")
        groups.setdefault((place, entry.kind, entry.variant, entry.why), []).append(entry.name)
    return [
        {
            "place": place, "class": kind, "variant": None if variant is None else variant.name,
            "eps": None if variant is None else variant.eps, "count": len(names), "why": why, "names": names,
        }
        for (place, kind, variant, why), names in groups.items()
    ]  # fmt: skip
