"""Compares a function that adds the parts of several ranks, and a residual, before it normalises.

Every part is a multiple of one number, and so small that float32 adds all of them exactly, in any order. So h has one
right value for each order of roundings, and its bits count; y is judged by the bounds of the kit. In float32
and float64 nothing is rounded, so that all orders are the same there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl.all_reduce import ORDERS, Order, all_reduced
from rmsnorm.parity import cases
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.checking import dtypes_named
from rmsnorm.parity.comparison import Comparison, Run, Skip, labelled
from rmsnorm.parity.judge import Outcome, compare, expect, failed
from rmsnorm.parity.kernel import Kernel
from rmsnorm.parity.quantised import inside
from rmsnorm.parity.quantised_cases import Case
from rmsnorm.parity.report import Report
from rmsnorm.specification import dtypes as formats
from rmsnorm.specification import errors
from rmsnorm.specification.variants import Preset, ResidualRounding, Variant, get_variant
from rmsnorm.targets import TargetError
from rmsnorm.targets.target import random_state_kept

_RANKS: Final = (2, 3, 8)
_SHAPE: Final = (64, 48)
_OTHER: Final[Mapping[ResidualRounding, ResidualRounding]] = {"before": "after", "after": "before"}
_SENTENCES: Final[Mapping[Order, str]] = {
    "sum_rounded": "the sum over ranks is rounded once, before the residual is added",
    "each_rounded": "the sum over ranks is rounded after each rank",
    "rounded_once": "the sum over ranks and the residual is rounded once",
    "truncated": "the sum over ranks is truncated",
}


@random_state_kept()
def check_all_reduce(
    function: Any,
    order: Order,
    variant: Preset | Variant = "standard",
    *,
    framework: str | None = None,
    dtypes: Sequence[str] | str | None = None,
    device: str = "cpu",
    init: Mapping[str, Any] | None = None,
) -> Report:
    """Compare a function that adds the parts of several ranks before it normalises with the golden.

    It is called as f(parts, scale, eps=..., residual=...) with lists of 2, 3 and 8 arrays, and with and without a
    residual if it takes one. It returns y, or y and h, whose bits count. If the roundings have another order, the
    report names it.

    Args:
        function: of parts, the gain and options.
        order: of the roundings, as for ``numpy_impl.all_reduced``: sum_rounded, each_rounded, rounded_once, truncated.
        variant: of the norm.
        framework, dtypes, device, init: as of ``check``.

    Raises:
        ValueError: there is no such order, variant or dtype, or the function takes no eps.

    Example:
        >>> from rmsnorm.numpy_impl import all_reduced, rms_norm
        >>> def norm(parts, weight, eps):
        ...     return rms_norm(all_reduced(np.stack(parts), order="sum_rounded"), weight, eps=eps)
        >>> check_all_reduce(norm, "sum_rounded").passed
        True
    """
    if order not in ORDERS:
        raise errors.not_a_choice("check_all_reduce", "order", order, ORDERS)
    variant, types = get_variant("check_all_reduce", variant), dtypes_named(dtypes)
    kernel = Kernel(function, framework, device, init or {}, of_parts=True)
    if not kernel.takes("eps"):
        want = "a function f(parts, scale, *, eps)"
        raise errors.out_of_domain(
            "check_all_reduce", "function", kernel.name, want, "write an adapter that takes it by name"
        )
    run = Run("", device=kernel.device)
    run.skipped.append(Skip("gradients", "", "check differentiates no function of parts"))
    calls: list[tuple[Case, Sequence[Array]]] = []
    for dtype, case in _cases(kernel, variant, types):
        run.cases += 1
        try:
            outputs = kernel.call(case)
        except TargetError as error:
            comparisons = [failed("y", str(error))]
        else:
            calls.append((case, outputs))
            comparisons = _compared(case, outputs, variant, order)
        run.records += labelled(comparisons, variant.name, dtype, case.name)
    kernel.conclude(run)
    if run.failures:
        run.message = _instead(calls, variant) if len(calls) == run.cases else "it raised"
    return Report(kernel.name, variant, run, label=f"{variant.label} of a sum over ranks, {order}")


def _cases(kernel: Kernel, variant: Variant, types: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Calls with parts and a residual that are multiples of one number in each row.

    float32 adds nine parts below 2^(bits + 2) of these exactly, as bits + 6 <= 24. What the dtype loses of their sum is
    a number of it, too, as bits + 6 is at most twice its precision: ``_read`` needs that.
    """
    for dtype, ranks, has_residual in product(types, _RANKS, (False, True)):
        if not kernel.takes("residual") if has_residual else kernel.needs_residual:
            continue
        bits = min(18, -2 * math.log2(formats.unit_roundoff(dtype)) - 6)
        random = np.random.default_rng(ranks)
        multiples = np.rint(np.clip(random.normal(size=(ranks + 1, *_SHAPE)), -4, 4) * 2.0**bits) + 0.0
        x = cast(multiples * 2.0 ** (random.integers(-8, 1, (_SHAPE[0], 1)) - bits), dtype)
        name = f"{ranks} ranks{', residual' * has_residual}"
        data = _data(name, variant, dtype, None)
        residual = x[0] if has_residual else None
        yield dtype, Case(name, x[1:], np.asarray(data.scale), residual, data.call.eps, {})


def _data(name: str, variant: Variant, dtype: str, residual: Array | None) -> Data:
    case = cases.Case(name, _SHAPE, (), "parts of several ranks", bias=False, residual=residual is not None)
    return replace(cases.make(case, variant, dtype), residual=residual)


def _read(case: Case, order: Order) -> tuple[Array, Array | None]:
    """Two numbers of the dtype whose exact sum a norm may read, and whose rounded sum is h."""
    if order != "rounded_once":
        return all_reduced(case.x, order=order), case.residual
    h = all_reduced(case.x, case.residual, order=order)
    exact = np.sum(case.x.astype(np.float64), axis=0)
    exact = exact if case.residual is None else exact + case.residual.astype(np.float64)
    return h, cast(exact - h.astype(np.float64), h.dtype.name)


def _compared(case: Case, outputs: Sequence[Array], variant: Variant, order: Order) -> list[Comparison]:
    """Of y and, where it is returned, of h."""
    x, residual = _read(case, order)
    data = replace(_data(case.name, variant, x.dtype.name, residual), x=x, scale=case.gain)
    y, *more = outputs
    h = all_reduced(case.x, case.residual, order=order)
    of_h = [inside("h", more[0], h, h)] if more else []
    return [*compare(Outcome({"y": [y]}), expect(data, ["y"])), *of_h]


def _instead(calls: Sequence[tuple[Case, Sequence[Array]]], variant: Variant) -> str:
    """What computes the results."""
    own, other = variant.residual_rounding, _OTHER[variant.residual_rounding]
    for rounding in (own, other):
        read = variant.replace(residual_rounding=rounding)
        fitting = [o for o in ORDERS if all(c.passed for case, got in calls for c in _compared(case, got, read, o))]
        if fitting:
            reads = "" if rounding == own else f", and the norm reads h {own} its last rounding"
            return " or ".join(_SENTENCES[o] for o in fitting) + reads
    return "no order of roundings gives these results: a part, the residual or the norm is another one"
