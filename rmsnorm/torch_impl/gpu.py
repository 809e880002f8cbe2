"""Forward and backward of tensors on a GPU, by the Triton kernels.

    y = h / rho * (o + scale) + bias,    h = x + residual

The arithmetic is in rmsnorm/gpu. Source: Zhang & Sennrich 2019 (arXiv 1910.07467).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rmsnorm import gpu
from rmsnorm.gpu.plan import Tiles, has_fast_float64, settings, sum_tiles, tiles
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl.memory import rows_of
from rmsnorm.torch_impl.private import empty_on_gpu, empty_strided, starter
from rmsnorm.torch_impl.space import dtype_name

Sizes: TypeAlias = tuple[Any, ...]


class Launch(NamedTuple):
    """What the kernels need of a call beside the tensors."""

    n: int
    rows: int  # of the parameters' width
    groups: int  # of n elements in such a row
    forward: Tiles
    backward: Tiles
    call: Call
    formats: tuple[str | None, str | None]  # of scale and bias
    reduced: tuple[int, ...]  # the shape of 1 / rho
    started: dict[Any, Callable[..., None]]  # the kernels that were started, and the calls that are repeated


@lru_cache(maxsize=4096)
def launch_of(call: Call, scale: str | None, bias: str | None) -> Launch:
    """The launch of a call that the kernels can compute. It is kept, as it keeps the kernels that were started."""
    n = call.n
    first, shared = (len(call.shape) - len(axes) for axes in (call.axes, call.feature_axes))
    rows, groups = math.prod(call.shape[:shared]), math.prod(call.shape[shared:first])
    return Launch(
        n, rows, groups, tiles("forward", rows, n, groups), tiles("backward", rows, n, groups),
        call, (scale, bias), (*call.shape[:first], *(1 for _ in call.axes)), {},
    )  # fmt: skip


def platform_of(device: torch.device) -> str:
    """Whose kernels compute on a device; an interpreter runs those of a GPU on the CPU."""
    return "cuda" if device.type == "cpu" and gpu.is_interpreted() else device.type


@lru_cache
def card_of(device: torch.device) -> int | str | None:
    """The compute capability of a GPU, 90 for 9.0 and for an interpreter; or why there are no kernels for it.

    None for a CPU, and for a GPU that is absent, on which a fake tensor may be.
    """
    if device.type != "cuda":
        return 90 if platform_of(device) == "cuda" else None
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return "the kernels have not been tried on AMD's GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def forward(
    launch: Launch, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None, y: Tensor,
    h: Tensor | None, inverse_rms: Tensor | None,
) -> None:  # fmt: skip
    """Writes y and, where they are tensors, h = x + residual and 1 / rho; of tensors on the current device."""
    x, sizes, parts = *_in_rows(launch, x), None
    if launch.forward.chunks > 1:
        parts = _parts(launch, launch.forward, x)
        _start(launch, "forward", "sum_parts", sizes, x, residual, parts)
    _start(launch, "forward", "forward", sizes, x, residual, scale, bias, parts, y, h, inverse_rms)


def backward(
    launch: Launch, h: Tensor, dy: Tensor, dh: Tensor | None, scale: Tensor | None, inverse_rms: Tensor, dx: Tensor,
    dscale: Tensor | None, dbias: Tensor | None,
) -> None:  # fmt: skip
    """The same for dx + dh in T and, where they are tensors, dscale and dbias."""
    tile, width, parts = launch.backward, launch.n * launch.groups, None
    h, sizes = _in_rows(launch, h)
    if tile.chunks > 1:
        parts = _parts(launch, tile, h)
        _start(launch, "backward", "sum_parts", sizes, dy, h, scale, parts)
    totals = [total for total in (dscale, dbias) if total is not None]
    empty = empty_strided if h.is_cpu else empty_on_gpu
    sums = empty((len(totals), tile.programs, width), (tile.programs * width, width, 1), torch.float64)
    dscale_sums = None if dscale is None else sums[0]
    dbias_sums = None if dbias is None else sums[-1]
    _start(
        launch, "backward", "backward", sizes, h, dy, dh, scale, parts, inverse_rms, dx, dscale_sums, dbias_sums
    )  # fmt: skip
    if totals:
        total, second = totals if len(totals) == 2 else (totals[0], None)
        dtypes = total.dtype, None if second is None else second.dtype
        _start(launch, "backward", "add_up", dtypes, sums, total, second)


def _start(launch: Launch, kind: str, name: str, sizes: Sizes, *tensors: Any) -> None:
    """Start a kernel of a pass, with its tensors in their order.

    Triton looks at every argument of a call to find the compiled kernel, which takes 25 of 35 microseconds. So a launch
    keeps it, by all that may change: the card, as each loads the function anew, which tensors there are, whether 16
    divides their addresses, and the sizes.
    """
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    key = tensors[0].get_device(), kind, name, sizes, *[a and a & 15 for a in addresses]
    start = launch.started.get(key)
    if start is None:
        launch.started[key] = _compiled(launch, kind, name, sizes, tensors)
    else:
        start(tensors, addresses)


def _compiled(launch: Launch, kind: str, name: str, sizes: Sizes, tensors: tuple[Any, ...]) -> Callable[..., None]:
    """Start a kernel for the first time; the function that starts it again, with tensors and their addresses."""
    from rmsnorm.gpu import triton_backward, triton_forward

    kernel = getattr(triton_forward if kind == "forward" else triton_backward, name)
    tile: Tiles = getattr(launch, kind)
    formats: tuple[str | None, ...] = launch.formats
    if name == "sum_parts":
        grid, numbers = (launch.rows * launch.groups, tile.chunks, 1), (*sizes, tile.chunks)
    elif name == "add_up":
        width = launch.n * launch.groups
        numbers, tile = (tile.programs, width), sum_tiles(width)
        grid = tile.chunks, 1 if tensors[2] is None else 2, 1
        formats = tuple(None if dtype is None else dtype_name(dtype) for dtype in sizes)
    else:
        grid = tile.programs * launch.groups, tile.chunks, 1
        numbers = launch.rows, *sizes, *((tile.programs,) if kind == "backward" else ()), tile.chunks
    device = next(t.device for t in tensors if t is not None)
    step = 0 if name == "add_up" else sizes[2]
    chosen = settings(name, launch.call, tile, formats, has_fast_float64(int(card_of(device) or 0)), step)
    arguments = {name: chosen.arguments[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]}
    compiled = kernel[grid](*tensors, *numbers, **arguments, **chosen.options)
    start = starter(compiled, grid, [*numbers, *arguments.values()])
    if start is not None:
        return lambda _, addresses: start(*addresses)
    return lambda tensors, _: kernel[grid](*tensors, *numbers, **arguments, **chosen.options)


def _parts(launch: Launch, tile: Tiles, x: Tensor) -> Tensor:
    """Room for sums over parts of split rows."""
    return torch.empty((1, launch.rows * launch.groups, tile.chunks), dtype=torch.float64, device=x.device)


def _in_rows(launch: Launch, x: Tensor) -> tuple[Tensor, Sizes]:
    """x in rows without gaps, and what all kernels take of these: the last is the step from one row to the next."""
    width = launch.n * launch.groups
    matrix = None if x.is_contiguous() else rows_of(x, width)
    sizes = launch.n, None if launch.groups == 1 else launch.groups, width if matrix is None else matrix.stride(0)
    return x if matrix is None else matrix, sizes
