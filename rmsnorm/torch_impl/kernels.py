"""The door to the kernels: forward and backward of tensors in memory, without a graph. Those on a GPU go to gpu.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rmsnorm import engines
from rmsnorm.cpu import openmp
from rmsnorm.engines import Prepared
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import gpu
from rmsnorm.torch_impl.memory import is_plain, rows_of
from rmsnorm.torch_impl.private import (
    current_device,
    empty_on_gpu,
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
    place: int  # index of the GPU; -1 for the CPU
    empty: Callable[..., Tensor]  # makes a tensor from sizes, strides and dtype
    compute_forward: Callable[..., None]
    compute_backward: Callable[..., None]
    autocast: str | None  # the kind of device whose autocast gives y of a layer another dtype
    gain: torch.dtype | None  # to which the gain is rounded first; None if it is taken as it is
    arrays: tuple[Any, ...] = ()  # of a layer's call: shape and dtype, or None, of x, residual, scale and bias

    def matches(self, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None) -> bool:
        """Whether a call of a layer is this one."""
        (shape, dtype), h, g, b = self.arrays
        return (
            x.shape == shape and x.dtype is dtype
            and is_plain(self.place, x, scale, bias) and x.is_contiguous()  # which sparse tensors do not have
            and (g is scale or _is_like(scale, g)) and (b is bias or _is_like(bias, b))
            and (h is residual or (_is_like(residual, h) and is_plain(self.place, residual)))
            and (self.autocast is None or not is_autocast_on(self.autocast))
        )  # fmt: skip

    def forward(
        self, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None
    ) -> Results:
        """y, h = x + residual (None without one) and, if asked for, 1 / rho in float64."""
        empty, h = self.empty, None
        y, inverse_rms = empty(*self.y), empty(*self.inverse_rms) if with_inverse_rms else None
        if residual is not None:
            h, dtype = empty(*self.dx), self.dx[2]
            x, residual = x.to(dtype), residual.to(dtype).contiguous()
        if scale is not None:
            scale = (scale if self.gain is None else scale.to(self.gain).to(scale.dtype)).contiguous()
        bias = None if bias is None else bias.contiguous()
        self.compute_forward(self.launch, x, residual, scale, bias, y, h, inverse_rms)
        return y, h, inverse_rms

    def backward(
        self, needed: tuple[bool, ...], dy: Tensor, dh: Tensor | None, h: Tensor, scale: Tensor | None,
        bias: Tensor | None, inverse_rms: Tensor | None,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """dx + dh in T, dscale and dbias in the dtypes of the parameters, of a dy in memory.

        Those that are not ``needed`` are None. 1 / rho is computed if it is None.
        """
        empty = self.empty
        dx = empty(*self.dx) if needed[0] else None
        dscale = empty(*self.dscale) if self.dscale is not None and needed[1] else None
        dbias = empty(*self.dbias) if self.dbias is not None and needed[2] else None
        dy, dh = dy.contiguous(), None if dh is None else dh.contiguous()
        if scale is not None:
            scale = (scale if self.gain is None else scale.to(self.gain).to(scale.dtype)).contiguous()
        self.compute_backward(self.launch, h, dy, dh, scale, inverse_rms, dx, dscale, dbias)
        return dx, dscale, dbias


class KeptOnGPU(Kept):
    """The same on a GPU, which computes dx always."""

    __slots__ = ()

    def forward(self, with_inverse_rms: bool, x: Tensor, *others: Tensor | None) -> Results:
        with current_device(x):
            return super().forward(with_inverse_rms, x, *others)

    def backward(
        self, needed: tuple[bool, ...], dy: Tensor, dh: Tensor | None, h: Tensor, scale: Tensor | None,
        bias: Tensor | None, inverse_rms: Tensor | None,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        if inverse_rms is None:
            alone = kept_on(h.device, self.call)
            inverse_rms = alone.forward(True, h, None, None, None)[2]
        with current_device(h):
            return super().backward((True, *needed[1:]), dy, dh, h, scale, bias, inverse_rms)


def _forward_on_cpu(
    launch: Any, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None, y: Tensor,
    h: Tensor | None, inverse_rms: Tensor | None,
) -> None:  # fmt: skip
    x, x_step = (x, launch.row_bytes) if x.is_contiguous() else _rows(x, launch.n)
    threads, gomp_parallel = launch.forward_threads(openmp_threads)
    launch.native.forward(  # written out, as a function for each address takes a part of a small call
        threads=threads, gomp_parallel=gomp_parallel, x=x.data_ptr(), x_step=x_step,
        residual=None if residual is None else residual.data_ptr(),
        scale=None if scale is None else scale.data_ptr(), bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(), h=None if h is None else h.data_ptr(),
        inverse_rms=None if inverse_rms is None else inverse_rms.data_ptr(),
    )  # fmt: skip


def _backward_on_cpu(
    launch: Any, h: Tensor, dy: Tensor, dh: Tensor | None, scale: Tensor | None, inverse_rms: Tensor | None,
    dx: Tensor | None, dscale: Tensor | None, dbias: Tensor | None,
) -> None:  # fmt: skip
    h, h_step = (h, launch.row_bytes) if h.is_contiguous() else _rows(h, launch.n)
    threads, gomp_parallel = launch.backward_threads(openmp_threads)
    launch.native.backward(  # written out, as in the forward pass
        threads=threads, gomp_parallel=gomp_parallel, h=h.data_ptr(), h_step=h_step, dy=dy.data_ptr(),
        dh=None if dh is None else dh.data_ptr(), scale=None if scale is None else scale.data_ptr(),
        inverse_rms=None if inverse_rms is None else inverse_rms.data_ptr(),
        dx=None if dx is None else dx.data_ptr(), dscale=None if dscale is None else dscale.data_ptr(),
        dbias=None if dbias is None else dbias.data_ptr(),
    )  # fmt: skip


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


def are_readable(x: Any, *others: Tensor | None) -> bool:
    """Whether all are tensors whose numbers kernels can read."""
    return isinstance(x, Tensor) and is_plain(x.get_device(), x, *others)


def kept_of(prepared: Prepared, x: Tensor) -> Kept | None:
    """A prepared call as kernels compute it where x is; None if they cannot.

    RMSNORM_GPU_KERNELS=0 may be set between two calls.
    """
    device = x.device
    kept: Kept | None = prepared.kept.get(device)
    if kept is None:
        call, formats = prepared.kernel_call, prepared.formats
        if refusal(device, call, *formats) is None:
            kept = prepared.kept[device] = kept_on(device, call, *formats)
    return kept


def kept_on(device: torch.device, call: Call, scale: str | None = None, bias: str | None = None) -> Kept:
    """A call that the kernels of a device compute, with parameters of these dtypes."""
    is_of_gpu = gpu.platform_of(device) == "cuda"
    launch: Any
    if is_of_gpu:
        launch = gpu.launch_of(call, scale, bias)
    else:
        from rmsnorm.cpu.launch import launch_of

        launch = launch_of(call, scale, bias)
    features = [call.shape[axis] for axis in call.feature_axes]
    layouts: Any = (
        None if name is None else (tuple(sizes), torch.empty(sizes, device="meta").stride(), _DTYPES[name])
        for sizes, name in ((call.shape, call.result_dtype), (launch.reduced, "float64"), (call.shape, call.x_dtype),
                            (features, scale), (features, bias))
    )  # fmt: skip
    place, empty = (-1, empty_strided) if device.type == "cpu" else (device.index, empty_on_gpu)
    autocast = device.type if is_widened(device.type) else None
    gain = None if call.gain_dtype is None else _DTYPES[call.gain_dtype]
    if is_of_gpu:
        return KeptOnGPU(call, launch, *layouts, place, empty, gpu.forward, gpu.backward, autocast, gain)  # type: ignore[call-arg]
    return Kept(call, launch, *layouts, place, empty, _forward_on_cpu, _backward_on_cpu, autocast, gain)  # type: ignore[call-arg]


def _is_like(tensor: Tensor | None, known: tuple[torch.Size, torch.dtype] | None) -> bool:
    return tensor is not None and known is not None and tensor.shape == known[0] and tensor.dtype is known[1]


def _rows(x: Tensor, n: int) -> tuple[Tensor, int]:
    """x in rows of n, and the bytes from one to the next."""
    rows = rows_of(x, n)
    return rows, rows.stride(0) * rows.element_size()


def openmp_threads() -> tuple[int, int]:
    """How many threads PyTorch uses, and the function that starts them: a ``Threads`` of cpu/launch.py."""
    return torch.get_num_threads(), openmp.gomp_parallel()
