"""The circumstances of a call as factors with levels, and calls in which every pair of levels occurs.

They are what ``check`` asks: how many rows, which width, the memory of each tensor, the values, which gradients are
asked for, in which mode, and what was called before. An ordinary wrong kernel is right but for one of these, or for two
of them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from rmsnorm.parity.covering import covering
from rmsnorm.targets import Target

SQUARE: Final = "as many rows as columns"
ROWS: Final = {
    "no rows": 0, "1 row": 1, "few rows": 6, "257 rows": 257, "thousands of rows": 2050, "8,209 rows": 8209,
    "65,601 rows": 65601, "131,073 rows": 131073, "524,309 rows": 524309,
}  # fmt: skip
WIDTHS: Final = (  # the last two: above 1,024, and more than 16 bits count
    "1", "12", "33", "72", "128", "256", "768", "1024", "2048", "4096", "5120", "8192", "1531", "66001",
)  # fmt: skip
AXES: Final = {"1 axis": 1, "2 axes": 2, "3 axes": 3, "4 axes": 4, "5 axes": 5, "6 axes": 6}
_LEADS: Final = {  # the axes before the normalised one, but for the one that has the rows, which is the last of these
    1: (), 2: (), 3: (3,), 4: (3, 2), 5: (3, 1, 2), 6: (2, 1, 3, 1),
}  # fmt: skip
MOST: Final = 5_400_000  # elements of a call
ONE_SIGN: Final = 2**16  # elements of a call whose rows must all differ
OPTIONS: Final = ("gate", "mask", "residual")
MASKS: Final = ("mask", "one mask for all rows")
_NUMPY: Final = ("negative strides", "Fortran order", "read-only")  # layouts that arrays of NumPy alone have

FACTORS: Final[dict[str, tuple[str, ...]]] = {
    "rows": ("no rows", "1 row", "few rows", "257 rows", "thousands of rows", "8,209 rows", "65,601 rows", SQUARE),
    "width": WIDTHS,
    "axes": ("1 axis", "2 axes", "3 axes", "4 axes", "6 axes"),
    "x": ("float16", "bfloat16", "float32"),
    "gain": ("gain of x's dtype", "gain float32", "gain bfloat16", "no gain"),
    "bias": ("bias", "no bias"),
    "residual": ("residual", "no residual"),
    "gate": ("gate", "no gate"),
    "mask": (*MASKS, "no mask"),
    "eps": ("eps of the variant", "eps 0.25", "eps 0.0"),
    "layout": ("contiguous", "a slice", "every second element", "transposed", "unaligned", "x expanded",
               "x alone a slice", "x alone transposed", *_NUMPY),
    "gain's memory": ("dense gain", "strided gain", "unaligned gain", "expanded gain"),
    "values": ("normal", "heavy tails", "one sign", "zeros in the gain", "ties", "large", "small", "a row of zeros",
               "NaN in a row", "infinity in a row", "huge", "tiny", "NaN under the mask"),
    "gradients": ("none", "all", "frozen gain", "frozen x", "dy alone", "dh alone"),
    "dy": ("dense dy", "expanded dy"),
    "mode": ("plain", "no_grad", "inference", "autocast", "deterministic", "training"),
    "history": ("first call", "called again", "after another shape", "gain and x updated in place",
                "two threads at once", "two before both backward passes", "results kept", "a second backward pass"),
}  # fmt: skip
NAMED: Final = {  # levels that are asked where a caller names them
    "axes": ("5 axes",), "values": ("size 1", "zeros", "zeros and infinity in rows"),
}  # fmt: skip
# A target may refuse these, unless extremes are asked for.
EDGES: Final = ("no rows", "66001", "one mask for all rows", "eps 0.0")
EXTREMES: Final = ("huge", "tiny", "NaN under the mask")  # values for which few implementations are right
MANY: Final = {  # asked with the triples: more rows than 17 bits count, more elements than float32 counts
    "rows": ("131,073 rows", "524,309 rows"), "width": ("33",),
}  # fmt: skip
USUAL: Final = {  # asked with the triples: other widths of models and heads, for one of which a kernel may be tuned
    "rows": ("few rows",),
    "width": ("3", "6", "24", "64", "80", "96", "112", "192", "384", "512", "640", "1280", "1536", "1600", "2304",
              "2560", "2880", "3072", "3584", "6144", "6656", "7168", "12288", "16384"),
}  # fmt: skip
_ZEROS: Final = ("a row of zeros", "zeros", "zeros and infinity in rows", "tiny", "NaN under the mask")
QUICK: Final = {  # where every shape is compiled anew, in seconds: fewer, and none of what no compiled code depends on
    "rows": ("1 row", "few rows", "257 rows", "thousands of rows"), "width": ("33", "72", "768", "1531"),
    "values": ("normal", "heavy tails", "one sign", "zeros in the gain", "a row of zeros", "NaN in a row"),
    "history": ("first call", "called again"),
}  # fmt: skip
_OF_GRADIENTS: Final = ("two before both backward passes", "a second backward pass")
_USUAL: Final = (
    "contiguous", "dense gain", "normal", "dense dy", "plain", "first call", "gain of x's dtype", "eps of the variant",
    "no bias", "no residual", "no gate", "no mask",
)  # fmt: skip


@dataclass(frozen=True)
class Circumstance:
    """One row of the covering array: a level of each factor."""

    levels: Mapping[str, str]

    def __getitem__(self, factor: str) -> str:
        return self.levels[factor]

    @property
    def name(self) -> str:
        """What is unusual in it, for reports."""
        row = self.levels
        head = f"{row['rows']} of {row['width']}, {row['axes']}"
        rest = [level for factor, level in row.items()
                if factor not in ("rows", "width", "axes", "x", "gradients") and level not in _USUAL]  # fmt: skip
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


def lead_of(levels: Mapping[str, str]) -> tuple[int, ...]:
    """The axes before the normalised one. Their product is at least the number of rows, and no multiple of 64.

    >>> lead_of({"rows": "257 rows", "axes": "3 axes"})
    (3, 87)
    >>> lead_of({"rows": SQUARE, "axes": "4 axes", "width": "72"})  # (batch, channels, height, width)
    (3, 72, 2)
    """
    axes = AXES[levels["axes"]]
    first = _LEADS[axes]
    if axes == 1:
        return ()
    if levels["rows"] == SQUARE:
        return (*first[:1], int(levels["width"]), *first[1:])
    rows = ROWS[levels["rows"]]
    if rows <= 1:
        return (*[1] * len(first), rows)
    last = -(-rows // math.prod(first))
    return (*first, last if last < 8 or axes == 2 else last | 1)


def _elements(row: Mapping[str, str]) -> int:
    """At least how many elements a call has, by the levels that are there."""
    width = int(row.get("width", "1"))
    if row.get("rows") == SQUARE:
        return width * width * math.prod(_LEADS[AXES[row.get("axes", "2 axes")]])
    return ROWS[row.get("rows", "1 row")] * width


def allows(row: Mapping[str, str]) -> bool:
    """Whether levels go together: no more elements than a call may have, and only what has a meaning."""
    return _allows_sizes(row) and _allows_arrays(row) and _allows_gradients(row)


def _allows_sizes(row: Mapping[str, str]) -> bool:
    get = row.get
    rows, axes = get("rows", "1 row"), get("axes")
    if _elements(row) > MOST and rows not in MANY["rows"]:
        return False
    if axes == "1 axis" and (
        rows != "1 row"
        or get("layout", "").removeprefix("x alone ") in ("transposed", "a slice", "Fortran order", "x expanded")
    ):
        return False
    if axes in ("4 axes", "5 axes", "6 axes") and rows in ("1 row", "no rows"):
        return False
    if rows == "no rows" and (
        get("layout", "contiguous") != "contiguous" or get("values", "normal") != "normal"
        or get("mask", "no mask") != "no mask" or get("history", "first call") not in ("first call", "called again")
    ):  # fmt: skip
        return False
    # Equal terms of a long sum are rounded alike, where the bound takes roundings as random: all rows are different.
    return not (get("values") == "one sign" and (_elements(row) > ONE_SIGN or get("layout") == "x expanded"))


def _allows_arrays(row: Mapping[str, str]) -> bool:
    get = row.get
    values, mask, history = get("values"), get("mask"), get("history")
    if values == "NaN under the mask" and (mask not in (None, "mask") or get("layout") == "x expanded"):
        return False
    if values in ("NaN in a row", "infinity in a row") and mask == MASKS[1]:
        return False
    has_special_gain = get("gain's memory", "dense gain") != "dense gain" or values == "zeros in the gain"
    if get("gain") == "no gain" and has_special_gain:
        return False
    # An expanded gain is one number in memory, and PyTorch refuses to write to a tensor in inference mode.
    if history == "gain and x updated in place" and (
        get("gain") == "no gain" or get("gain's memory") == "expanded gain" or get("mode") == "inference"
    ):
        return False
    if get("eps") == "eps 0.0" and (values in _ZEROS or get("width") == "1"):  # 0 / 0, or a gradient that cancels
        return False
    if get("x") == "float32" and get("gain") == "gain float32":
        return False
    if get("x") == "bfloat16" and get("gain") == "gain bfloat16":
        return False
    if get("mode") == "autocast" and get("x") not in (None, "float32"):
        return False
    if get("mode") == "deterministic" and history == "two threads at once":  # the mode is one of the whole process
        return False
    return not (
        get("layout", "").startswith("x alone") and get("residual") == "no residual" and get("gate") == "no gate"
    )


def _allows_gradients(row: Mapping[str, str]) -> bool:
    get = row.get
    gradients, values = get("gradients"), get("values")
    if get("mode") in ("no_grad", "inference"):
        if gradients not in (None, "none"):
            return False
        gradients = "none"
    if get("mask", "no mask") != "no mask":
        if get("dy") == "expanded dy":  # what is under a mask has no cotangent
            return False
        if values == "NaN in a row" and gradients not in (None, "none"):  # 0 times NaN, which most programs add
            return False
    if gradients is None:
        return True
    if gradients == "none":
        return get("dy") != "expanded dy" and get("history") not in _OF_GRADIENTS
    if values == "infinity in a row":  # such a row has no gradient: what comes depends on the order of operations
        return False
    if gradients == "dh alone" and (get("residual") == "no residual" or values == "NaN in a row"):
        return False
    if gradients == "frozen gain" and get("gain") == "no gain":
        return False
    if get("x") == "float64" and _elements(row) > ONE_SIGN:  # these gradients are the golden's, of every row
        return False
    return not (gradients == "frozen x" and get("gain") == "no gain" and get("bias", "bias") == "no bias")


def levels_for(
    target: Target, types: Sequence[str], *, gradients: bool, group_size: int | None, required_gate: bool,
    quick: bool = False, extremes: bool = False,
) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """The factors, each with the levels that a target can be asked for."""
    bridge, takes, limits = target.bridge, target.arguments, target.limits
    levels = dict(FACTORS) | (QUICK if quick else {})
    if quick and extremes:
        levels["values"] = (*levels["values"], *EXTREMES)
    levels["x"] = tuple(types)

    def leave_out(factor: str, *names: str) -> None:
        levels[factor] = tuple(level for level in levels[factor] if level not in names)

    if not extremes:
        leave_out("values", *EXTREMES)
    if target.dtypes:
        levels["gain"] = ("gain of x's dtype",)
    if "scale" not in takes:
        levels |= {"gain": ("no gain",), "gain's memory": ("dense gain",)}
    elif "scale" not in target.optional:
        leave_out("gain", "no gain")
    if "bias" not in takes:
        levels["bias"] = ("no bias",)
    elif "bias" not in target.optional:
        levels["bias"] = ("bias",)
    for option in OPTIONS:
        if option not in takes:
            levels[option] = (f"no {option}",)
    for option in target.required:
        leave_out(option, f"no {option}")
    if required_gate:
        levels["gate"] = ("gate",)
    if "mask" not in takes:
        leave_out("values", "NaN under the mask")
    if "eps" not in target.asks:
        levels["eps"] = ("eps of the variant",)
    if levels["residual"] == ("no residual",):
        leave_out("gradients", "dy alone", "dh alone")
        if levels["gate"] == ("no gate",):
            leave_out("layout", "x alone a slice", "x alone transposed")
    if "scale" not in takes and "bias" not in takes:
        leave_out("gradients", "frozen x")
    if not gradients:
        levels |= {"gradients": ("none",), "dy": ("dense dy",)}
    if not bridge.strided or limits.contiguous:
        levels |= {"layout": ("contiguous",), "gain's memory": ("dense gain",), "dy": ("dense dy",)}
    if bridge.differentiable:
        leave_out("layout", *_NUMPY)
    if not target.automatic:  # it writes its results to arguments
        leave_out("layout", "read-only", "x expanded")
    if target.names:  # the parameters of a layer are put into it for a call, which two threads cannot do at once
        leave_out("history", "two threads at once")
    if not bridge.mutable or "scale" not in takes:
        leave_out("history", "gain and x updated in place")
    levels["mode"] = tuple(
        mode for mode in levels["mode"]
        if mode == "plain" or mode in bridge.modes or (mode == "training" and target.training)
    )  # fmt: skip
    if target.framework == "keras":  # a layer takes batches, and has variables in float32 or its own dtype
        leave_out("axes", "1 axis")
        leave_out("gain", "gain bfloat16")
    if target.sizes and target.sizes[0] is not None:
        leave_out("rows", "no rows")
    if limits.max_rows is not None:
        rows = tuple(name for name in levels["rows"] if ROWS.get(name, limits.max_rows + 1) <= limits.max_rows)
        levels["rows"] = rows or ("1 row",)
    if limits.same_dtype:
        leave_out("gain", "gain float32", "gain bfloat16")
    if target.rank is not None:
        levels["axes"] = tuple(level for level, axes in AXES.items() if axes == target.rank) or ("2 axes",)
    levels["width"] = _widths_for(target, levels["width"], group_size)
    return {factor: tuple(dict.fromkeys(entries)) for factor, entries in levels.items()}


def _widths_for(target: Target, widths: tuple[str, ...], group_size: int | None) -> tuple[str, ...]:
    if target.width is not None and target.resized is None:
        widths = (str(target.width),)
    elif target.named_width:
        widths = (str(target.named_width), *widths)
    near = [target.limits.width_near(int(width)) for width in widths]
    if group_size is not None:
        near = [group_size * max(2, width // group_size) for width in near]
    return tuple(map(str, near))


def circumstances(levels: Mapping[str, Sequence[str]], *, strength: int = 2) -> list[Circumstance]:
    """Calls in which every pair of these levels occurs, where it can; or every triple, and calls of very many rows."""
    found = _circumstances(tuple((factor, tuple(entries)) for factor, entries in levels.items()), strength)
    if strength > 2 and {*MANY["width"]} <= {*levels["width"]}:
        for more in (MANY, USUAL):
            found = [*found, *_circumstances(tuple({**levels, **more}.items()), 1)]
    return found


@cache
def _circumstances(levels: tuple[tuple[str, tuple[str, ...]], ...], strength: int) -> list[Circumstance]:
    rows, _ = covering(dict(levels), allows, strength=strength, seed=67)
    return [Circumstance(row) for row in rows]
