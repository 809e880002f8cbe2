"""Which cases of the kit a target can be called with, each as the other needs it, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any, Final

import numpy as np

from rmsnorm.parity.cases import Array, Case, Data, make, recast, select
from rmsnorm.parity.comparison import Run, Skip
from rmsnorm.parity.judge import Expected, expect
from rmsnorm.specification.dtypes import HALF
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.target import WrongResult

_OF_THE_WIDTH: Final = ("wide", "very wide", "width 1", "one element", "no columns")
_ROWS: Final = 2**16  # elements of the different rows of a case, and
_REPEATED: Final = 2**23  # of all of them, where the target has wide rows
_WIDEST: Final = (1, 16381)  # of the case "wide": an outlier is 127 times the RMS; a Triton kernel takes up to 16384
_PER_ROW: Final = ("x", "gate", "mask", "residual")
OPTIONS: Final = ("gate", "mask", "residual")  # in the order of the names of cases
# what is compared where a library compiles every shape: with gradients in these and in the cases of options, and
_WITH_GRADIENTS: Final = ("rows", "one sign")
_ONE_DTYPE: Final = ("odd", "wide", "tall", "many rows", "long sequences", "many, 3 axes", "very wide", "zero rows",
                     "constant", "non-finite", "one sign", "gain f32", "gain bf16")  # fmt: skip
_OF_OPTIONS: Final = (
    Case("gate, mask, residual", (16, 48), ("standard",), "all at once", mask=True, residual=True,
         gate=("silu", "after")),
    Case("mask of columns", (16, 48), ("standard",), "one mask for all rows, of another shape", mask=True, edge=True),
    Case("mask of rows", (16, 48), ("standard",), "one element for each row", mask=True, edge=True),
)  # fmt: skip


def option_sets(arguments: Iterable[str]) -> list[str]:
    """The names of the cases for each option that is among the arguments, alone and with each of the others.

    >>> option_sets(("scale", "residual", "mask"))
    ['mask', 'residual', 'mask, residual']
    """
    taken = [name for name in OPTIONS if name in arguments]
    return [", ".join(names) for size in range(1, len(taken) + 1) for names in combinations(taken, size)]


def in_batches(target: Target) -> Target:
    """The target for any number of rows, where a file declares how many it takes: the last batch is filled up."""
    size = target.sizes[0] if len(target.sizes) > 1 else None
    if size is None:
        return target

    def call(arrays: Mapping[str, Any]) -> Any:
        parts, count = [], len(arrays["x"])
        if "mask" in arrays:
            arrays = {**arrays, "mask": np.broadcast_to(arrays["mask"], arrays["x"].shape)}
        for start in range(0, count, size):
            rows = {name: arrays[name][start : start + size] for name in _PER_ROW if name in arrays}
            rows = {name: np.resize(array, (size, *array.shape[1:])) for name, array in rows.items()}
            parts.append(target.function({**arrays, **rows}))
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)[:count]
        return tuple(np.concatenate(entries)[:count] for entries in zip(*parts, strict=True))  # y, and x + residual

    return replace(target, function=call)


def applicable_cases(
    target: Target,
    variant: Variant,
    types: tuple[str, ...],
    skipped: list[Skip],
    *,
    extremes: bool,
    group_size: int | None,
    quick: bool = False,
) -> Iterator[tuple[Target, Data]]:
    """The target and the arrays of every case that it can be called with; ``skipped`` gets the others.

    A case that is there for a bias, for no gain, for a strided x or for a field of the variant is in neither: every
    case has the parameters that the target takes, x in several layouts, and the fields of the variant.
    """
    pairs = requested_cases(target, variant, types, extremes=extremes)
    gate, required = (variant.gate_function, variant.gate_position), None if "gate" in target.arguments else False
    for (name, dtype), case in pairs.items():
        reason = _unfit(target, case, dtype, group_size)
        if not (reason or extremes) and case.data in ("huge", "tiny") and dtype != "float16":
            reason = "only with extremes=True"
        if quick and not (reason or is_quick(name, dtype, [entry for other, entry in pairs if other == name])):
            reason = "only with all_cases=True, or --all"
        if not reason:
            resized, case = adapted(target, case, group_size)
            required = requires_gate(resized, make(case, variant, dtype)) if required is None else required
        if reason:
            skipped.append(Skip(name, dtype, reason))
            continue
        case = replace(case, gate=gate if case.gate or required else None)
        if case.mask and not (extremes and case.name in option_sets(OPTIONS)):
            data = _with_mask(make(replace(case, mask=False), variant, dtype), group_size)
        else:
            data = make(case, variant, dtype)
        yield resized, replace(data, dh=None)


def is_quick(name: str, dtype: str, types: Sequence[str]) -> bool:
    """Whether a case is compared in this dtype of x without ``all_cases`` where a library compiles every shape.

    These are all cases for options, and the others in which some mutant, a NaN or a mix of dtypes shows, those in one
    dtype, and a long sum in one of 16 bits. ``types`` are the dtypes of the case that were asked for.
    """
    if name in _ONE_DTYPE:
        halves = [entry for entry in types if entry in HALF] if name == "one sign" else []
        return dtype == (halves or types)[0]
    return name == "rows" or is_of_options(name)


def is_of_options(name: str) -> bool:
    """Whether a case is there for a mask, a residual or a gate."""
    return name in option_sets(OPTIONS) or any(case.name == name for case in _OF_OPTIONS)


def has_gradients(name: str) -> bool:
    """Whether the gradients of a case are compared without ``all_cases`` where a library compiles every shape."""
    return name in _WITH_GRADIENTS or is_of_options(name)


def _taken(case: Case) -> list[str]:
    """The options that a case passes."""
    return [name for name in OPTIONS if getattr(case, name)]


def _with_mask(data: Data, group_size: int | None) -> Data:
    """With a mask as callers have it: numbers under it, and no cotangent for them.

    One row (or group) counts one element and one all. A row with nothing counted is one of the extremes: the built-in
    layer of Flax gives NaN there.
    """
    x, axes = data.x, data.call.axes
    n = group_size or math.prod(x.shape[axis] for axis in axes)
    rows = np.random.default_rng(27).random((x.size // n, n)) < 0.6
    rows[0], rows[1] = np.arange(n) == 0, True
    rows[:, 0] |= ~rows.any(axis=1)
    mask = rows.reshape(x.shape)
    if data.case.name == "mask of columns":
        mask = mask[(slice(-1, None),) * (x.ndim - len(axes))]
    if data.case.name == "mask of rows":
        mask = np.ones([1 if axis in axes else size for axis, size in enumerate(x.shape)], bool)
    return replace(data, mask=mask, dy=np.where(mask, data.dy, data.dy.dtype.type(0)))


def requested_cases(
    target: Target, variant: Variant, types: tuple[str, ...], *, extremes: bool
) -> dict[tuple[str, str], Case]:
    """The cases for a target, by name and dtype: each must be compared, or be among those that were not."""
    pairs = {
        (case.name, dtype): case
        for case, _, dtype in select((variant.name, "standard"), types)
        if not case.fields
        if case.options or case.gate or (case.scale and not (case.bias or case.strided or case.residual_rounding))
    }
    for case, dtype in product(_OF_OPTIONS, types):
        if {*_taken(case)} <= {*target.arguments} and (extremes or case.name != "mask of rows"):
            pairs[case.name, dtype] = case
    return pairs


def options_of(case: str) -> str:
    """The options of a case or circumstance, by its name, as ``option_sets`` names them.

    >>> options_of("mask of columns"), options_of("257 rows of 33, 2 axes; residual; gate; NaN in a row")
    ('mask', 'gate, residual')
    """
    parts = case.split("; ")
    return ", ".join(name for name in OPTIONS if name in parts) or case.partition(" of ")[0]


def uncompared(target: Target, run: Run, pairs: Collection[tuple[str, str]]) -> Iterator[tuple[str, str, str, str]]:
    """Case, dtype, quantity and a sentence for what was asked and not compared, where no reason says so or may say so.

    An option that a target takes must be compared, whatever the reason.
    """
    compared = {(record.case, record.dtype) for record in run.records}
    with_options = {options_of(record.case) for record in run.records}
    reasons = {(skip.case, skip.dtype): skip.reason for skip in run.skipped}
    taken = option_sets(target.arguments)
    for name, dtype in pairs:
        reason = reasons.get((name, dtype))
        if (name, dtype) in compared or (reason and (name not in taken or name in with_options)):
            continue
        if reason:
            yield "options", dtype, name, f"it takes {name}, and no comparison has it: {reason}"
        else:
            yield name, dtype, "y", "no result came back"


def requires_gate(target: Target, data: Data) -> bool:
    """Whether it answers with a gate, and not without one."""
    primals, gate = (data.x, data.scale, data.bias), {"gate": np.ones_like(data.x)}
    for others, answer in ((data.arrays, False), (gate, True)):
        try:
            target.forward(*primals, **others)
        except TargetError as error:
            if not isinstance(error, WrongResult):
                continue
        return answer
    return False


def _unfit(target: Target, case: Case, dtype: str, group_size: int | None) -> str:
    """Why the target cannot be called with a case; empty if it can."""
    if case.options or (case.gate and case.name not in option_sets(OPTIONS)):
        return "an option of the call, of which check passes none"
    if not {*_taken(case)} <= {*target.arguments}:
        return "it has no argument of that name"
    only = target.dtypes.get("x", dtype)
    if only != dtype:
        return f"it takes x in {only} alone"
    limits = target.limits
    if limits.same_dtype and case.parameters not in (None, dtype):
        return "its limits ask for a gain in the dtype of x"
    if math.prod(case.shape[:-1]) > (limits.max_rows or math.inf):
        return f"its limits allow {limits.max_rows} rows"
    if limits.contiguous and case.data == "zero_rows":
        return "its limits ask for dense memory"
    if case.shape[-1] and limits.width_near(case.shape[-1]) != case.shape[-1] and case.name in _OF_THE_WIDTH:
        return "its limits allow other widths"
    if target.dtypes and case.parameters:
        return "it declares the dtypes of its parameters"
    more_axes = len(case.shape) == 2 < (target.rank or 0) and case.data == "rows"
    if target.rank not in (None, len(case.shape)) and not more_axes:
        return f"it takes x with {target.rank} axes alone"
    if target.sizes and target.sizes[0] is not None and not case.shape[0]:
        return f"the first size of its x is {target.sizes[0]}"
    if target.framework == "keras" and len(case.shape) == 1:
        return "a Keras layer takes batches"
    if target.framework == "keras" and case.parameters == "bfloat16":
        return "a Keras layer has variables in float32 or its own dtype"
    if not case.shape[-1] and (group_size is not None or target.width is not None):
        return "it takes no empty rows"
    if target.width is None or target.resized is not None:
        return ""
    if case.name in _OF_THE_WIDTH or (case.data == "non_finite" and _sizes(target)[0] < 10):
        return f"it takes rows of {target.width} elements alone"
    return ""


def _sizes(target: Target) -> tuple[int, ...]:
    """Of the normalised axes of a target that takes one width."""
    width = (target.width or 0,)
    if target.layout is not None:
        return target.layout[0]
    return target.shape_of("scale", width) if "scale" in target.arguments else width


def adapted(target: Target, case: Case, group_size: int | None, *, every_row: bool = False) -> tuple[Target, Case]:
    """The target and a case, each as the other needs it; ``every_row``: with no fewer rows where they are many."""
    scale, bias = ("scale" in target.arguments, "bias" in target.arguments)
    declared = {target.dtypes[name] for name in ("scale", "bias") if name in target.dtypes}
    case = replace(case, scale=scale, bias=bias, parameters=next(iter(declared), case.parameters))
    if case.name == "wide":
        case = replace(case, shape=_WIDEST)
    if target.rank not in (None, len(case.shape)):
        between = [1] * ((target.rank or 0) - 2)
        repeats = (case.repeats[0], *between, 1) if case.repeats else ()
        case = replace(case, shape=(case.shape[0], *between, case.shape[-1]), repeats=repeats)
    if target.width is None or target.resized is not None:
        lead, width = case.shape[:-1], target.limits.width_near(case.shape[-1])
        is_wider, case = width > case.shape[-1], replace(case, shape=(*lead, width))
        if is_wider and lead and case.is_large and not every_row:
            lead, repeats = _fewer(lead, case.repeats[:-1] or (1,) * len(lead), width)
            case = replace(case, shape=(*lead, width), repeats=(*repeats, 1))
    if group_size is not None:  # at least two groups in each row
        case = replace(case, shape=(*case.shape[:-1], group_size * max(2, case.shape[-1] // group_size)))
    if target.sizes:
        declared_sizes = zip(target.sizes[1:], case.shape[1:], strict=True)
        repeats = case.repeats and (case.repeats[0], *[1] * len(case.shape[1:]))
        case = replace(case, shape=(case.shape[0], *(own or size for own, size in declared_sizes)), repeats=repeats)
    if target.width is None:
        return target, case
    if target.resized is not None and case.shape[-1]:
        return target.resized(case.shape[-1]), case
    sizes = _sizes(target)
    rows = len(case.shape) - 1 if target.rank is None else target.rank - len(sizes)
    lead, repeats = case.shape[:rows], case.repeats[:rows]
    if case.is_large and not every_row:
        lead, repeats = _fewer(lead, repeats or (1,) * rows, target.width)
    repeats = (*repeats, *[1] * len(sizes)) if repeats else ()
    axes = {"axis": tuple(range(-len(sizes), 0))}
    if target.layout is not None:
        axes = {"axis": target.layout[1], "feature_axis": target.layout[2]}
    return target, replace(case, shape=(*lead, *sizes), repeats=repeats, options=axes)


def _fewer(lead: tuple[int, ...], repeats: tuple[int, ...], width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """So many different rows, and repetitions of them, that golden and target take seconds for rows of this width."""
    once = [size // count for size, count in zip(lead, repeats, strict=True)]
    axis = int(np.argmax(once))
    others = math.prod(once) // once[axis] * width
    once[axis] = max(2, min(once[axis], _ROWS // others))
    counts = list(repeats)
    while math.prod(once) * math.prod(counts) * width > _REPEATED and max(counts) > 1:
        counts[int(np.argmax(counts))] //= 2
    return tuple(size * count for size, count in zip(once, counts, strict=True)), tuple(counts)


def adapted_data(
    target: Target, case: Case, variant: Variant, dtype: str, group_size: int | None
) -> tuple[Target, Data]:
    """The target and the arrays of a case, with a gate if it answers with one alone."""
    sized, case = adapted(target, case, group_size)
    data = make(case, variant, dtype)
    if "gate" in target.arguments and requires_gate(sized, data):
        data = make(replace(case, gate=(variant.gate_function, variant.gate_position)), variant, dtype)
    return sized, data


def in_groups(data: Data, size: int) -> Data:
    """The same call with the groups along an axis of their own, as the golden takes them."""
    if data.mask is not None:
        data = replace(data, mask=np.broadcast_to(data.mask, data.x.shape))

    def split(array: Array | None) -> Any:
        return None if array is None else array.reshape(*array.shape[:-1], array.shape[-1] // size, size)

    arrays = {name: split(getattr(data, name)) for name in ("x", "scale", "bias", "dy", "mask", "residual", "gate")}
    tangents = tuple(map(split, data.tangents))
    repeats = (*data.case.repeats, 1) if data.case.repeats else ()
    options = {"axis": -1, "feature_axis": (-2, -1)}
    case, once = replace(data.case, shape=arrays["x"].shape, options=options, repeats=repeats), data.once
    split_data = replace(data, case=case, axis=-1, feature_axis=(-2, -1), tangents=tangents, **arrays)
    return recast(replace(split_data, once=once and in_groups(once, size)), data.variant)


def expect_in_groups(data: Data, quantities: Sequence[str], group_size: int | None) -> dict[str, Expected]:
    """What is expected of another program that normalises groups of this size, None for whole rows."""
    asked = data if group_size is None else in_groups(data, group_size)
    expected = expect(asked, quantities, automatic=True)
    return {name: want.changed(lambda array: without_groups(array, group_size)) for name, want in expected.items()}


def without_groups(array: Array, group_size: int | None) -> Array:
    """An array with groups along an axis of their own, as the target has it; any other array as it is."""
    return array if group_size is None else array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])
