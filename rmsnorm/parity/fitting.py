"""A target and a case of the kit, each as the other needs it: sizes, groups, batches, a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rmsnorm.parity.cases import Array, Case, Data, make, recast
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import Target, TargetError
from rmsnorm.targets.target import WrongResult


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


def adapted(target: Target, case: Case, group_size: int | None) -> tuple[Target, Case]:
    """The target and a case, each as the other needs it."""
    scale, bias = ("scale" in target.arguments, "bias" in target.arguments)
    declared = {target.dtypes[name] for name in ("scale", "bias") if name in target.dtypes}
    case = replace(case, scale=scale, bias=bias, parameters=next(iter(declared), case.parameters))
    if target.rank not in (None, len(case.shape)):
        between = [1] * ((target.rank or 0) - 2)
        case = replace(case, shape=(case.shape[0], *between, case.shape[-1]))
    if target.width is None or target.resized is not None:
        case = replace(case, shape=(*case.shape[:-1], target.limits.width_near(case.shape[-1])))
    if group_size is not None:  # at least two groups in each row
        case = replace(case, shape=(*case.shape[:-1], group_size * max(2, case.shape[-1] // group_size)))
    if target.sizes:
        declared_sizes = zip(target.sizes[1:], case.shape[1:], strict=True)
        case = replace(case, shape=(case.shape[0], *(own or size for own, size in declared_sizes)))
    if target.width is None:
        return target, case
    if target.resized is not None:
        return target.resized(case.shape[-1]), case
    sizes = target.shape_of("scale", (target.width,)) if scale else (target.width,)
    rows = len(case.shape) - 1 if target.rank is None else target.rank - len(sizes)
    options = {**case.options, "axis": tuple(range(-len(sizes), 0))}
    return target, replace(case, shape=(*case.shape[:rows], *sizes), options=options)


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
    case = replace(data.case, shape=arrays["x"].shape, options={"axis": -1, "feature_axis": (-2, -1)})
    return recast(replace(data, case=case, axis=-1, feature_axis=(-2, -1), tangents=tangents, **arrays), data.variant)


def without_groups(array: Array, group_size: int | None) -> Array:
    """An array with groups along an axis of their own, as the target has it; any other array as it is."""
    return array if group_size is None else array.reshape(*array.shape[:-2], array.shape[-2] * array.shape[-1])
