"""What a target refused: which circumstance or which limit explains it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from rmsnorm.parity.asking import questions
from rmsnorm.parity.cases import Data
from rmsnorm.parity.comparison import Refusal, Run, labelled
from rmsnorm.parity.judge import failed
from rmsnorm.specification.dtypes import FLOATS
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.limits import Facts, Limits, explaining
from rmsnorm.targets.target import WrongResult

Levels = Mapping[str, str]
_TRIES: Final = 4
_PLAIN: Final = MappingProxyType({  # what is refused so is refused for its shape, its memory or the dtype of the gain
    "bias": ("no bias",), "residual": ("no residual",), "gate": ("no gate",), "mask": ("no mask",),
    "layout": ("contiguous", "a slice", "every second element", "transposed"), "gain's memory": ("dense gain",),
    "eps": ("eps of the variant",), "values": ("normal",), "mode": ("plain",), "history": ("first call",),
})  # fmt: skip


@dataclass
class Refusals:
    """The calls of a target in which it raised, and those that it answered."""

    calls: list[tuple[Refusal, Facts, Levels]] = field(default_factory=list)
    others: list[tuple[Facts, Levels]] = field(default_factory=list)

    def refused(self, case: str, dtype: str, facts: Facts, levels: Levels, message: str) -> None:
        self.calls.append((Refusal(case, dtype, message), facts, levels))

    def answered(self, facts: Facts, levels: Levels) -> None:
        self.others.append((facts, levels))

    def conclude(self, run: Run, target: Target, variant: Variant, group_size: int | None) -> None:
        """Put into a run what was refused, the limits that explain it, and what no limit explains.

        A target that answered nothing differs.
        """
        if not self.calls:
            return
        if not self.others:
            first = self.calls[0][0]
            run.message = (
                f"it raised in all {len(self.calls)} calls, such as: {first.message}; if it takes one width alone, "
                "declare it: --width N, or limits={'widths': [N]}"
            )
            run.records += labelled([failed("y", run.message)], variant.name, first.dtype, first.case)
            return
        limits = self._limits(target, variant, group_size)
        run.limits = limits.options if limits != target.limits else ""
        for refusal, facts, levels in self.calls:
            explained = not limits.allow(facts)
            run.refusals.append(refusal._replace(explained=explained, level="" if explained else self._level(levels)))

    def _limits(self, target: Target, variant: Variant, group_size: int | None) -> Limits:
        """Limits within which it was asked and refused nothing; those of its user, if there are no others."""
        answered, refused = [facts for facts, _ in self.others if facts.width and facts.rows], list[Facts]()
        types = [dtype for dtype in FLOATS if any(levels["x"] == dtype for _, levels in self.others)]
        usual = Counter(facts.width for facts in answered).most_common(1)
        limits = target.limits
        for _ in range(_TRIES if answered else 0):
            limited = replace(target, limits=limits, rank=limits.rank or target.rank, named_width=usual[0][0])
            before = len(refused)
            for sized, question in questions(
                limited, variant, types, gradients=False, group_size=group_size, quick=target.bridge.compiles,
                only=_PLAIN,
            ):  # fmt: skip
                (answered if _answers(sized, question.data) else refused).append(question.facts)
            if len(refused) == before:
                return limits
            limits = explaining(answered, refused, target.limits)
        return target.limits

    def _level(self, levels: Levels) -> str:
        """The level that no answered call has and most refused calls share; empty if there is none."""
        guilty = [item for item in levels.items() if all(others.get(item[0]) != item[1] for _, others in self.others)]
        shared = [(sum(own.get(name) == level for *_, own in self.calls), level) for name, level in guilty]
        return max(shared, default=(0, ""))[1]


def _answers(target: Target, data: Data) -> bool:
    try:
        target.forward(data.x, data.scale, data.bias, **data.arrays)
    except TargetError as error:
        return isinstance(error, WrongResult)
    return True
