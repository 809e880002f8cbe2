"""The circumstances of a call as factors with levels, and cases in which every pair of levels occurs.

The cases of ``cases.py`` ask what a formula does with numbers. These ask everything else: how many rows, which width,
the memory of each tensor, which gradients are asked for, in which mode, and what was called before. An ordinary wrong
kernel is right but for one of these, or for two of them together.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Final

import numpy as np

from rmsnorm.parity.cases import Array, Case, Data, make
from rmsnorm.parity.covering import covering
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target
from rmsnorm.targets.limits import Facts, dense

ROWS: Final = {
    "1 row": 1, "few rows": 6, "257 rows": 257, "thousands of rows": 2050, "8,209 rows": 8209, "65,601 rows": 65601,
}  # fmt: skip
WIDTHS: Final = {  # the last two: above 1,024, and more than 16 bits count
    "33": 33, "72": 72, "256": 256, "768": 768, "1024": 1024, "2048": 2048, "4096": 4096, "5120": 5120, "8192": 8192,
    "1531": 1531, "66001": 66001,
}  # fmt: skip
AXES: Final = {"1 axis": 1, "2 axes": 2, "3 axes": 3, "4 axes": 4, "5 axes": 5, "6 axes": 6}
MOST: Final = 5_400_000  # elements of a case
_BLOCK: Final = 2**15  # elements of its different rows,
_ALL: Final = 2**16  # and of all rows, where these must differ
_OPTIONS: Final = ("gate", "mask", "residual")
_APART: Final = ("every second element", "transposed")  # layouts in which the elements of a row have gaps

FACTORS: Final[dict[str, tuple[str, ...]]] = {
    "rows": tuple(ROWS),
    "width": tuple(WIDTHS),
    "axes": ("1 axis", "2 axes", "3 axes", "4 axes", "6 axes"),
    "x": ("float16", "bfloat16", "float32"),
    "gain": ("gain of x's dtype", "gain float32", "no gain"),
    "bias": ("bias", "no bias"),
    "residual": ("residual", "no residual"),
    "gate": ("gate", "no gate"),
    "mask": ("mask", "no mask"),
    "layout": ("contiguous", "a slice", "every second element", "transposed", "unaligned", "x alone a slice",
               "x alone transposed"),
    "gain's memory": ("dense gain", "strided gain"),
    "values": ("normal", "heavy tails", "one sign", "zeros in the gain", "ties", "NaN in a row", "negative zeros"),
    "gradients": ("none", "all", "frozen gain", "frozen x", "dy alone", "dh alone"),
    "dy": ("dense dy", "expanded dy"),
    "mode": ("plain", "no_grad", "inference", "autocast", "training"),
    "history": ("first call", "called again", "after another shape", "two before both backward passes", "y kept",
                "a second backward pass"),
}  # fmt: skip
NAMED: Final = {  # levels that are asked where a caller names them; ``check`` has cases for such values
    "axes": ("5 axes",), "values": ("size 1", "zeros", "zeros and infinity in rows"),
}  # fmt: skip
_OF_GRADIENTS: Final = ("two before both backward passes", "a second backward pass")


@dataclass(frozen=True)
class Circumstance:
    """One row of the covering array: a level of each factor."""

    levels: Mapping[str, str]

    def __getitem__(self, factor: str) -> str:
        return self.levels[factor]

    @property
    def name(self) -> str:
        """What is unusual in it, for reports."""
        usual = {"contiguous", "dense gain", "normal", "dense dy", "plain", "first call", "gain of x's dtype"}
        usual |= {level for level in self.levels.values() if level.startswith("no ") and level != "no gain"}
        row = self.levels
        head = f"{row['rows']} of {row['width']}, {row['axes']}"
        rest = [level for factor, level in row.items()
                if factor not in ("rows", "width", "axes", "x", "gradients") and level not in usual]  # fmt: skip
        if row["gradients"] not in ("none", "all"):
            rest.append(row["gradients"])
        return "; ".join([head, *rest])


def is_circumstance(case: str) -> bool:
    """Whether this is the name of a circumstance, and not of a case.

    >>> is_circumstance("257 rows of 33, 2 axes; residual"), is_circumstance("two axes")
    (True, False)
    """
    return case.partition("; ")[0].rpartition(", ")[2] in AXES


def levels_of(circumstance: str) -> list[str]:
    """The levels in its name.

    >>> levels_of("thousands of rows of 33, 2 axes; residual")
    ['thousands of rows', 'rows of 33', '2 axes', 'residual']
    """
    head, *rest = circumstance.split("; ")
    size, _, axes = head.rpartition(", ")
    rows, _, width = size.rpartition(" of ")
    return [rows, f"rows of {width}", axes, *rest]


def allows(row: Mapping[str, str]) -> bool:
    """Whether levels go together: no more elements than a case may have, and only what has a meaning."""
    get = row.get
    rows, width = ROWS.get(get("rows", "1 row"), 1), int(get("width", "1"))
    if rows * width > MOST:
        return False
    if get("axes") == "1 axis" and (
        rows > 1 or get("layout", "").removeprefix("x alone ") in ("transposed", "a slice")
    ):
        return False
    if get("axes") in ("4 axes", "5 axes", "6 axes") and rows == 1:
        return False
    gradients = get("gradients")
    if gradients is not None:
        if gradients == "none" and (get("dy") == "expanded dy" or get("history") in _OF_GRADIENTS):
            return False
        if gradients != "none" and get("mode") in ("no_grad", "inference"):
            return False
        if gradients == "dh alone" and get("residual") == "no residual":
            return False
        if gradients == "dh alone" and get("values") == "NaN in a row":  # 0 times NaN, which most programs add
            return False
        if gradients == "frozen gain" and get("gain") == "no gain":
            return False
    if get("mode") in ("no_grad", "inference") and (get("dy") == "expanded dy" or get("history") in _OF_GRADIENTS):
        return False
    if get("mask") == "mask" and get("dy") == "expanded dy":  # what is under a mask has no cotangent
        return False
    if get("mask") == "mask" and get("values") == "NaN in a row" and gradients not in (None, "none"):  # nor 0 times NaN
        return False
    if get("gain") == "no gain" and (get("gain's memory") == "strided gain" or get("values") == "zeros in the gain"):
        return False
    if gradients == "frozen x" and get("gain") == "no gain" and get("bias", "bias") == "no bias":
        return False
    if get("x") == "float32" and get("gain") == "gain float32":
        return False
    if get("mode") == "autocast" and get("x") not in (None, "float32"):
        return False
    if get("layout", "").startswith("x alone") and get("residual") == "no residual" and get("gate") == "no gate":
        return False
    # Equal terms of a long sum are rounded alike, where the bound takes roundings as random: all rows are different.
    return not (get("values") == "one sign" and rows * width > _ALL)


def levels_for(
    target: Target,
    types: Sequence[str],
    *,
    gradients: bool,
    group_size: int | None,
    required_gate: bool,
    quick: bool = False,
) -> dict[str, tuple[str, ...]]:
    """The factors, each with the levels that a target can be asked for."""
    bridge, takes = target.bridge, target.arguments
    levels = dict(FACTORS)
    levels["x"] = tuple(dtype for dtype in levels["x"] if dtype in types) or (types[0],)
    if target.dtypes:
        levels["gain"] = ("gain of x's dtype",)
    if "scale" not in takes:
        levels["gain"], levels["gain's memory"] = ("no gain",), ("dense gain",)
    elif "scale" not in target.optional:
        levels["gain"] = tuple(level for level in levels["gain"] if level != "no gain")
    if "bias" not in takes:
        levels["bias"] = ("no bias",)
    elif "bias" not in target.optional:
        levels["bias"] = ("bias",)
    for option in _OPTIONS:
        if option not in takes:
            levels[option] = (f"no {option}",)
    for option in target.required:
        levels[option] = (option,)
    if required_gate:
        levels["gate"] = ("gate",)
    if all(levels[name] == (f"no {name}",) for name in ("residual", "gate")):
        levels["layout"] = tuple(level for level in levels["layout"] if not level.startswith("x alone"))
    if not bridge.strided:
        levels |= {"layout": ("contiguous",), "gain's memory": ("dense gain",), "dy": ("dense dy",)}
    if levels["residual"] == ("no residual",):
        levels["gradients"] = tuple(level for level in levels["gradients"] if level not in ("dy alone", "dh alone"))
    if "scale" not in takes and "bias" not in takes:
        levels["gradients"] = tuple(level for level in levels["gradients"] if level != "frozen x")
    if not gradients or "float64" in levels["x"]:  # whose gradients the equations in float64 are not exact enough for
        levels |= {"gradients": ("none",), "dy": ("dense dy",)}
    modes = {"plain", *bridge.modes, *(("training",) if target.training else ())}
    levels["mode"] = tuple(mode for mode in levels["mode"] if mode in modes)
    if quick:  # every shape anew, in seconds: fewer of them, and none of what compiled code cannot depend on
        levels |= {
            "rows": ("1 row", "few rows", "257 rows", "thousands of rows"), "width": ("33", "72", "768", "1531"),
            "axes": ("2 axes", "3 axes"), "values": ("normal", "zeros in the gain", "NaN in a row"),
            "history": ("first call",),
        }  # fmt: skip
    if target.width is not None and target.resized is None:
        levels["width"] = (str(target.width),)
    elif target.named_width:
        levels["width"] = (str(target.named_width), *levels["width"])
    limits = target.limits
    levels["width"] = tuple(str(limits.width_near(int(width))) for width in levels["width"])
    if limits.max_rows is not None:
        levels["rows"] = tuple(name for name in levels["rows"] if ROWS[name] <= limits.max_rows) or ("1 row",)
    if limits.contiguous:
        levels |= {"layout": ("contiguous",), "gain's memory": ("dense gain",), "dy": ("dense dy",)}
    if limits.same_dtype:
        levels["gain"] = tuple(level for level in levels["gain"] if level != "gain float32")
    if group_size is not None:
        levels["width"] = tuple(dict.fromkeys(str(_in_groups_of(int(width), group_size)) for width in levels["width"]))
    if target.rank is not None:
        levels["axes"] = tuple(level for level, axes in AXES.items() if axes == target.rank) or ("2 axes",)
    return {factor: tuple(dict.fromkeys(entries)) for factor, entries in levels.items()}


def _in_groups_of(width: int, size: int) -> int:
    return size * max(2, width // size)


def circumstances(levels: Mapping[str, Sequence[str]], *, strength: int = 2) -> list[Circumstance]:
    """Cases in which every pair of these levels occurs, where it can."""
    return _circumstances(tuple((factor, tuple(entries)) for factor, entries in levels.items()), strength)


@cache
def _circumstances(levels: tuple[tuple[str, tuple[str, ...]], ...], strength: int) -> list[Circumstance]:
    rows, _ = covering(dict(levels), allows, strength=strength, seed=67)
    return [Circumstance(row) for row in rows]


def lead_of(levels: Mapping[str, str]) -> tuple[int, ...]:
    """The axes before the normalised one. Their product is at least the number of rows, and no multiple of 64.

    >>> lead_of({"rows": "257 rows", "axes": "3 axes"})
    (3, 87)
    """
    rows, axes = ROWS[levels["rows"]], AXES[levels["axes"]]
    first = (
        {1: (), 2: (), 3: (3,), 4: (3, 2), 5: (3, 1, 2), 6: (2, 1, 3, 1)}[axes] if rows > 1 else (1,) * max(0, axes - 2)
    )
    if axes == 1:
        return ()
    last = -(-rows // math.prod(first))
    return (*first, last if last < 8 or axes == 2 else last | 1)


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
        same = self.circumstance["gain"] != "gain float32"
        return Facts(len(shape), shape[-1], math.prod(shape[:-1]), same, is_dense)

    @cached_property
    def data(self) -> Data:
        """The whole call, each tensor in the memory that the circumstance says."""
        level, rows = self.circumstance, self.rows
        arrays: dict[str, Any] = {name: self.spread(array) for name in ("x", "dy", "dh", *_OPTIONS)
                  if (array := getattr(rows, name)) is not None}  # fmt: skip
        for name, array in arrays.items():
            if name == "x" or (not level["layout"].startswith("x alone") and name != "dh"):
                arrays[name] = in_memory(array, level["layout"].removeprefix("x alone "))
        if level["dy"] == "expanded dy":
            arrays["dy"] = np.broadcast_to(arrays["dy"].dtype.type(1), arrays["dy"].shape)
        scale = rows.scale
        if scale is not None and level["gain's memory"] == "strided gain":
            scale = in_memory(scale, "every second element")
        return replace(rows, scale=scale, **arrays)


def question(circumstance: Circumstance, case: Case, variant: Variant) -> Question:
    """The arrays of a circumstance for a case that the target takes."""
    level = circumstance
    axes = len({*case.options.get("axis", (-1,)), *case.options.get("feature_axis", ())})
    lead, sizes = case.shape[:-axes], case.shape[-axes:]
    rows, n = math.prod(lead), math.prod(sizes)
    some = min(rows, max(3, (_ALL if level["values"] == "one sign" else _BLOCK) // n))
    some -= some < rows and some % 2 == 0  # odd, so that the rows' numbers modulo 64 or 256 say nothing of their values
    data = make(replace(case, shape=(some, *sizes), name=level.name), variant, level["x"])
    data = replace(_with_values(data, level), is_dense=level["layout"].removeprefix("x alone ") not in _APART)
    return Question(circumstance, data, np.arange(rows) % some, lead)


def _with_values(data: Data, level: Circumstance) -> Data:
    x, scale, dy = data.x, data.scale, data.dy
    random = np.random.default_rng(zlib.crc32(level.name.encode()))
    if level["values"] == "NaN in a row":
        x[len(x) // 2].flat[min(1, x[0].size - 1)] = np.nan
    if level["values"] == "size 1":
        x[...] = np.where(x < 0, -1, 1) * random.uniform(0.5, 2.0, x.shape)
    if level["values"] == "zeros":
        x[...] = 0
    if level["values"] == "zeros and infinity in rows":
        x[0] = 0
        for row, value in ((len(x) // 2, np.inf), (-1, -np.inf)):
            x[row].flat[min(1, x[0].size - 1)] = value
    if level["values"] == "negative zeros":
        x[random.random(x.shape) < 0.5] = -0.0
        dy = np.where(random.random(dy.shape) < 0.5, np.array(-0.0, dy.dtype), dy)
    if level["values"] == "zeros in the gain" and scale is not None:
        scale = scale.copy()
        scale.flat[::3], scale.flat[1::3] = 0.0, -data.variant.scale_offset
    gate = data.gate
    if gate is not None and level["values"] == "heavy tails":  # up to 40, where f(z) is z, and down to -60
        gate = (gate.astype(np.float64) * 3).astype(gate.dtype)
    mask = None
    if level["mask"] == "mask":  # as callers have it: something counts in every row, and the rest has no cotangent
        mask = (random.random(x.shape) < 0.6) | np.isnan(x)
        mask.reshape(len(mask), -1)[:, 0] |= ~mask.any(axis=tuple(range(1, x.ndim)))
        dy = np.where(mask, dy, dy.dtype.type(0))
    if level["dy"] == "expanded dy":
        dy = np.ones_like(dy)
    if level["gradients"] == "dh alone":
        dy = np.zeros_like(dy)
    dh = data.dh if level["gradients"] in ("all", "frozen gain", "dh alone") else None
    return replace(data, x=x, scale=scale, dy=dy, mask=mask, gate=gate, dh=dh)


def case_of(circumstance: Circumstance, variant: Variant) -> Case:
    """The case of ``cases.py`` with the shape, the values and the options of a circumstance."""
    level = circumstance
    kind = {"heavy tails": "rows", "one sign": "one_sign", "ties": "constant"}.get(level["values"], "alike")
    width = None if level["gain"] != "gain float32" else "float32"
    return Case(
        level.name, (*lead_of(level.levels), int(level["width"])), (variant.name,), "circumstances of a call", kind,
        scale=level["gain"] != "no gain", bias=level["bias"] == "bias", parameters=width,
        residual=level["residual"] == "residual",
        gate=(variant.gate_function, variant.gate_position) if level["gate"] == "gate" else None,
    )  # fmt: skip


def in_memory(array: Array, layout: str) -> Array:
    """A copy of an array whose elements lie in memory as a level of the factor layout says."""
    if layout == "a slice":
        return _sliced(array, 1)
    if layout == "every second element":
        return _sliced(array, 2)
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
