"""The arrays of a circumstance: some different rows, which of them each row of x is, and the memory of each tensor."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from rmsnorm.parity.cases import Array, Case, Data, call_of, make
from rmsnorm.parity.design import MASKS, ONE_SIGN, OPTIONS, Circumstance, lead_of
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.limits import Facts, dense

_BLOCK: Final = 2**15  # elements of the different rows of a call
_APART: Final = ("every second element", "transposed", "Fortran order")  # in which the elements of a row have gaps
_KINDS: Final = {  # of the values of cases.py; all others are "alike"
    "heavy tails": "rows", "one sign": "one_sign", "ties": "constant",
    **{kind: kind for kind in ("large", "small", "huge", "tiny")},
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """The arrays of a circumstance: some different rows, and which of them each row of x is."""

    circumstance: Circumstance
    rows: Data  # the different ones
    order: Array  # for each row of x, its number among these
    lead: tuple[int, ...]
    known: dict[Any, Any] = field(default_factory=dict, compare=False)  # what is expected, once it was computed

    @property
    def counts(self) -> Array:
        """How often each of the different rows is there."""
        return np.bincount(self.order, minlength=len(self.rows.x))

    def spread(self, array: Array) -> Array:
        """An array of the different rows as one of the shape of x."""
        return array[self.order].reshape(*self.lead, *array.shape[1:])

    @property
    def facts(self) -> Facts:
        """What limits may forbid of it."""
        shape = (*self.lead, *self.rows.x.shape[1:])
        own = [array for array in (self.data.x, self.data.residual, self.data.gate) if array is not None]
        is_dense = all(dense(array.strides, array.shape, array.itemsize) for array in own)
        same = self.rows.scale is None or self.rows.scale.dtype == self.rows.x.dtype
        return Facts(len(shape), shape[-1], math.prod(shape[:-1]), same, is_dense)

    @cached_property
    def data(self) -> Data:
        """The whole call, each tensor in the memory that the circumstance says."""
        level, rows = self.circumstance, self.rows
        arrays: dict[str, Any] = {name: self.spread(array) for name in ("x", "dy", "dh", *OPTIONS)
                  if (array := getattr(rows, name)) is not None}  # fmt: skip
        layout = level["layout"].removeprefix("x alone ")
        for name, array in arrays.items():
            if name == "x" or (name != "dh" and not level["layout"].startswith("x ")):
                arrays[name] = in_memory(array, layout)
        if level["mask"] == MASKS[1]:
            arrays["mask"] = rows.mask[0]  # type: ignore[index]
        if level["dy"] == "expanded dy":
            number = level["gradients"] != "dh alone"
            arrays["dy"] = np.broadcast_to(arrays["dy"].dtype.type(number), arrays["dy"].shape)
        scale = rows.scale
        if scale is not None:
            layouts = {"strided gain": "every second element", "unaligned gain": "unaligned"}
            scale = in_memory(scale, layouts.get(level["gain's memory"], "contiguous"))
        case = replace(rows.case, shape=arrays["x"].shape)
        return replace(rows, case=case, call=call_of(case, rows), scale=scale, **arrays)


def question(circumstance: Circumstance, case: Case, variant: Variant) -> Question:
    """The arrays of a circumstance for a case that the target takes."""
    level = circumstance
    axes = len({*case.options.get("axis", (-1,)), *case.options.get("feature_axis", ())})
    lead, sizes = case.shape[:-axes], case.shape[-axes:]
    rows, n = math.prod(lead), math.prod(sizes)
    distinct = level["values"] == "one sign" or level["x"] == "float64"
    some = min(rows, max(3, (2 * ONE_SIGN if distinct else _BLOCK) // n))
    some -= some < rows and some % 2 == 0  # odd, so that the rows' numbers modulo 64 or 256 say nothing of their values
    data = make(replace(case, shape=(some, *sizes), name=level.name), variant, level["x"])
    data = replace(_with_values(data, level), is_dense=level["layout"].removeprefix("x alone ") not in _APART)
    return Question(circumstance, data, np.arange(rows) % max(some, 1), lead)


def _with_values(data: Data, level: Circumstance) -> Data:
    x, scale, dy, values = data.x, data.scale, data.dy, level["values"]
    random = np.random.default_rng(zlib.crc32(level.name.encode()))
    place = min(1, math.prod(x.shape[1:]) - 1)
    rows: dict[str, dict[int, float]] = {  # a number in the row with this index
        "NaN in a row": {len(x) // 2: np.nan}, "infinity in a row": {len(x) // 2: np.inf},
        "zeros and infinity in rows": {len(x) // 2: np.inf, -1: -np.inf},
    }  # fmt: skip
    if values == "size 1":
        x[...] = np.where(x < 0, -1, 1) * random.uniform(0.5, 2.0, x.shape)
    if values == "zeros":
        x[...] = 0
    if values in ("a row of zeros", "zeros and infinity in rows"):
        x[:1] = 0
    for row, value in rows.get(values, {}).items():
        x[row].flat[place] = value
    if level["layout"] == "x expanded":
        x[...] = x[-1:]
    if values == "zeros in the gain" and scale is not None:
        scale = scale.copy()
        scale.flat[::3], scale.flat[1::3] = 0.0, -data.variant.scale_offset
    if level["gain's memory"] == "expanded gain" and scale is not None:
        scale = np.broadcast_to(scale.ravel()[:1].reshape([1] * scale.ndim), scale.shape)
    gate = data.gate
    if gate is not None and values == "heavy tails":  # up to 40, where f(z) is z, and down to -60
        gate = (gate.astype(np.float64) * 3).astype(gate.dtype)
    mask = None
    if level["mask"] in MASKS:
        mask = _mask_of(x, level, random)
        dy = np.where(mask, dy, dy.dtype.type(0))  # what is under the mask has no cotangent
    if mask is not None and values == "NaN under the mask":
        x[~mask] = np.nan
        if gate is not None:
            gate[~mask] = np.nan
    if level["dy"] == "expanded dy":
        dy = np.ones_like(dy)
    if level["gradients"] == "dh alone":
        dy = np.zeros_like(dy)
    dh = data.dh if level["gradients"] in ("all", "frozen gain", "dh alone") else None
    return replace(data, x=x, scale=scale, dy=dy, mask=mask, gate=gate, dh=dh)


def _mask_of(x: Array, level: Circumstance, random: np.random.Generator) -> Array:
    """As callers have it: something counts in every row, but in a row of the extremes."""
    some = (min(1, len(x)), *x.shape[1:]) if level["mask"] == MASKS[1] else x.shape
    mask = np.broadcast_to(random.random(some) < 0.6, x.shape) | ~np.isfinite(x)
    if level["values"] == "NaN under the mask":
        mask[len(x) // 2] = False
        return mask
    mask.reshape(len(mask), -1)[:, 0] |= ~mask.any(axis=tuple(range(1, x.ndim)))
    return mask


def case_of(circumstance: Circumstance, variant: Variant) -> Case:
    """The case of ``cases.py`` with the shape, the values and the options of a circumstance."""
    level = circumstance
    options = {} if level["eps"] == "eps of the variant" else {"eps": float(level["eps"].removeprefix("eps "))}
    kind = _KINDS.get(level["values"], "alike")
    width = {"gain float32": "float32", "gain bfloat16": "bfloat16"}.get(level["gain"])
    return Case(
        level.name, (*lead_of(level.levels), int(level["width"])), data=kind,
        scale=level["gain"] != "no gain", bias=level["bias"] == "bias", parameters=width,
        residual=level["residual"] == "residual",
        gate=(variant.gate_function, variant.gate_position) if level["gate"] == "gate" else None, options=options,
    )  # fmt: skip


def in_memory(array: Array, layout: str) -> Array:
    """A copy of an array whose elements lie in memory as a level of the factor layout says."""
    if layout == "a slice":
        return _sliced(array, 1)
    if layout == "every second element":
        return _sliced(array, 2)
    if layout == "x expanded":
        return np.broadcast_to(array[-1:], array.shape)
    if layout == "negative strides":
        return np.flip(np.ascontiguousarray(np.flip(array)))
    if layout == "Fortran order":
        return np.asfortranarray(array)
    if layout == "read-only":
        array = array.copy()
        array.flags.writeable = False
        return array
    if layout == "unaligned":
        memory = np.zeros(array.size + 64 // array.itemsize + 1, array.dtype)
        start = -memory.ctypes.data % 64 // array.itemsize + 1
        flat = memory[start : start + array.size]
        flat[...] = array.ravel()
        return flat.reshape(array.shape)
    if layout == "transposed":
        last = array.ndim - 1
        order = {0: (), 1: (0,), 2: (1, 0), 3: (1, 0, 2)}.get(array.ndim, (0, *range(2, last + 1), 1))
        return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    return array


def _sliced(array: Array, step: int) -> Array:
    """A copy between elements that do not belong to it."""
    n = array.shape[-1]
    wider = np.full((*array.shape[:-1], step * n + 3), 7, array.dtype)
    wider[..., 1 : 1 + step * n : step] = array
    return wider[..., 1 : 1 + step * n : step]
