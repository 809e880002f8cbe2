"""The calls that every framework is asked: rows of levels in which every pair of levels occurs, and their arrays."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from rmsnorm import PRESETS, Variant
from rmsnorm.parity.covering import covering
from rmsnorm.parity.judge import Expected, Outcome, compare, expect
from rmsnorm.parity.questions import in_memory
from rmsnorm.parity.values import gate_of, signed, tangent_of, values_of
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call, Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import derive

Row = Mapping[str, str]
OWN = {  # fields that no preset combines
    "own 1": Variant(name="own 1", eps=0.3, eps_position="outside", rounding="before_scale", scale_offset=-0.75,
                     result_dtype="promote_first", partial=0.4, partial_rounding="floor"),
    "own 2": Variant(name="own 2", eps=None, eps_position="clamp", scale_offset=1.0, result_dtype="half_scale"),
    "own 3": Variant(name="own 3", eps=1e-5, rounding="before_scale", result_dtype="scale", scale_dtype="x"),
    "own 4": Variant(name="own 4", eps=0.0, rounding="before_scale", scale_offset=0.5, result_dtype="promote"),
    "own 5": Variant(name="own 5", eps=0.3, eps_position="outside", scale_offset=1.0, result_dtype="promote"),
    "own 6": Variant(name="own 6", eps=3.0, eps_position="clamp", scale_offset=-0.75, result_dtype="promote"),
}  # fmt: skip
VARIANTS = {**PRESETS, **OWN}
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {  # the shape of x, and axes
    "rows": ((12, 40), {}),
    "odd rows": ((5, 3, 41), {}),
    "vector": ((64,), {}),
    "width 1": ((7, 1), {}),
    "two axes": ((5, 4, 6), {"axis": (-1, -2)}),
    "middle axis": ((4, 6, 5), {"axis": 1}),
    "channels": ((3, 6, 5, 7), {"axis": (2, 3), "feature_axis": 1}),
    "apart": ((5, 4, 6), {"axis": (1, 2), "feature_axis": -1}),
    "groups": ((6, 4, 12), {"axis": -1, "feature_axis": (-2, -1)}),
    "wide": ((3, 2500), {}),
    "tall": ((700, 8), {}),
    "no rows": ((0, 16), {}),
}
SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "small": ((3, 2, 4), {}),
    "small groups": ((3, 2, 4), {"axis": -1, "feature_axis": (-2, -1)}),
    "small middle axis": ((3, 2, 4), {"axis": 1}),
}
FACTORS: dict[str, tuple[str, ...]] = {
    "variant": tuple(VARIANTS),
    "x": dtypes.FLOATS,
    "gain": ("gain of x", "gain float32", "gain bfloat16", "no gain"),
    "layout": tuple(LAYOUTS),
    "bias": ("as the variant", "bias", "no bias"),
    "residual": ("no residual", "before", "after"),
    "gate": ("no gate", "silu after", "silu before", "sigmoid after", "sigmoid before"),
    "mask": ("no mask", "mask", "row mask", "column mask"),
    "beside x": ("as x", "bfloat16", "float32"),  # the dtype of a residual and of a gate
    "partial": ("as the variant", "0.3", "0.001"),
    "eps": ("as the variant", "0.1"),
    "out": ("as the variant", "float32", "bfloat16"),
    "memory": ("contiguous", "a slice", "every second element", "transposed", "unaligned", "read-only"),
    "values": ("rows", "alike", "one_sign", "huge", "tiny", "clamped", "constant", "zero_rows", "non_finite"),
}
# For what is compiled call by call.
FEW: dict[str, tuple[str, ...]] = FACTORS | {
    "variant": ("standard", "llama", "t5", "zhang_torch", "x_transformers", "mlx", "own 1", "own 3"),
    "x": ("bfloat16", "float32", "float64"), "gain": ("gain of x", "gain float32", "no gain"),
    "layout": ("rows", "two axes", "middle axis", "channels", "groups"), "bias": ("bias", "no bias"),
    "gate": ("no gate", "silu after", "sigmoid before"), "mask": ("no mask", "mask"), "beside x": ("as x",),
    "partial": ("as the variant", "0.3"), "eps": ("as the variant", "0.1"), "out": ("as the variant", "float32"),
    "memory": ("contiguous",), "values": ("rows", "alike", "huge", "tiny", "constant"),
}  # fmt: skip
# For derivatives of derivatives: numbers about 1 of one dtype, and nothing that is rounded on the way.
COMPOSED: dict[str, tuple[str, ...]] = {
    "variant": ("standard", "own 5", "own 6"), "x": ("float32", "float64"), "gain": ("gain of x", "no gain"),
    "layout": ("small", "small groups", "small middle axis"), "bias": ("bias", "no bias"),
    "residual": ("no residual", "before"), "gate": FACTORS["gate"], "mask": ("no mask", "mask", "row mask"),
    "partial": ("as the variant", "0.3"),
}  # fmt: skip
_PLAIN = ("rows", "alike", "one_sign")


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call in NumPy arrays, with cotangents and tangents, as the judge reads them."""

    name: str
    variant: Variant
    call: Call
    x: Any
    scale: Any
    bias: Any
    dy: Any
    dh: Any
    tangents: tuple[Any, Any, Any]
    mask: Any
    residual: Any
    gate: Any
    axis: Any = -1
    feature_axis: Any = None
    out_dtype: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)  # the variant by its name, eps and partial by themselves
    once: None = None  # the judge's: values that are repeated
    is_dense: bool = True

    @property
    def options(self) -> dict[str, Any]:
        names = ("variant", "axis", "feature_axis", "out_dtype")
        return {name: getattr(self, name) for name in names}

    @property
    def arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mask", "residual", "gate")}


