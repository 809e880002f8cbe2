"""Forward and backward of tensors on a GPU, by the Triton kernels.

    y = h / rho * (o + scale) + bias,    h = x + residual

The arithmetic is in rmsnorm/gpu. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rmsnorm import gpu
from rmsnorm.gpu.plan import Tiles, power_of_two, tiles, way
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl.memory import gapless, mask_rows, rows_of
from rmsnorm.torch_impl.private import starter
from rmsnorm.torch_impl.rounding import dtype_name

_OLDEST: Final = 8, 0  # the first compute capability that converts to bfloat16
_ADD_UP: Final = {"ROWS": 32, "BLOCK": 64}  # the tile of ``add_up``


class Plan(NamedTuple):
    """What the kernels need of a call beside the tensors."""

    n: int
    k: int | None  # of the n elements, how many the statistic takes; None for all
    rows: int  # of the parameters' width
    groups: int  # of n elements in such a row
    forward: Tiles
    backward: Tiles
    settings: dict[str, Any]  # of both kernels
    roundings: dict[str, str]  # of the forward pass
    reduced: tuple[int, ...]  # the shape of 1 / rho
    sizes: tuple[int, ...]  # of the parameters
    started: dict[Any, Callable[..., None]]  # the kernels that were started
    small: bool = False  # of a plan for the CPU: whether a layer keeps it


def plan(call: Call, scale: str | None, bias: str | None) -> Plan | None:
    """None if the kernels cannot compute the call."""
    if not gpu.supports(call, scale, bias) or 0 in call.shape:
        return None
    n, k, variant = call.n, call.k, call.variant
    first, shared = (len(call.shape) - len(axes) for axes in (call.axes, call.feature_axes))
    rows, groups = math.prod(call.shape[:shared]), math.prod(call.shape[shared:first])
    return Plan(
        n, None if k == n else k, rows, groups, tiles("forward", rows, n, groups), tiles("backward", rows, n, groups),
        {
            "eps": call.eps, "share": 1 / k, "POSITION": variant.eps_position, "OFFSET": variant.scale_offset,
            "FORMAT": call.x,
        },
        {"NORM": call.norm or "", "PRODUCT": call.product, "RESULT": call.result, "WAY": way(call, scale, bias)},
        (*call.shape[:first], *(1 for _ in call.axes)),
        call.shape[shared:],
        {},
    )  # fmt: skip


def is_usable(device: torch.device) -> bool:
    """Whether the kernels run on a device; an interpreter runs them on the CPU."""
    if device.type == "cpu":
        return gpu.is_interpreted()
    return device.type == "cuda" and _is_new_enough(device) and gpu.has_triton()


@lru_cache
def _is_new_enough(device: torch.device) -> bool:
    """False for a GPU that is too old, or not Nvidia's; a warning says so."""
    if not torch.cuda.is_available():  # a fake tensor may be on a GPU that is absent
        return False
    if torch.version.hip is not None:
        why = "the kernels have not been tried on AMD's GPUs"
    elif (capability := torch.cuda.get_device_capability(device)) < _OLDEST:
        why = f"its compute capability is {capability}, and the kernels need {_OLDEST}"
    else:
        return True
    warnings.warn(f"rmsnorm: on {device} slower code computes the same results: {why}", stacklevel=3)
    return False


