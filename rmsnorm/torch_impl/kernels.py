"""The door to the kernels: forward and backward of tensors in memory, without a graph. Those on a GPU go to gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rmsnorm import engines
from rmsnorm.cpu import openmp
from rmsnorm.engines import Prepared
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import gpu
from rmsnorm.torch_impl.memory import gapless, is_plain, is_plain_on_gpu, rows_of
from rmsnorm.torch_impl.private import (
    allocator,
    current_device,
    empty_strided,
    has_tangents,
    is_autocast_on,
    is_watched,
    is_widened,
)

_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in dtypes.FLOATS}
Results: TypeAlias = tuple[Any, Any, Any]  # y, h = x + residual or None, 1 / rho or None


class Kept(NamedTuple):
    """A checked call as the kernels of a device compute it again and again: ``Call.in_rows``. It holds no tensor.

    ``y``, ``inverse_rms``, ``dx``, ``dscale`` and ``dbias`` are sizes, strides and dtype of the results.
    """

    call: Call
    launch: Any  # that of rmsnorm.cpu, or of gpu.py
    y: tuple[Any, ...]
    inverse_rms: tuple[Any, ...]
    dx: tuple[Any, ...]  # h = x + residual has the same
    dscale: tuple[Any, ...] | None
    dbias: tuple[Any, ...] | None
    is_readable: Callable[..., bool]  # whether the kernels can read the numbers of tensors
    autocast: str | None  # the kind of device whose autocast gives y of a layer another dtype
    sizes: tuple[Any, ...] = ()  # of the rows of x on a GPU
    arrays: tuple[Any, ...] = ()  # of a layer's call: shape and dtype, or None, of x, residual, scale and bias
    gain: torch.dtype | None = None  # to which the gain is rounded first; None if it is taken as it is

    def matches(self, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> bool:
        """Whether a call of a layer is this one."""
        (shape, dtype), h, g, b = self.arrays
        return (
            x.shape == shape and x.dtype is dtype
            and self.is_readable(x, scale, bias) and x.is_contiguous()  # which sparse tensors do not have
            and (g is scale or _is_like(scale, g)) and (b is bias or _is_like(bias, b))
            and (h is residual or (_is_like(residual, h) and self.is_readable(residual)))
            and (self.autocast is None or not is_autocast_on(self.autocast))
        )  # fmt: skip

    def forward(
        self, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> Results:
        """y, h = x + residual (None without one) and, if asked for, 1 / rho in float64."""
        launch, y = self.launch, empty_strided(*self.y)
        h, inverse_rms = None, empty_strided(*self.inverse_rms) if with_inverse_rms else None
        if residual is not None:
            h, dtype = empty_strided(*self.dx), self.dx[2]
            x, residual = x.to(dtype), residual.to(dtype).contiguous()
        x, x_step = (x, launch.row_bytes) if x.is_contiguous() else _rows(x, launch.n)
        if scale is not None and self.gain is not None:
            scale = scale.to(self.gain).to(scale.dtype)
        scale = None if scale is None else scale.contiguous()
        bias = None if bias is None else bias.contiguous()
        threads, gomp_parallel = launch.forward_threads(openmp_threads)
        launch.native.forward(  # written out, as a function for each address takes a part of a small call
            threads=threads, gomp_parallel=gomp_parallel, x=x.data_ptr(), x_step=x_step,
            residual=None if residual is None else residual.data_ptr(),
            scale=None if scale is None else scale.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            y=y.data_ptr(), h=None if h is None else h.data_ptr(),
            inverse_rms=None if inverse_rms is None else inverse_rms.data_ptr(),
        )  # fmt: skip
        return y, h, inverse_rms

    def backward(
        self, needed: tuple[bool, ...], dy: Tensor, dh: Tensor | None, h: Tensor, scale: Tensor | None,
        bias: Tensor | None, inverse_rms: Tensor | None,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """dx + dh in T, dscale and dbias in the dtypes of the parameters, of a dy in memory.

        Those that are not ``needed`` are None; a GPU computes dx always. 1 / rho is computed if it is None.
        """
        launch, dx = self.launch, empty_strided(*self.dx) if needed[0] else None
        dscale = empty_strided(*self.dscale) if self.dscale is not None and needed[1] else None
        dbias = empty_strided(*self.dbias) if self.dbias is not None and needed[2] else None
        h, h_step = (h, launch.row_bytes) if h.is_contiguous() else _rows(h, launch.n)
        dy, dh = dy.contiguous(), None if dh is None else dh.contiguous()
        if scale is not None and self.gain is not None:
            scale = scale.to(self.gain).to(scale.dtype)
        scale = None if scale is None else scale.contiguous()
        threads, gomp_parallel = launch.backward_threads(openmp_threads)
        launch.native.backward(  # written out, as in the forward pass
            threads=threads, gomp_parallel=gomp_parallel, h=h.data_ptr(), h_step=h_step,
            scale=None if scale is None else scale.data_ptr(),
            inverse_rms=None if inverse_rms is None else inverse_rms.data_ptr(), dy=dy.data_ptr(),
            dh=None if dh is None else dh.data_ptr(), dx=None if dx is None else dx.data_ptr(),
            dscale=None if dscale is None else dscale.data_ptr(), dbias=None if dbias is None else dbias.data_ptr(),
        )  # fmt: skip
        return dx, dscale, dbias


class KeptOnGPU(Kept):
    """The same on a GPU."""

    __slots__ = ()

    def forward(
        self, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> Results:
        with current_device(x):
            empty, h, sizes = allocator(x), None, self.sizes
            y, inverse_rms = empty(*self.y), empty(*self.inverse_rms) if with_inverse_rms else None
            if residual is not None:
                h, dtype = empty(*self.dx), self.dx[2]
                x, residual = x.to(dtype), residual.to(dtype).contiguous()
            if not x.is_contiguous():
                x, sizes = gpu.in_rows(self.launch, x)
            if scale is not None and self.gain is not None:
                scale = scale.to(self.gain).to(scale.dtype)
            gpu.forward(
                self.launch, sizes, x=x, residual=residual, scale=gapless(scale), bias=gapless(bias), y=y, h=h,
                inverse_rms=inverse_rms,
            )  # fmt: skip
        return y, h, inverse_rms

    def backward(
        self, needed: tuple[bool, ...], dy: Tensor, dh: Tensor | None, h: Tensor, scale: Tensor | None,
        bias: Tensor | None, inverse_rms: Tensor | None,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        if inverse_rms is None:
            alone = kept_on(h.device, self.call, gpu.launch_of(self.call, None, None))
            inverse_rms = alone.forward(True, h, None, None, None)[2]
        with current_device(h):
            empty, sizes = allocator(h), self.sizes
            dx = empty(*self.dx)
            dscale = empty(*self.dscale) if self.dscale is not None and needed[1] else None
            dbias = empty(*self.dbias) if self.dbias is not None and needed[2] else None
            if not h.is_contiguous():
                h, sizes = gpu.in_rows(self.launch, h)
            if scale is not None and self.gain is not None:
                scale = scale.to(self.gain).to(scale.dtype)
            gpu.backward(
                self.launch, sizes, h=h, dy=dy.contiguous(), dh=gapless(dh), scale=gapless(scale),
                inverse_rms=inverse_rms, dx=dx, dscale=dscale, dbias=dbias,
            )  # fmt: skip
        return dx, dscale, dbias


def why_not(prepared: Prepared, tensors: Iterable[Any]) -> str | None:
    """Why no kernel computes a call with these tensors, the first of which is x; None if one does."""
    x, *others = (tensor for tensor in tensors if tensor is not None)
    if (reason := refusal(x.device, prepared.kernel_call, *prepared.formats)) is not None:
        return reason
    if is_watched() or has_tangents():
        return "a compiler, torch.func, forward mode or a mode sees the operations"
    return None if are_readable(x, *others) else "the numbers of a tensor are not in memory as they are"


def refusal(device: torch.device, call: Call, *formats: str | None) -> str | None:
    """Why no kernel computes a call on a device; None if one does."""
    return engines.why_not(call, gpu.platform_of(device), formats, gpu.card_of(device))


def are_readable(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels can read the numbers of all tensors."""
    return (is_plain if x.is_cpu else is_plain_on_gpu)(x, *others)