def allows(row: Row) -> bool:
    """Whether levels go together. Rare numbers come alone, where the judge has bounds for them."""
    get = row.get
    values, layout, dtype = get("values", "rows"), get("layout", "rows"), get("x")
    mask, gate, residual = get("mask", "no mask"), get("gate", "no gate"), get("residual", "no residual")
    if get("beside x", "as x") != "as x" and (dtype == "float64" or (gate, residual) == ("no gate", "no residual")):
        return False
    if (dtype, get("gain")) in (("float32", "gain float32"), ("bfloat16", "gain bfloat16")):
        return False
    if values not in _PLAIN:
        if (gate, mask, residual) != ("no gate", "no mask", "no residual") or get("partial", "as the") == "0.001":
            return False
        if layout not in ("rows", "odd rows", "two axes") or get("out", "as the variant") != "as the variant":
            return False
        if layout != "rows" and values in ("non_finite", "zero_rows"):
            return False
        has_no_eps = get("variant") in ("paper", "own 4") and get("eps", "as the variant") == "as the variant"
        if has_no_eps and (values == "zero_rows" or (values == "constant" and get("partial") == "0.3")):
            return False  # a row whose first elements are all 0
        if values == "zero_rows" and get("memory", "contiguous") != "contiguous":
            return False
        if dtype == "float16" and values in ("tiny", "clamped"):
            return False
    if layout == "no rows" and (get("memory", "contiguous") != "contiguous" or mask == "mask"):
        return False
    if layout == "tall" and dtype == "float16" and (values == "rows" or gate.endswith("before")):
        return False  # of 700 rows one has a derivative beyond the range
    if layout == "vector" and (mask != "no mask" or get("memory") not in (None, "contiguous", "unaligned")):
        return False
    # y of fewer bits, which a gate multiplies in float64, may be another number beside a tie
    if dtype == "float64" and gate.endswith("after") and get("gain") in ("gain float32", "gain bfloat16"):
        return False
    # the derivatives of float64 beside a gate in fewer bits, or of an eps that is most of rho, have no bound
    if dtype == "float64" and gate.endswith("before") and get("variant") in ("own 1", "own 5", "zhang_torch"):
        return False
    return not (layout == "width 1" and gate != "no gate")