def forward(
    plan: Plan, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """y, h = x + residual (None without one) and 1 / rho in float64."""
    from rmsnorm.gpu import triton_forward as kernels

    dtype = getattr(torch, plan.settings["FORMAT"])
    y = torch.empty(x.shape, dtype=getattr(torch, plan.roundings["RESULT"]), device=x.device)
    inverse_rms = torch.empty(plan.reduced, dtype=torch.float64, device=x.device)
    h = None
    if residual is not None:
        h, x, residual = torch.empty(x.shape, dtype=dtype, device=x.device), x.to(dtype), residual.to(dtype)
        residual = residual.contiguous()
    tile = plan.forward
    matrix, masks, sizes, parts = _rows(plan, tile, x, mask)
    with _on(x):
        if parts is not None:
            _start(
                plan, kernels.sum_parts, (plan.rows * plan.groups, tile.chunks, 1), tile.warps,
                (matrix, residual, masks, parts), (*sizes, tile.chunks),
                FORMAT=plan.settings["FORMAT"], BLOCK=tile.block,
            )  # fmt: skip
        _start(
            plan, kernels.forward, (tile.programs * plan.groups, tile.chunks, 1), tile.warps,
            (matrix, residual, gapless(scale), gapless(bias), masks, parts, y, h, inverse_rms),
            (plan.rows, *sizes, tile.chunks), **plan.settings, **plan.roundings,
            ROWS=tile.rows, BLOCK=tile.block, ALL=power_of_two(tile.chunks),
        )  # fmt: skip
    return y, h, inverse_rms


def backward(
    plan: Plan, dy: Tensor, h: Tensor, scale: Tensor | None, bias: torch.dtype | None, mask: Tensor | None,
    inverse_rms: Tensor, dh: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh in T, dscale and dbias in the dtypes of the parameters."""
    from rmsnorm.gpu import triton_backward as kernels

    tile, width = plan.backward, plan.n * plan.groups
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    sums = [
        None if dtype is None else torch.empty(tile.programs, width, dtype=torch.float64, device=h.device)
        for dtype in (None if scale is None else scale.dtype, bias)
    ]
    dy, gain = dy.contiguous(), gapless(scale)
    matrix, masks, sizes, parts = _rows(plan, tile, h, mask)
    with _on(h):
        if parts is not None:
            _start(
                plan, kernels.sum_parts, (plan.rows * plan.groups, tile.chunks, 1), tile.warps,
                (dy, matrix, gain, masks, parts), (*sizes, tile.chunks),
                OFFSET=plan.settings["OFFSET"], BLOCK=tile.block,
            )  # fmt: skip
        _start(
            plan, kernels.backward, (tile.programs * plan.groups, tile.chunks, 1), tile.warps,
            (matrix, dy, gapless(dh), gain, masks, parts, inverse_rms, dx, *sums),
            (plan.rows, *sizes, tile.programs, tile.chunks), **plan.settings,
            ROWS=tile.rows, BLOCK=tile.block, ALL=power_of_two(tile.chunks), STAGES=3,
        )  # fmt: skip
        results: list[Tensor | None] = []
        for total, dtype in zip(sums, (None if scale is None else scale.dtype, bias), strict=True):
            if total is None or dtype is None:
                results.append(None)
                continue
            result = torch.empty(plan.sizes, dtype=dtype, device=h.device)
            _start(
                plan, kernels.add_up, (-(-width // _ADD_UP["BLOCK"]), 1, 1), 4, (total, result), (tile.programs, width),
                FORMAT=dtype_name(dtype), **_ADD_UP,
            )  # fmt: skip
            results.append(result)
    dscale, dbias = results
    return dx, dscale, dbias


def _start(
    plan: Plan, kernel: Any, grid: tuple[int, int, int], warps: int, tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | None, ...], **settings: Any,
) -> None:  # fmt: skip
    """Start a kernel, with its arguments in their order.

    Triton looks at every argument of a call to find the compiled kernel, which takes 25 of 35 microseconds. So a plan
    keeps it, by all that Triton looks at.
    """
    seen = [None if t is None else (t.dtype, t.device, t.data_ptr() % 16 == 0) for t in tensors]
    key = (kernel, grid, numbers, *seen)
    start = plan.started.get(key)
    if start is None:
        from rmsnorm.gpu.triton_pairs import OPTIONS

        compiled = kernel[grid](*tensors, *numbers, **settings, num_warps=warps, **OPTIONS)
        constants = [settings[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
        plan.started[key] = starter(compiled, grid, constants) or partial(
            kernel[grid], **settings, num_warps=warps, **OPTIONS
        )
    else:
        start(*tensors, *numbers)


def _rows(plan: Plan, tile: Tiles, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Any, Tensor | None]:
    """What all kernels take: x and the mask in rows, sizes and steps, and room for sums over parts of split rows.

    These sums are of products and, with a mask, of the elements that count.
    """
    matrix = rows_of(x, plan.n * plan.groups)
    masks, *steps = mask_rows(mask, x, plan.n)
    sizes = plan.n, plan.k, None if plan.groups == 1 else plan.groups, matrix.stride(0), *steps
    shape = 1 if mask is None else 2, plan.rows * plan.groups, tile.chunks
    parts = torch.empty(shape, dtype=torch.float64, device=x.device) if tile.chunks > 1 else None
    return matrix, None if masks is None else masks.view(torch.uint8), sizes, parts


def _on(x: Tensor) -> Any:
    """The device of x as the current one, on which Triton starts kernels."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()