def kept_of(prepared: Prepared, x: Tensor) -> Kept | None:
    """A prepared call as kernels compute it where x is; None if they cannot."""
    device = x.device
    kept: Kept | None = prepared.kept.get(device)
    if kept is None:
        call, formats = prepared.kernel_call, prepared.formats
        launch = launch_on(device, call, *formats)
        if launch is not None:
            kept = prepared.kept[device] = kept_on(device, call, launch, *formats)
    return kept


def launch_on(device: torch.device, call: Call, scale: str | None, bias: str | None) -> Any:
    """What the kernels of a device need for a call with parameters of these dtypes; None if they cannot compute it.

    The question is asked in each call of this function, as RMSNORM_GPU_KERNELS=0 may be set between two of them.
    """
    if refusal(device, call, scale, bias) is not None:
        return None
    if gpu.platform_of(device) == "cuda":
        return gpu.launch_of(call, scale, bias)
    from rmsnorm.cpu.launch import launch_of

    return launch_of(call, scale, bias)


def kept_on(device: torch.device, call: Call, launch: Any, scale: str | None = None, bias: str | None = None) -> Kept:
    features = [call.shape[axis] for axis in call.feature_axes]
    layouts: Any = (
        None if name is None else _contiguous(sizes, _DTYPES[name])
        for sizes, name in ((call.shape, call.result), (launch.reduced, "float64"), (call.shape, call.x),
                            (features, scale), (features, bias))
    )  # fmt: skip
    autocast = device.type if is_widened(device.type) else None
    gain = None if call.gain is None else _DTYPES[call.gain]
    kept = Kept(call, launch, *layouts, is_plain, autocast, gain=gain)  # type: ignore[call-arg,misc]
    if type(launch) is not gpu.Launch:
        return kept
    on_gpu = KeptOnGPU(*kept)._replace(sizes=gpu.sizes_of(launch, launch.n * launch.groups))
    if device.type == "cpu":  # as interpreted
        return on_gpu
    return on_gpu._replace(is_readable=partial(is_plain_on_gpu, index=device.index))


def _contiguous(sizes: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of ``empty_strided`` for a tensor without gaps."""
    strides = list(accumulate([1, *(max(size, 1) for size in sizes[:0:-1])], mul))
    return tuple(sizes), tuple(strides[::-1]), dtype


def _is_like(tensor: Tensor | None, known: tuple[torch.Size, torch.dtype] | None) -> bool:
    return tensor is not None and known is not None and tensor.shape == known[0] and tensor.dtype is known[1]


def _rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """x in rows of n, and the bytes from one to the next."""
    rows = rows_of(x, n)
    return rows, rows.stride(0) * rows.element_size()


def openmp_threads() -> tuple[int, int]:
    """How many threads PyTorch uses, and the function that starts them: a ``Threads`` of cpu/launch.py."""
    return torch.get_num_threads(), openmp.gomp_parallel()
