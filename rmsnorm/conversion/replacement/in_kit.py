"""Holds a layer and its replacement to the golden by the kit's bounds, as ``check`` holds any norm."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.identify import Target
from rmsnorm.parity.asking import Refused, ask, in_circumstances
from rmsnorm.parity.circumstances import AXES, case_of
from rmsnorm.parity.comparison import Run, labelled
from rmsnorm.parity.fitting import adapted
from rmsnorm.parity.lines import places, shortened
from rmsnorm.targets.bridges import Array
from rmsnorm.targets.open import WIDTH as _WIDTH
from rmsnorm.targets.target import Called, Shape

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


@dataclass(frozen=True)
class _Place:
    """Where the last axes of x, as the kit has it, are in x of a layer.

    Attributes:
        axes: of x of the layer.
        number: whether the gain is one number, for which the kit has one more axis of size 1.
        gain: the shape of the gain, as the kit has it; None for that of the layer.
        wide: whether the layer gets float64 in place of float32.
    """

    axes: Shape
    number: bool = False
    gain: Shape | None = None
    wide: bool = False

    def there(self, array: Array, shape: Shape | None = None) -> Array:
        """An array of the kit as the layer has it; ``shape``: that of a parameter."""
        if shape is not None:
            array = array if self.gain is None else array.reshape(shape)
        else:
            array = array.squeeze(-len(self.axes) - 1) if self.number else array
            array = np.moveaxis(array, range(-len(self.axes), 0), self.axes)
        return array.astype(np.float64) if self.wide else array

    def here(self, array: Array, *, parameter: bool = False) -> Array:
        """And back."""
        if parameter:
            array = array if self.gain is None else array.reshape(self.gain)
        else:
            array = np.moveaxis(array, self.axes, range(-len(self.axes), 0))
            array = np.expand_dims(array, -len(self.axes) - 1) if self.number else array
        if self.wide:  # of another dtype it is wrong
            return array.astype(np.float32 if array.dtype == np.float64 else np.float16)
        return array


@dataclass
class _Placed(Target):
    """A layer as the kit asks it, which has the rows along the last axis."""

    place: _Place = _Place((-1,))

    def called(self, arrays: Mapping[str, Array], leaves: Collection[str] = ()) -> Called:
        x = self.place.there(arrays["x"])
        moved = {name: self.place.there(array, self.shape_of(name, x.shape) if name in _PARAMETERS else None)
                 for name, array in arrays.items()}  # fmt: skip
        return _Called(**vars(super().called(moved, leaves)))


class _Called(Called):
    target: _Placed

    @property
    def y(self) -> Array:
        return self.target.place.here(super().y)

    def gradients(self, dy: Array | None, dh: Array | None = None) -> Mapping[str, Array | None]:
        place = self.target.place
        gradients = super().gradients(None if dy is None else place.there(dy), dh)
        return {name: None if g is None else place.here(g, parameter=name in _PARAMETERS)
                for name, g in gradients.items()}  # fmt: skip


def _placed(target: Target, norm: Norm, shape: Shape, *, wide: bool) -> _Placed:
    """A layer for x with as many axes as a shape, as the kit asks it."""
    arguments = tuple(name for name in target.arguments if name in ("scale", "bias", "gate"))
    kept = {**vars(target), "arguments": arguments, "width": norm.width or target.width}
    if norm.group:
        return _Placed(**kept, place=_Place((-1,), wide=wide))
    name = next((name for name in _PARAMETERS if name in arguments), None)
    number = name is not None and math.prod(target.shape_of(name, shape)) == 1
    axes = sorted({*norm.axes, *(() if number else norm.gain_axes)})
    if name is None and len(axes) == 1:  # of any width, or of that one
        return _Placed(**kept, place=_Place((axes[0],), wide=wide))
    sizes = (*[1] * number, *(shape[axis] for axis in axes))
    normalised = tuple(axes.index(axis) - len(axes) for axis in norm.axes)
    of_gain = (-len(sizes),) if number else tuple(axes.index(axis) - len(axes) for axis in norm.gain_axes)
    kept |= {"layout": (sizes, normalised, of_gain), "width": math.prod(sizes), "resized": None}
    return _Placed(**kept, place=_Place(tuple(axes), number, tuple(sizes[axis] for axis in of_gain), wide))


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
        if every:
            self._require([shape], _FEW, _TYPES[:1], wide=True)

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

    def _require(
        self, shapes: Sequence[Shape], levels: Mapping[str, Any], types: Sequence[str], *, wide: bool = False
    ) -> None:
        """Both must agree with it in pairs of these levels, by the bounds of ``check``.

        Args:
            shapes: of x, for the numbers of axes.
            levels: of the factors of which not all are asked.
            types: of x.
            wide: whether the layers get float64, and must give that.

        Raises:
            Unproven: one of them does not, and where, in the words of ``check``.
        """
        for mode, pair in self.pairs:
            with contextlib.ExitStack() as stack:
                for each in (self.theirs, self.ours) if self.compiles else ():
                    stack.enter_context(each.in_mode(mode))
                self._require_of(pair, shapes, levels, types, wide=wide)

    def _require_of(
        self, pair: Sequence[Target], shapes: Sequence[Shape], levels: Mapping[str, Any], types: Sequence[str], *,
        wide: bool,
    ) -> None:  # fmt: skip
        norm = self.norm
        theirs, ours = (_placed(each, norm, shapes[-1], wide=wide) for each in pair)
        ranks = [len(shape) - len(theirs.place.axes) + 1 for shape in shapes]
        only = {"rows": ["1 row" if ranks == [1] else "few rows"], "width": [str(theirs.width or _WIDTH)], **levels}
        only["axes"] = [level for level, rank in AXES.items() if rank in ranks]
        if norm.gate:  # without one it runs its own code
            only["gate"] = ["gate"]
        variant = norm.known
        if wide and variant.eps is None:  # that of float64
            variant = variant.replace(eps=float(np.finfo(np.float64).eps))
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
                dtype = "as float64, " if wide else ""
                raise Unproven(f"{agrees}: {dtype}{' '.join(shortened(run.failures[0], theirs.name).split())}")
        if not runs[0].records and types[0] == _TYPES[0] and not wide:
            raise Unproven("it answers in none of the circumstances of a call that check tries")
