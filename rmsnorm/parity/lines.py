"""The lines of a report on what differs, what was refused, and what was not compared."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping
from functools import reduce
from operator import and_
from typing import Final

from rmsnorm.parity.comparison import Comparison, Refusal, Run
from rmsnorm.parity.design import is_circumstance, levels_of
from rmsnorm.specification import dtypes

_WIDTH: Final = 100  # columns of a line; most fit into 80
_DIGITS: Final = {"float16": 5, "bfloat16": 4, "float32": 9, "float64": 17}  # which tell neighbours apart
_SHOWN: Final = 5  # refusals
_FEW: Final = 4
_SOME: Final = 8  # calls that differ: fewer share levels by chance
_MOST: Final = 0.6  # of the calls with a level


def skips(run: Run, *, edges: bool = False) -> list[tuple[list[str], str]]:
    """What was not compared: the names with the same reason together, and that.

    ``edges``: those that the target refused, in place of the others.
    """
    alike: dict[str, dict[str, None]] = {}
    for skip in run.skipped:
        if skip.edge == edges:
            alike.setdefault(skip.reason, {})[repr(skip.case) if skip.dtype else skip.case] = None
    return [([*names], reason) for reason, names in alike.items()]


def refused(run: Run) -> list[str]:
    """A line for what limits explain, and how to declare them, and one for each other reason."""
    lines: list[str] = []
    explained = [entry for entry in run.refusals if entry.explained]
    if explained:
        lines.append(f"refused: {len(explained)} calls, such as {explained[0].message}")
        lines.append(f"mend: if these are its limits, declare them: {run.limits}")
    others: dict[str, list[Refusal]] = {}
    for entry in run.refusals:
        if not entry.explained:
            others.setdefault(entry.level, []).append(entry)
    for level, entries in list(others.items())[:_SHOWN]:
        where = f" with {level!r}" if level else f", such as {entries[0].case!r}"
        lines.append(f"refused: {len(entries)} calls{where}: {entries[0].message}")
    return lines


def inexact(run: Run) -> list[str]:
    """A line for each quantity whose sums hold as terms that are added one after the other, and no better."""
    worst: dict[str, Comparison] = {}
    for record in run.records:
        if record.inexact and record.max_ulp >= worst.get(record.quantity, record).max_ulp:
            worst[record.quantity] = record
    return [
        wrapped(
            f"inexact: the sums of {name} are as inexact as terms added one after the other: up to "
            f"{record.max_ulp:.0f} ulp of {dtypes.short(record.dtype)}, in {record.case!r}; "
            "they fail with exact=True, or --exact", _WIDTH)
        for name, record in worst.items()
    ]  # fmt: skip


def places(run: Run) -> str:
    """In which cases the failures are, and in how many circumstances; with which levels, where all have these."""
    failed = dict.fromkeys(record.case for record in run.failures)
    parts = [repr(case) for case in failed if not is_circumstance(case)]
    parts[_SHOWN:] = [f"{len(parts) - _SHOWN} more cases"] * (len(parts) > _SHOWN)
    compared = {record.case: set(levels_of(record.case)) for record in run.records if is_circumstance(record.case)}
    calls = [case for case in failed if case in compared]
    if calls:
        parts.append(f"{len(calls)} of {len(compared)} circumstances{shared(compared, calls)}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def shared(compared: Mapping[str, set[str]], failed: Collection[str]) -> str:
    """The levels that every failed call has, or a few of which each has one, and with which most calls failed."""
    if len(failed) == 1:
        return f": {next(iter(failed))!r}"
    every: set[str] = reduce(and_, (compared[case] for case in failed))
    alike = every - reduce(and_, compared.values())
    if len(failed) < _FEW:  # calls that share a level by chance
        alike = {level for level in alike if sum(level in own for own in compared.values()) * _MOST <= len(failed)}
    if alike:
        return f", each with {' and '.join(repr(level) for level in sorted(alike))}"
    if len(failed) < _SOME:
        return ""
    counts = Counter(level for levels in compared.values() for level in levels)
    of_failed = Counter(level for case in failed for level in compared[case])
    often = [level for level in sorted(counts) if of_failed[level] >= max(2, _MOST * counts[level])]
    rest = [compared[case] for case in failed]
    named: list[str] = []
    while rest and often and len(named) < _SHOWN:
        level = max(often, key=lambda level: sum(level in levels for levels in rest))
        named.append(repr(level))
        rest, left = [levels for levels in rest if level not in levels], rest
        if len(rest) == len(left):
            return ""
    return f", each with {', '.join(named[:-1])} or {named[-1]}" if not rest and len(named) > 1 else ""


def difference(record: Comparison) -> str:
    line = f"  {record.case!r} {dtypes.short(record.dtype)} {record.quantity}: {record.detail}"
    return f"{line}; {numbers(record)}" if record.bound else line


def shortened(record: Comparison, target: str) -> str:
    """A difference in a line: numbers with the digits that tell neighbours apart, and no parity ratio."""
    digits = _DIGITS.get(record.dtype, 9) if record.bound else 9  # without a bound, in whatever dtype
    detail = record.detail.replace(f"{target} ", "it ")
    detail = re.sub(r"-?\d\.\d+(?:e[-+]\d+)?", lambda number: f"{float(number[0]):.{digits}g}", detail)
    line = f"  {record.case!r} {dtypes.short(record.dtype)} {record.quantity}: {detail}"
    return wrapped(re.sub(" elements differ$", " differ", line), _WIDTH)


def wrapped(line: str, width: int) -> str:
    """The line, in several ones where it is longer: a reason is there to its end."""
    indent = " " * (len(line) - len(line.lstrip()))
    wrapper = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False
    )  # fmt: skip
    return "\n".join(wrapper.wrap(line.strip())) if len(line) > width else line


def not_compared(run: Run, *, width: int = _WIDTH) -> list[str]:
    """A line for each reason, with as many cases as fit."""
    lines = []
    for edges, start, end in (
        (True, "edge: ", "; it fails with extremes=True, or --extremes"),
        (False, "not compared: ", ""),
    ):
        for names, reason in skips(run, edges=edges):
            line = ""
            for count in range(len(names), 0, -1):
                more = f" and {len(names) - count} more" if count < len(names) else ""
                line = f"{start}{', '.join(names[:count])}{more}: {reason}"
                if len(line) + len(end) <= width:
                    break
            lines.append(wrapped(line + end, width))
    return lines


def numbers(record: Comparison) -> str:
    """The parity ratio of a comparison beside its bound, and in 16 bits the share of identical bits of y."""
    text = f"parity ratio {record.parity_ratio:.3g}, bound {record.bound:.3g}"
    if record.quantity == "y" and record.dtype in dtypes.HALF:
        text += f"; {100 * record.bit_identical:.2f} % identical"
    return text
