"""What a target refused: which circumstance or which limit explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rmsnorm.parity.cases import Data
from rmsnorm.parity.comparison import Comparison, Refusal, Run, labelled
from rmsnorm.targets.limits import Facts, dense, explaining

Levels = Mapping[str, str]


@dataclass
class _Call:
    case: str
    dtype: str
    facts: Facts
    levels: Levels
    comparisons: Sequence[Comparison]


@dataclass
class Refusals:
    """The calls of a target that were answered, and those in which it raised."""

    calls: list[_Call] = field(default_factory=list)
    others: list[tuple[Facts, Levels]] = field(default_factory=list)

    def refused(
        self, case: str, dtype: str, facts: Facts, levels: Levels, comparisons: Sequence[Comparison]
    ) -> None:  # fmt: skip
        self.calls.append(_Call(case, dtype, facts, levels, comparisons))

    @property
    def cases(self) -> set[tuple[str, str]]:
        """The name and the dtype of each case that was refused."""
        return {(call.case, call.dtype) for call in self.calls}

    def answered(self, facts: Facts, levels: Levels) -> None:
        self.others.append((facts, levels))

    def conclude(self, run: Run, variant: str, *, accepted: bool) -> None:
        """Put into a run what was refused, the limits that explain it, and what no limit explains.

        A target that answered nothing differs. ``accepted``: what limits explain does not count against it.
        """
        if not self.others:
            for call in self.calls:
                run.cases += 1
                run.records += labelled(call.comparisons, variant, call.dtype, call.case)
            return
        limits = explaining([facts for facts, _ in self.others], [call.facts for call in self.calls])
        run.limits = limits.options
        for call in self.calls:
            explained = not limits.allow(call.facts)
            message = next(comparison.detail for comparison in call.comparisons if comparison.detail)
            if not (explained and accepted):
                level = "" if explained else self._level(call.levels)
                run.refusals.append(Refusal(call.case, call.dtype, message, explained, level))

    def _level(self, levels: Levels) -> str:
        """The level that no answered call has and most refused calls share; empty if there is none."""
        guilty = [item for item in levels.items() if all(others.get(item[0]) != item[1] for _, others in self.others)]
        shared = [(sum(call.levels.get(name) == level for call in self.calls), level) for name, level in guilty]
        return max(shared, default=(0, ""))[1]


def facts_of(data: Data) -> Facts:
    """What limits may forbid of a case."""
    x, scale = data.x, data.scale
    return Facts(
        x.ndim, x.shape[-1], math.prod(x.shape[:-1]), scale is None or scale.dtype == x.dtype,
        dense(x.strides, x.shape, x.itemsize),
    )  # fmt: skip


def levels_of(data: Data) -> Levels:
    """The circumstances of a case of ``cases.py``."""
    return {"x": data.x.dtype.name, "values": data.case.data} | {
        name: name if getattr(data, name) is not None else f"no {name}" for name in ("gate", "mask", "residual")
    }
