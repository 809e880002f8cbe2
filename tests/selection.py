"""Which tests run in a number of minutes: first those of what changed, then of what stands on it, then of the rest.

Each of the three gets as many cases as fit into its share of the time: every case, or some of each test, or one, or one
of some tests only. ``seconds.json`` has the processor time of a case in each file; ``make times`` writes it anew.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

MINUTES: Final = 7.0
CORES: Final = 2  # of the machine for which the minutes hold
TABLE: Final = Path(__file__).with_name("seconds.json")
_SHARE: Final = 0.78  # of the time is for the cases, the rest for imports and collecting
_COSTLY: Final = 15.0  # seconds of a test with the mark ``costly``, which the runs that are measured leave out
_CASES: Final = 3  # of a test for each framework, where its mark ``sample(n)`` says no other number
_SHARES: Final = {"changed": 0.5, "above": 0.6, "other": 1.0}  # of the time that those before leave


@dataclass(frozen=True)
class Case:
    """A test with its parameters.

    Attributes:
        item: what pytest calls it.
        file: from the root of the repository.
        test: its name without the parameters.
        relation: of its test to what changed: "changed", "above" or "other".
        framework: that it is a case of, or "".
        sample: how many of its cases are some.
        mark: "slow", "costly" or "".
    """

    item: Any
    file: str
    test: str
    relation: str
    framework: str = ""
    sample: int | None = None
    mark: str = ""


@dataclass(frozen=True)
class Level:
    """How many of the cases of a test run: ``share`` of the tests, ``times`` the sample of each, or one."""

    name: str
    times: int = 0
    share: float = 1.0


ALL: Final = Level("every case")
LEVELS: Final = (
    ALL, *(Level(f"{times * _CASES} cases", times) for times in (6, 3, 2, 1)), Level("one case"),
    *(Level(f"one case of one test in {n}", share=1 / n) for n in (2, 3, 5, 8, 16)),
)  # fmt: skip
_FIRST: Final = {"changed": 0, "above": LEVELS.index(Level("3 cases", 1)), "other": LEVELS.index(Level("one case"))}


def at(level: Level, cases: Iterable[Case], seed: str) -> list[Case]:
    """Those that run at a level, drawn by the seed and the name of each test."""
    kept: list[Case] = []
    groups: defaultdict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        if case.mark == "slow" or (case.mark == "costly" and level is not ALL):
            continue
        if level is ALL:
            kept.append(case)
        elif random.Random(f"{seed} {case.test}").random() < level.share:
            groups[case.test, case.framework if level.times else ""].append(case)
    for (test, framework), group in groups.items():
        count = level.times * (group[0].sample or _CASES) or 1
        drawn = random.Random(f"{seed} {test} {framework}").sample(range(len(group)), min(count, len(group)))
        kept += [group[number] for number in sorted(drawn)]
    return kept


@cache
def _table() -> dict[str, float]:
    table: dict[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def seconds(cases: Iterable[Case], table: dict[str, float]) -> float:
    """Their processor time; of a file that the table does not have, the mean of the others."""
    mean = sum(table.values()) / max(len(table), 1)
    return sum(_COSTLY if case.mark == "costly" else table.get(case.file, mean) for case in cases)


def chosen(
    cases: Sequence[Case], seed: str, minutes: float = MINUTES, table: dict[str, float] | None = None
) -> tuple[set[Any], dict[str, str]]:
    """The items that run, and by relation the name of the level."""
    table = _table() if table is None else table
    left = 60 * minutes * CORES * _SHARE
    of_relation = {name: some for name in _SHARES if (some := [case for case in cases if case.relation == name])}
    kept: dict[str, list[Case]] = {name: [] for name in of_relation}
    levels: dict[str, str] = {}
    last = [*of_relation][-1:]
    for shares in (_SHARES, dict.fromkeys(_SHARES, 1.0)):  # what the others leave is for what changed
        for relation, some in of_relation.items():
            left += seconds(kept[relation], table)
            for level in LEVELS[_FIRST[relation] :]:
                drawn = at(level, some, seed)
                cost = seconds(drawn, table)
                if cost <= (left if relation in last else left * shares[relation]):
                    break
            left, levels[relation], kept[relation] = left - cost, level.name, drawn
    return {case.item for drawn in kept.values() for case in drawn}, levels
