"""Times callables against one another, in one process, in random alternation.

In every round each callable has a turn, in an order drawn from a seed, so that the drift of a machine affects all of
them alike. A turn has two halves, each with as many calls as take a millisecond, at least one: the first half is not
timed, the second is timed as a whole. The untimed calls wake the callable's own threads, load its data into the caches,
and last until the callable before has come to rest: after a parallel region torch's OpenMP workers spin on the cores
that the next one needs. (With a sleep instead one would measure cold caches.) A result is dropped before the next call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

LEAST_TURNS: Final = 5
_TURN: Final = 1e-3  # seconds that are timed together
_MOST_CALLS: Final = 500
_TICKS: Final = 100  # of /proc/stat in a second, on every Linux that CPython runs on


@dataclass(frozen=True)
class Timing:
    """Seconds for a call: median, 20th and 80th percentile, and how many turns of how many calls there were."""

    median: float
    p20: float
    p80: float
    turns: int
    calls: int


def alternate(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    seconds: float,
    seed: int = 0,
    synchronise: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time every candidate, with at least five turns for each.

    Args:
        candidates: callables by name.
        seconds: about how long to time all of them together.
        seed: of the order.
        synchronise: returns when a device has finished its work.
        clock: returns seconds.

    Returns:
        A Timing for every name.

    Example:
        >>> alternate({"sum": lambda: sum(range(1000))}, seconds=0.0)["sum"].turns
        5
    """
    calls = {name: _calls(candidate, synchronise, clock) for name, candidate in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    random, order, rounds = Random(seed), list(candidates), 0
    ends = clock() + seconds
    while order and (rounds < LEAST_TURNS or clock() < ends):
        random.shuffle(order)
        for name in order:
            _timed(candidates[name], calls[name], synchronise, clock)
            samples[name].append(_timed(candidates[name], calls[name], synchronise, clock))
        rounds += 1
    return {name: summary(times, calls[name]) for name, times in samples.items()}


def used_by_others(
    stat: Path = Path("/proc/stat"), own: Callable[[], float] = time.process_time
) -> Callable[[], float]:
    """Start to watch. The returned function says how many cores other processes have used since; NaN if not known.

    If others use the cores, a parallel region waits for its slowest thread, which may wait for a time slice: an op of
    microseconds then takes milliseconds every time, and its ratios mean nothing.
    """

    def now() -> tuple[float, float, float]:
        try:
            user, nice, system, _, _, *interrupts = map(float, stat.read_text().splitlines()[0].split()[1:9])
        except (OSError, ValueError):
            return math.nan, math.nan, math.nan
        return (user + nice + system + sum(interrupts)) / _TICKS, own(), time.perf_counter()

    began = now()

    def cores() -> float:
        busy, own, elapsed = (after - before for after, before in zip(now(), began, strict=True))
        return max(0.0, busy - own) / elapsed if elapsed > 0 else math.nan

    return cores


def summary(samples: Sequence[float], calls: int = 1) -> Timing:
    """Median, 20th and 80th percentile.

    >>> summary([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    Timing(median=3.5, p20=2.0, p80=5.0, turns=6, calls=1)
    """
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[-1], len(samples), calls)


def _calls(candidate: Callable[[], Any], synchronise: Callable[[], None], clock: Callable[[], float]) -> int:
    candidate()
    synchronise()
    once = _timed(candidate, 1, synchronise, clock)
    return min(_MOST_CALLS, max(1, math.ceil(_TURN / once))) if once > 0 else _MOST_CALLS


def _timed(
    candidate: Callable[[], Any], calls: int, synchronise: Callable[[], None], clock: Callable[[], float]
) -> float:
    began = clock()
    for _ in range(calls):
        candidate()
    synchronise()
    return (clock() - began) / calls
