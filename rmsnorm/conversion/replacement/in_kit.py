"""Holds a layer and its replacement to the golden in the circumstances of a call, as ``check`` holds any norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.identify import Target
from rmsnorm.parity.asking import Refused, ask, in_circumstances
from rmsnorm.parity.circumstances import AXES, case_of
from rmsnorm.parity.comparison import Run, labelled
from rmsnorm.parity.fitting import adapted
from rmsnorm.parity.lines import places, shortened

_TYPES: Final = ("float16", "bfloat16", "float32")  # of x in the circumstances
_LEVELS: Final = {  # so that a kind of norm takes about two seconds
    "rows": ("1 row", "few rows", "257 rows", "thousands of rows", "8,209 rows"),
    "width": ("33", "768", "1024", "4096"),
}  # fmt: skip


def is_asked(target: Target, norm: Norm) -> bool:
    """Whether the kit asks it: a norm of PyTorch along the last axes, with a gain and a bias along the same ones.

    Other libraries compile each shape, which takes minutes.
    """
    shape = norm.shapes[-1]
    last = tuple(range(-len(norm.axes), 0))
    sizes = shape[len(shape) - len(last) :]
    fits = all(target.shape_of(name, shape) == sizes for name in ("scale", "bias") if name in target.arguments)
    return target.framework == "torch" and norm.axes == norm.gain_axes == last and fits


def require_golden(theirs: Target, ours: Target, norm: Norm) -> None:
    """The layer and its replacement must agree with the golden in the kit's circumstances, by the kit's bounds.

    Asked are pairs of circumstances at the layer's own width and the numbers of axes at which both agree.

    Raises:
        Unproven: one of them does not, and where, in the words of ``check``.
    """
    # In 16 bits the sums of one that computes in the dtype of x are not exact enough for the kit's bounds.
    types = _TYPES[-1:] if norm.known.rounding == "input_dtype" else _TYPES
    arguments = tuple(name for name in theirs.arguments if name in ("scale", "bias", "gate"))
    theirs, ours = (replace(each, arguments=arguments, width=norm.width or each.width) for each in (theirs, ours))
    ranks = [len(shape) - len(norm.axes) + 1 for shape in norm.shapes]
    only = {**_LEVELS, "axes": [level for level, rank in AXES.items() if rank in ranks]}
    if norm.gate:  # without one it runs its own code
        only["gate"] = ["gate"]
    runs = Run(theirs.framework), Run(theirs.framework)
    for circumstance, question, answer in in_circumstances(
        theirs, norm.known, types, gradients=theirs.differentiable, group_size=norm.group, only=only,
    ):  # fmt: skip
        if isinstance(answer, str):  # it does not take such a call: the replacement may
            continue
        sized, _ = adapted(ours, case_of(circumstance, norm.known), norm.group)
        try:
            answers = answer, ask(sized, question, norm.group)
        except Refused as error:
            raise Unproven(f"its replacement fails in {circumstance.name!r}: {error}") from None
        for run, comparisons in zip(runs, answers, strict=True):
            run.records += labelled(comparisons, norm.known.name, circumstance["x"], circumstance.name)
    if not runs[0].records:
        raise Unproven("it answers in none of the circumstances of a call that check tries")
    for run, name in zip(runs, ("it", "its replacement"), strict=True):
        if run.failures:
            agrees = f"{name} agrees on the rows that identify tries, and not in {places(run)}"
            raise Unproven(f"{agrees}: {' '.join(shortened(run.failures[0], theirs.name).split())}")
