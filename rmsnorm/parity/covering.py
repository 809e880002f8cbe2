"""A covering array: few rows of levels, one of each factor, in which every pair of levels occurs.

A mistake that shows in one circumstance shows in any case that has it, and one that needs two at once by a case that
has both. Of eleven factors with two to ten levels, some 60 rows have every pair; all combinations are millions.

Source: Cohen, Dalal, Fredman and Patton 1997, The AETG system (one row after another, each the best of some that are
built greedily).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Final

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]
Allows = Callable[[Mapping[str, str]], bool]

_TRIES: Final = 8  # rows of which the best is taken


def pairs_of(row: Mapping[str, str], strength: int = 2) -> Iterator[Pair]:
    """Every combination of so many of the factors of a row, with their levels."""
    yield from map(frozenset, combinations(row.items(), strength))


def feasible(factors: Mapping[str, Sequence[str]], allows: Allows, strength: int = 2) -> set[Pair]:
    """Every combination of levels of so many factors that is allowed by itself.

    >>> sorted(map(sorted, feasible({"a": "12", "b": "3"}, lambda row: row.get("a") != "2")))
    [[('a', '1'), ('b', '3')]]
    """
    every = set()
    for names in combinations(factors, strength):
        for levels in product(*(factors[name] for name in names)):
            row = dict(zip(names, levels, strict=True))
            if allows(row):
                every.add(frozenset(row.items()))
    return every


def covering(
    factors: Mapping[str, Sequence[str]], allows: Allows = lambda row: True, *, strength: int = 2, seed: int = 0
) -> tuple[list[Row], set[Pair]]:
    """Rows in which every allowed pair of levels occurs, and the pairs that no row can have.

    Args:
        factors: the levels of each.
        allows: whether a row with some of the factors can become a case; more factors never allow what fewer forbid.
        strength: 2 for pairs, 3 for triples.
        seed: of the choices between equals.

    Example:
        >>> rows, _ = covering({"a": "12", "b": "12", "c": "12"})
        >>> len(rows), {(row["a"], row["b"]) for row in rows} == {("1", "1"), ("1", "2"), ("2", "1"), ("2", "2")}
        (4, True)
    """
    wanted, impossible, rows = feasible(factors, allows, strength), set(), []
    chance = random.Random(seed)
    for first in sorted(wanted, key=sorted):  # the same order in every process
        if first not in wanted:
            continue
        built = [row for _ in range(_TRIES) if (row := _built(factors, allows, dict(first), wanted, strength, chance))]
        if not built:
            impossible.add(first)
            wanted.discard(first)
            continue
        best = max(built, key=lambda row: sum(pair in wanted for pair in pairs_of(row, strength)))
        rows.append({name: best[name] for name in factors})
        wanted.difference_update(pairs_of(best, strength))
    return rows, impossible


def _built(
    factors: Mapping[str, Sequence[str]], allows: Allows, row: Row, wanted: set[Pair], strength: int,
    chance: random.Random,
) -> Row | None:  # fmt: skip
    """A row with these levels, and of every other factor the level that adds most pairs; None if there is none."""
    others = [name for name in factors if name not in row]
    chance.shuffle(others)
    for name in others:
        levels = [level for level in factors[name] if allows({**row, name: level})]
        if not levels:
            return None
        chance.shuffle(levels)
        row[name] = max(levels, key=lambda level: _added(row, (name, level), wanted, strength))
    return row


def _added(row: Row, entry: tuple[str, str], wanted: set[Pair], strength: int) -> int:
    others: Iterable[tuple[tuple[str, str], ...]] = combinations(row.items(), strength - 1)
    return sum(frozenset((*some, entry)) in wanted for some in others)
