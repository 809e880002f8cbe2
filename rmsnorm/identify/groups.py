"""Which elements of a row change one another, and the groups of the last axis that are normalised apart."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np

from rmsnorm.accuracy.bounds import CHANGED
from rmsnorm.identify.asking import Probe
from rmsnorm.identify.findings import NotRms
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.target import TargetError

_UNEVEN: Final = "x_j changes some y_i of its row and not others"


def responding(probe: Probe, which: Array) -> Array:
    """For every element j of ``which``: the y_i of a row that change when x_j grows tenfold, without y_j itself."""
    random = np.random.default_rng(7)
    n = probe.n
    any_changed = np.zeros((len(which), n), bool)
    for sign in (1.0, -1.0):  # in a narrow row what the mean and the variance do to one y_i may cancel
        base = random.uniform(0.5, 1.5, n) * random.choice([-1.0, 1.0], n)
        rows = np.tile(base, (len(which) + 1 + (len(which) + 1) % 2, 1))  # an even number: an odd one may be a mistake
        rows[np.arange(len(which)), which] = sign * 4 * math.sqrt(n) * np.sign(base[which])
        y = probe.rows(rows)
        any_changed |= ~(np.abs(y[: len(which)] - y[-1]) <= CHANGED * np.max(np.abs(y[-1])))
    any_changed[np.arange(len(which)), which] = False
    return any_changed


def grouped(probe: Probe) -> Probe:
    """The probe with the groups of the last axis that are normalised apart, if there are any.

    At another width the whole of a row may turn out to be one group, and the number of groups may stay as it is.

    Raises:
        NotRms: no element changes another one, or not as in a normalisation.
    """
    layout, words = probe.layout, ""
    if layout.axes == (len(layout.sizes) - 1,):
        n, group = probe.n, _group(probe)
        for width, other in probe.other_widths((2, 3, 4)):
            try:
                with other.target.evaluating():
                    wider = _group(other)
            except (NotRms, TargetError):
                continue
            if group is None and wider == n:
                group = n
            elif group and wider == group * (width // n):
                words = f"; there are {n // group} groups at a width of {width}, too, of {wider} elements"
            elif wider != group:
                probe.findings.defect(
                    f"the groups have {group or n} elements at a width of {n}, and {wider or width} at {width}"
                )
            break
        layout = replace(layout, group=group, groups=n // group if group and words else None)
    shape = str(list(layout.shape(4 if layout.unlimited else 1))).replace(" ", "")
    probe.findings.add("axes", layout.description, f"where y changes when one element of x {shape} does")
    if layout.group:
        probe.findings.add("group_size", layout.group, f"elements of the last axis that change one another{words}")
    return replace(probe, layout=layout)


def _group(probe: Probe) -> int | None:
    """Size of the groups of the last axis that are normalised apart, None for one group."""
    n = probe.n
    which = np.unique(np.concatenate([np.arange(min(n, 64)), np.linspace(0, n - 1, 64).astype(int)]))
    answer = responding(probe, which)
    if n > 1 and not answer.any():
        raise NotRms("no element of x changes another one's y: nothing is normalised")
    groups = set()  # their sizes, and where their first elements lie
    for j, changed in zip(which, answer, strict=True):
        members = np.union1d(np.flatnonzero(changed), [j])
        if changed.any():
            if members[-1] - members[0] + 1 != len(members):
                raise NotRms(_UNEVEN)
            groups.add((len(members), int(members[0]) % len(members)))
    if len(groups) == 1:
        ((size, start),) = groups
        if size < n and start == 0 and n % size == 0:
            return size
    if any(size != n for size, _ in groups):
        raise NotRms(_UNEVEN)
    return None