def rows(few: bool = False, **levels: tuple[str, ...]) -> tuple[Row, ...]:
    """The rows of the table, or of the small one for what compiles. ``levels`` stand in place of all of a factor."""
    return _rows(few, tuple(levels.items()))


@cache
def _rows(few: bool, levels: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[Row, ...]:
    return tuple(covering((FEW if few else FACTORS) | dict(levels), allows, seed=5)[0])


def drawn(count: int, random: np.random.Generator, factors: Mapping[str, tuple[str, ...]] = FACTORS) -> list[Row]:
    """So many random rows, for a long run."""
    found: list[Row] = []
    while len(found) < count:
        row = {name: str(random.choice(levels)) for name, levels in factors.items()}
        found += [row] if allows(row) else []
    return found


def name_of(row: Row) -> str:
    usual = ("gain of x", "as the variant", "as x", "contiguous", "rows")
    return ", ".join(level for level in row.values() if level not in usual and not level.startswith("no "))


def arguments_of(row: Row) -> Arguments:
    """The arrays of a row of the table; levels that it lacks are the first ones."""
    row = {**{name: levels[0] for name, levels in FACTORS.items()}, **row}
    shape, axes = {**LAYOUTS, **SMALL}[row["layout"]]
    name, dtype, kind = name_of(row), row["x"], row["values"]
    random = np.random.default_rng(zlib.crc32(name.encode()))
    changes: dict[str, Any] = {}
    given: dict[str, Any]
    if row["gate"] != "no gate":
        changes["gate_function"], changes["gate_position"] = row["gate"].split()
    if row["residual"] != "no residual":
        changes["residual_rounding"] = row["residual"]
    given = {key: float(row[key]) for key in ("eps", "partial") if row[key] != "as the variant"}
    base = VARIANTS[row["variant"]].replace(**changes) if changes else VARIANTS[row["variant"]]
    variant = base.replace(**given) if given else base
    given = {"variant": row["variant"] if base is PRESETS.get(row["variant"]) else base, **given}
    layout = resolve("calls", Spec(shape, dtype), variant=variant, **axes)
    along_last = axes.get("axis", -1) == -1
    x = values_of(kind, shape, dtype, random, along_last=along_last)
    width = {"gain float32": "float32", "gain bfloat16": "bfloat16"}.get(row["gain"], dtype)
    sizes = tuple(shape[axis] for axis in layout.feature_axes)
    scale = random.normal(0.3, 1.0, sizes).astype(width) if row["gain"] != "no gain" else None
    has_bias = variant.bias if row["bias"] == "as the variant" else row["bias"] == "bias"
    bias = random.normal(-0.2, 0.5, sizes).astype(width) if has_bias else None
    beside = dtype if row["beside x"] == "as x" else row["beside x"]
    residual = gate = mask = None
    if row["residual"] != "no residual":
        residual = values_of(kind, shape, dtype, random, along_last=along_last).astype(beside)
    if row["gate"] != "no gate":
        gate = gate_of(shape, beside, random)
    if row["mask"] != "no mask":
        mask = _mask(row["mask"], shape, random)
        whole = np.broadcast_to(mask, shape)
        x[~whole] = np.nan  # what is under a mask counts nowhere
        if gate is not None:
            first = (np.arange(layout.n) < layout.k).reshape(
                [s if a in layout.axes else 1 for a, s in enumerate(shape)]
            )
            gate[~(whole & (whole & first).any(axis=layout.axes, keepdims=True))] = np.nan
    out_dtype = None if row["out"] == "as the variant" else row["out"]
    made = arguments(
        x, scale, bias, variant=variant, mask=mask, residual=residual, gate=gate, out_dtype=out_dtype, name=name, **axes
    )
    call = made.call
    memory: dict[str, Any] = {
        "x": x, "residual": residual, "gate": gate, "mask": mask,
        "dy": signed(kind, random.normal(0.1, 1.0, shape)).astype(call.result_dtype),
        "dh": None if residual is None else random.normal(0.0, 1.0, shape).astype(call.sum_dtype),
    }  # fmt: skip
    memory = {key: a if a is None or a.shape != shape else in_memory(a, row["memory"]) for key, a in memory.items()}
    memory["mask"] = mask
    if scale is not None and row["memory"] in ("every second element", "unaligned"):
        memory["scale"] = in_memory(scale, row["memory"])
    tangents = tuple(None if p is None else random.normal(size=sizes).astype(width) for p in (scale, bias))
    return replace(made, **memory, given=given, tangents=(tangent_of(x, random), *tangents))


def _mask(level: str, shape: tuple[int, ...], random: np.random.Generator) -> Any:
    if level == "row mask":  # one for all rows
        return random.random(shape[-1]) < 0.7
    if level == "column mask":  # one for all elements of a row
        return random.random((*shape[:-1], 1)) < 0.7
    mask = random.random(shape) < 0.6
    mask[2] = False
    return mask


def arguments(
    x: Any, scale: Any = None, bias: Any = None, *, variant: Any = "standard", eps: Any = None, partial: Any = None,
    axis: Any = -1, feature_axis: Any = None, mask: Any = None, residual: Any = None, gate: Any = None,
    out_dtype: Any = None, dy: Any = None, dh: Any = None, name: str = "",
) -> Arguments:  # fmt: skip
    """The arguments of a call with these arrays; dy is 0 where there is none."""
    variant = derive("calls", variant, eps, partial)
    arrays = {"scale": scale, "bias": bias, "mask": mask, "residual": residual, "gate": gate}
    specs = {key: None if a is None else Spec(a.shape, a.dtype.name) for key, a in arrays.items()}
    call = resolve(
        "calls", Spec(x.shape, x.dtype.name), variant=variant, axis=axis, feature_axis=feature_axis,
        out_dtype=out_dtype, **specs,
    )  # fmt: skip
    dy = np.zeros(x.shape, call.result_dtype) if dy is None else dy
    return Arguments(name, variant, call, x, dy=dy, dh=dh, tangents=(np.zeros_like(x), None, None), **arrays,
                     axis=axis, feature_axis=feature_axis, out_dtype=out_dtype)  # fmt: skip


_KNOWN: dict[str, tuple[Arguments, dict[str, Expected]]] = {}


def asked(row: Row) -> tuple[Arguments, dict[str, Expected]]:
    """The arguments of a row, and what the golden makes of them. Each row is computed once in a process."""
    key = repr(dict(row))
    if key not in _KNOWN:
        made = arguments_of(row)
        _KNOWN[key] = made, expect(made)
    return _KNOWN[key]


def hold(
    results: Mapping[str, Any], x: Any, scale: Any = None, bias: Any = None, *, least: float = 0.0, **options: Any
) -> None:
    """Results of a call, such as y and dx, are within the bounds of the judge. The options are those of ``arguments``.

    ``least`` is what a subnormal number may be off by, where they are taken as 0.
    """
    with np.errstate(all="ignore"):
        expected = expect(arguments(x, scale, bias, **options), tuple(results), automatic=True)  # type: ignore[arg-type]
        expected = {name: want.wider(np.asarray(least)) for name, want in expected.items()}
        judged = compare(Outcome({name: [value] for name, value in results.items()}), expected)
    failed = [f"{verdict.quantity}: {verdict.detail}" for verdict in judged if not verdict.passed]
    assert not failed, "\n".join(failed)


def formats(data: Any) -> tuple[str | None, str | None]:
    """The dtypes of scale and bias."""
    first, second = (None if p is None else p.dtype.name for p in (data.scale, data.bias))
    return first, second
