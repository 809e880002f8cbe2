"""What a target refused: which circumstance or which limit explains it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from rmsnorm.parity.asking import questions
from rmsnorm.parity.cases import Data
from rmsnorm.parity.comparison import Comparison, Refusal, Run, labelled
from rmsnorm.specification.dtypes import FLOATS
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.limits import Facts, Limits, dense, explaining
from rmsnorm.targets.target import WrongResult

Levels = Mapping[str, str]
_TRIES: Final = 4
_PLAIN: Final = MappingProxyType({
    "bias": ("no bias",), "residual": ("no residual",), "gate": ("no gate",), "mask": ("no mask",),
    "layout": ("contiguous", "a slice", "every second element", "transposed"), "gain's memory": ("dense gain",),
    "values": ("normal",), "mode": ("plain",), "history": ("first call",),
})  # fmt: skip


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

    def conclude(self, run: Run, target: Target, variant: Variant, group_size: int | None) -> None:
        """Put into a run what was refused, the limits that explain it, and what no limit explains.

        A target that answered nothing differs.
        """
        if not self.others:
            for call in self.calls:
                run.cases += 1
                run.records += labelled(call.comparisons, variant.name, call.dtype, call.case)
            return
        limits = self._limits(target, variant, group_size) if self.calls else target.limits
        run.limits = limits.options if limits != target.limits else ""
        for call in self.calls:
            explained = not limits.allow(call.facts)
            message = next(comparison.detail for comparison in call.comparisons if comparison.detail)
            level = "" if explained else self._level(call.levels)
            run.refusals.append(Refusal(call.case, call.dtype, message, explained, level))

    def _limits(self, target: Target, variant: Variant, group_size: int | None) -> Limits:
        """Limits within which it was asked and refused nothing; those of its user, if there are no others.

        What it refuses as ``_PLAIN`` says is refused for its shape, its memory or the dtype of the gain alone.
        """
        answered = [facts for facts, _ in self.others if facts.width and facts.rows]
        if not answered:
            return target.limits
        ((width, _),) = Counter(facts.width for facts in answered).most_common(1)
        types = [dtype for dtype in FLOATS if any(levels["x"] == dtype for _, levels in self.others)]
        refused: list[Facts] = []
        limits = target.limits
        for _ in range(_TRIES):
            limited = replace(target, limits=limits, rank=limits.rank or target.rank, named_width=width)
            before, count = limits, len(refused)
            for sized, question in questions(
                limited, variant, types, gradients=False, group_size=group_size, quick=target.bridge.compiles,
                only=_PLAIN,
            ):  # fmt: skip
                (answered if _answers(sized, question.data) else refused).append(question.facts)
            if len(refused) == count:
                return limits
            limits = explaining(answered, refused, target.limits)
            if limits == before:
                break
        return target.limits

    def _level(self, levels: Levels) -> str:
        """The level that no answered call has and most refused calls share; empty if there is none."""
        guilty = [item for item in levels.items() if all(others.get(item[0]) != item[1] for _, others in self.others)]
        shared = [(sum(call.levels.get(name) == level for call in self.calls), level) for name, level in guilty]
        return max(shared, default=(0, ""))[1]


def _answers(target: Target, data: Data) -> bool:
    try:
        target.forward(data.x, data.scale, data.bias, **data.arrays)
    except TargetError as error:
        return isinstance(error, WrongResult)
    return True


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
