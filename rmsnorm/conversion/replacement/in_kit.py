"""Holds a layer and its replacement to the golden by the kit's bounds, as ``check`` holds any norm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.identify import Target
from rmsnorm.parity.asking import Refused, ask, in_circumstances
from rmsnorm.parity.circumstances import AXES, case_of
from rmsnorm.parity.comparison import Run, labelled
from rmsnorm.parity.fitting import adapted
from rmsnorm.parity.lines import places, shortened
from rmsnorm.targets.open import WIDTH as _WIDTH
from rmsnorm.targets.target import Shape

_TYPES: Final = ("float32", "bfloat16", "float16")
_FEW: Final = {  # what every number of axes is asked
    "gain": ("gain of x's dtype",), "layout": ("contiguous",), "gain's memory": ("dense gain",), "values": ("normal",),
    "gradients": ("all",), "dy": ("dense dy",), "mode": ("plain",), "history": ("first call",),
}  # fmt: skip
_MODES: Final = ("plain", "training")
_VALUES: Final = ("heavy tails", "zeros", "NaN in a row", "zeros in the gain")
_CALLS: Final = {  # of PyTorch, so that a kind of norm takes about two seconds
    "rows": ("1 row", "few rows", "257 rows", "thousands of rows", "8,209 rows"),
    "width": ("33", "768", "1024", "4096"),
}  # fmt: skip
_PARAMETERS: Final = ("scale", "bias")


def _as_kit(target: Target, norm: Norm, shape: Shape) -> Target:
    """A layer for x with as many axes as a shape, as the kit asks it: with the parameters and the gate that it has."""
    arguments = tuple(name for name in target.arguments if name in (*_PARAMETERS, "gate"))
    sized = replace(target, arguments=arguments, width=norm.width or target.width)
    name = next((name for name in _PARAMETERS if name in arguments), None)
    if norm.group or (name is None and len(norm.axes) == 1):  # of any width, or of that one
        return sized
    own = () if name is None else target.shape_of(name, shape)
    last = range(-max(len(norm.axes), len(own)), 0)
    sizes = tuple(shape[axis] if axis in norm.axes else own[axis] for axis in last)
    layout = sizes, norm.axes, norm.axes if name is None else tuple(range(-len(own), 0))
    return replace(sized, layout=layout, width=math.prod(sizes), resized=None)


class Golden:
    """Asks a layer and its replacement for what the golden computes."""

    def __init__(self, theirs: Target, ours: Target, norm: Norm) -> None:
        self.theirs, self.ours, self.norm = theirs, ours, norm
        self.compiles = theirs.bridge.compiles
        modes = (True, False) if theirs.training else (False,)
        # Where shapes are compiled, one program in place of one for each operation, for each mode.
        self.pairs = [(mode, [replace(each.compiled, training=None) for each in (theirs, ours)])
                      for mode in modes] if self.compiles else [(False, [theirs, ours])]  # fmt: skip

    def require_few(self, shape: Shape, *, every: bool) -> None:
        """Both must agree with it on few rows of x of a shape; ``every``: in every dtype, not float32 alone."""
        for dtype in _TYPES if every else _TYPES[:1]:
            # Of float16 in which all is computed, the derivative of 1 / rho overflows for rows that are small.
            narrow = dtype == "float16" and self.norm.known.rounding == "input_dtype"
            modes = _MODES if dtype == _TYPES[0] else _FEW["mode"]
            self._require([shape], {**_FEW, "values": ("size 1" if narrow else "normal",), "mode": modes}, [dtype])

    def require_values(self, shape: Shape) -> None:
        """Both must agree with it on rows of zeros, infinity, NaN and outliers."""
        levels = {**_FEW, "mode": _MODES}
        self._require([shape], {**levels, "values": _VALUES}, _TYPES[:1])
        # A row with infinity has no gradient: what comes in its place depends on the order of the operations.
        no_gradients = {**levels, "values": ("zeros and infinity in rows",), "gradients": ("none",)}
        self._require([shape], no_gradients, _TYPES[:1])

    def require_calls(self, shapes: Sequence[Shape]) -> None:
        """Both must agree with it in the circumstances of a call of PyTorch; others compile each shape for minutes."""
        # In 16 bits the sums of one that computes in the dtype of x are not exact enough for the kit's bounds.
        types = _TYPES[:1] if self.norm.known.rounding == "input_dtype" else _TYPES
        dense = {**_CALLS, "dy": ("dense dy",)}
        self._require(shapes, dense, types)
        # Libraries add one term after the other where a sum is not over the first axes: equal ones err alike there.
        if self.norm.axes == self.norm.gain_axes == tuple(range(-len(self.norm.axes), 0)):
            self._require(shapes[-1:], {**_FEW, "dy": ("expanded dy",), "rows": ("few rows", "257 rows")}, types)

    def _require(self, shapes: Sequence[Shape], levels: Mapping[str, Any], types: Sequence[str]) -> None:
        """Both must agree with it in pairs of these levels, by the bounds of ``check``.

        Args:
            shapes: of x, for the numbers of axes.
            levels: of the factors of which not all are asked.
            types: of x.

        Raises:
            Unproven: one of them does not, and where, in the words of ``check``.
        """
        for mode, pair in self.pairs:
            with contextlib.ExitStack() as stack:
                for each in (self.theirs, self.ours) if self.compiles else ():
                    stack.enter_context(each.in_mode(mode))
                self._require_of(pair, shapes, levels, types)

    def _require_of(
        self, pair: Sequence[Target], shapes: Sequence[Shape], levels: Mapping[str, Any], types: Sequence[str]
    ) -> None:
        norm = self.norm
        theirs, ours = (_as_kit(each, norm, shapes[-1]) for each in pair)
        inner = len(theirs.layout[0]) if theirs.layout else 1
        ranks = [len(shape) - inner + 1 for shape in shapes]
        only = {"rows": ["1 row" if ranks == [1] else "few rows"], "width": [str(theirs.width or _WIDTH)], **levels}
        only["axes"] = [level for level, rank in AXES.items() if rank in ranks]
        if norm.gate:  # without one it runs its own code
            only["gate"] = ["gate"]
        variant = norm.known
        runs = Run(theirs.framework), Run(theirs.framework)
        for circumstance, question, answer in in_circumstances(
            theirs, variant, types, gradients=theirs.differentiable, group_size=norm.group, only=only,
        ):  # fmt: skip
            if theirs.returned:
                raise Unproven(f"it returns {' and '.join(sorted(theirs.returned))}")
            if isinstance(answer, str):  # it does not take such a call: the replacement may
                continue
            sized, _ = adapted(ours, case_of(circumstance, variant), norm.group)
            try:
                answers = answer, ask(sized, question, norm.group)
            except Refused as error:
                raise Unproven(f"its replacement fails in {circumstance.name!r}: {error}") from None
            for run, comparisons in zip(runs, answers, strict=True):
                run.records += labelled(comparisons, variant.name, circumstance["x"], circumstance.name)
        for run, name in zip(runs, ("it", "its replacement"), strict=True):
            if run.failures:
                agrees = f"{name} agrees on the rows that identify tries, and not in {places(run)}"
                raise Unproven(f"{agrees}: {' '.join(shortened(run.failures[0], theirs.name).split())}")
        if not runs[0].records and types[0] == _TYPES[0]:
            raise Unproven("it answers in none of the circumstances of a call that check tries")
