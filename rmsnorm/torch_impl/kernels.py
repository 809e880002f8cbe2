"""The door to the kernels: forward and backward of tensors in memory, without a graph. Those on a GPU go to gpu.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from typing import Any, Final, NamedTuple
from typing import cast as cast_to

import torch
from torch import Tensor

from rmsnorm import cpu
from rmsnorm.cpu import openmp
from rmsnorm.cpu.prepared import Prepared, axes_last
from rmsnorm.gpu import is_interpreted
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call
from rmsnorm.torch_impl import gpu, operations
from rmsnorm.torch_impl.memory import (
    check_storage,
    gapless,
    is_plain,
    is_plain_on_gpu,
    mask_rows,
    moved,
    moved_back,
    rows_of,
)
from rmsnorm.torch_impl.private import CPU, allocator, current_gpu, empty_strided, is_autocast_on
from rmsnorm.torch_impl.rounding import add, cast, dtype_name

_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in dtypes.FLOATS}


@lru_cache(maxsize=4096)
def plan(device: torch.device, call: Call, scale: str | None, bias: str | None, gate: str | None = None) -> Any:
    """The plan of the kernels for a device, for a call with a gate of that dtype; None if they cannot compute it."""
    if gpu.is_usable(device):
        return None if gate is not None else gpu.plan(call, scale, bias)
    if device.type != "cpu" or not cpu.supports(call):
        return None
    from rmsnorm.cpu import launch

    return launch.plan(call, scale, bias, gate)


def plan_of(x: Tensor, prepared: Prepared, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None) -> Any:
    """The same for a prepared call on tensors where x is."""
    if x.is_cpu and not is_interpreted():
        return prepared.in_memory()
    return plan(x.device, prepared.rows, *(None if t is None else dtype_name(t.dtype) for t in (scale, bias, gate)))


def are_readable(x: Tensor, *others: Tensor | None) -> bool:
    """Whether kernels can read the numbers of all tensors."""
    return (is_plain if x.is_cpu else is_plain_on_gpu)(x, *others)


@lru_cache(maxsize=4096)
def planned(
    device: Any, shape: Any, dtype: Any, scale: Any, bias: Any, gate: Any, text: str, k: Any
) -> tuple[Call, Any]:
    """The call that has this text, and its plan."""
    call = Call.from_text(text, shape, dtype_name(dtype), k)
    return call, plan(device, call, *(None if p is None else dtype_name(p) for p in (scale, bias, gate)))


def forward(
    call: Call, plan: Any, with_inverse_rms: bool, x: Tensor, residual: Tensor | None, scale: Tensor | None,
    bias: Tensor | None, mask: Tensor | None, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """y, h = x + residual (None without one) and, if asked for, 1 / rho in float64."""
    if plan is None:
        check_storage("rms_norm", x, residual=residual, scale=scale, bias=bias, mask=mask, gate=gate)
        h = None if residual is None else add(x, residual, call.x)
        y, inverse_rms = operations.forward(call, x if h is None else h, scale, bias, mask, gate)
        return y, h, inverse_rms
    if type(plan) is gpu.Plan:
        return gpu.forward(plan, x, residual, scale, bias, mask, with_inverse_rms)
    inverse_rms = torch.empty(*plan.reduced, dtype=torch.float64, device=CPU) if with_inverse_rms else None
    h = other = None
    if residual is not None:
        t = _DTYPES[call.x]
        h, x, other = torch.empty(x.shape, dtype=t, device=CPU), x.to(t), residual.to(t).contiguous()
    if x.is_contiguous():
        matrix, y = x, empty_strided(call.shape, x.stride(), _DTYPES[call.result])
    else:
        matrix = rows_of(x, plan.n)
        y = torch.empty(*x.shape, dtype=_DTYPES[call.result], device=CPU)  # faster with sizes than with a shape
    masks, mask_step, mask_stride = mask_rows(mask, x, plan.n)
    scale, bias, (gates, gate_step) = gapless(scale), gapless(bias), _gates(gate, plan.n)
    plan.run_forward(
        openmp_threads, matrix.data_ptr(), plan.x_bytes if matrix is x else matrix.stride(0) * x.element_size(),
        _address(other), _address(scale), _address(bias), _address(masks), mask_step, mask_stride,
        y.data_ptr(), _address(h), _address(inverse_rms), _address(gates), gate_step,
    )  # fmt: skip
    return y, h, inverse_rms


class Repeated(NamedTuple):
    """A call that a layer or a compiled program makes again and again: what was checked and planned for it once."""

    settings: Any  # of the layer
    call: Call
    shape: torch.Size
    dtype: torch.dtype
    scale: tuple[torch.Size, torch.dtype] | None
    bias: tuple[torch.Size, torch.dtype] | None
    gate: torch.dtype | None
    plan: Any
    y: tuple[Any, ...]  # sizes, strides and dtype, likewise of what follows
    inverse_rms: tuple[Any, ...]
    dx: tuple[Any, ...]
    dscale: tuple[Any, ...] | None
    dbias: tuple[Any, ...] | None
    dgate: tuple[Any, ...] | None
    gate_step: int
    is_readable: Callable[..., bool]  # whether the kernels can read the numbers of tensors
    autocast: str | None = None  # the kind of device whose autocast gives y another dtype
    gpu_index: int = -1  # of the GPU
    sizes: tuple[Any, ...] = ()  # of the rows of x there

    def matches(
        self, settings: Any, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None = None
    ) -> bool:
        """Whether a call is this one, so that ``forward`` computes it."""
        return (
            x.shape == self.shape and x.dtype is self.dtype and settings == self.settings
            and self.is_readable(x, scale, bias) and x.is_contiguous()  # which sparse tensors do not have
            and _matches(scale, self.scale) and _matches(bias, self.bias)
            and (gate is self.gate or (is_plain(gate) and _matches(gate, self.gate and (self.shape, self.gate))))
            and (self.autocast is None or not is_autocast_on(self.autocast))
        )  # fmt: skip

    def forward(
        self, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None = None,
        with_inverse_rms: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """y and, if asked for, 1 / rho in float64."""
        plan, y = self.plan, empty_strided(*self.y)
        inverse_rms = empty_strided(*self.inverse_rms) if with_inverse_rms else None
        plan.run_forward(
            openmp_threads, x.data_ptr(), plan.x_bytes, 0, _address(scale), _address(bias), 0, 0, 0, y.data_ptr(), 0,
            _address(inverse_rms), _address(gate), self.gate_step,
        )  # fmt: skip
        return y, inverse_rms

    def backward(
        self, dy: Tensor, x: Tensor, scale: Tensor | None, inverse_rms: Tensor | None, bias: Tensor | None = None,
        gate: Tensor | None = None, needed: tuple[bool, ...] = (True, True),
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """dx, dscale, dbias and dgate, of a plain dy without gaps. The bias counts with a gate alone.

        A GPU leaves out dscale and dbias where they are not needed.
        """
        plan, dx = self.plan, empty_strided(*self.dx)
        dscale = None if self.dscale is None else empty_strided(*self.dscale)
        dbias = None if self.dbias is None else empty_strided(*self.dbias)
        dgate = None if self.dgate is None else empty_strided(*self.dgate)
        plan.run_backward(
            openmp_threads, x.data_ptr(), plan.x_bytes, _address(scale), 0, 0, 0,
            _address(inverse_rms), dy.data_ptr(), 0, dx.data_ptr(), _address(dscale), _address(dbias),
            _address(gate), self.gate_step, _address(dgate), 0 if gate is None else _address(bias),
        )  # fmt: skip
        return dx, dscale, dbias, dgate


class RepeatedOnGPU(Repeated):
    """The same on a GPU."""

    __slots__ = ()

    def forward(
        self, x: Tensor, scale: Tensor | None, bias: Tensor | None, gate: Tensor | None = None,
        with_inverse_rms: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if self.gpu_index >= 0 and self.gpu_index != current_gpu():
            with torch.cuda.device(self.gpu_index):
                return self.forward(x, scale, bias, gate, with_inverse_rms)
        empty = allocator(x)
        y, inverse_rms = empty(*self.y), empty(*self.inverse_rms) if with_inverse_rms else None
        gpu.run_forward(self.plan, self.sizes, x, None, scale, bias, None, y, None, inverse_rms)
        return y, inverse_rms

    def backward(
        self, dy: Tensor, x: Tensor, scale: Tensor | None, inverse_rms: Tensor | None, bias: Tensor | None = None,
        gate: Tensor | None = None, needed: tuple[bool, ...] = (True, True),
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        if self.gpu_index >= 0 and self.gpu_index != current_gpu():
            with torch.cuda.device(self.gpu_index):
                return self.backward(dy, x, scale, inverse_rms, bias, gate, needed)
        empty = allocator(x)
        dx = empty(*self.dx)
        dscale = empty(*self.dscale) if self.dscale is not None and needed[0] else None
        dbias = empty(*self.dbias) if self.dbias is not None and needed[1] else None
        gpu.run_backward(self.plan, self.sizes, x, dy, None, scale, None, inverse_rms, dx, dscale, dbias)
        return dx, dscale, dbias, None


def _matches(parameter: Tensor | None, known: tuple[torch.Size, torch.dtype] | None) -> bool:
    if parameter is None or known is None:
        return parameter is known
    return parameter.shape == known[0] and parameter.dtype is known[1] and parameter.is_contiguous()


def repeated(
    settings: Any, call: Call, plan: Any, device: torch.device, x: torch.Size, dtype: torch.dtype, scale: Any,
    bias: Any, gate: torch.dtype | None = None,
) -> Repeated | None:  # fmt: skip
    """A call that was computed, of x of that shape and dtype and such parameters; None if no kernel can."""
    if plan is None:
        return None
    is_on_gpu = type(plan) is gpu.Plan
    if is_on_gpu and settings in plan.started:
        return cast_to(RepeatedOnGPU, plan.started[settings])
    y, dx = _contiguous(x, _DTYPES[call.result]), _contiguous(x, dtype)
    dscale, dbias, dgate = (None if p is None else _contiguous(*p) for p in (scale, bias, gate and (x, gate)))
    reduced, step = _contiguous(plan.reduced, torch.float64), plan.n * gate.itemsize if gate else 0
    kept = settings, call, x, dtype, scale, bias, gate, plan, y, reduced, dx, dscale, dbias, dgate, step
    if not is_on_gpu:
        return Repeated(*kept, is_plain)
    is_readable = is_plain if device.type == "cpu" else partial(is_plain_on_gpu, index=device.index)
    index, sizes = -1 if device.index is None else device.index, gpu.sizes_of(plan, plan.n * plan.groups)
    again = RepeatedOnGPU(*kept, is_readable, None if device.type == "cpu" else device.type, index, sizes)
    plan.started[settings] = again
    return again


def _contiguous(sizes: Any, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of ``empty_strided`` for a tensor without gaps."""
    strides = list(accumulate([1, *(max(size, 1) for size in sizes[:0:-1])], mul))
    return tuple(sizes), tuple(strides[::-1]), dtype


def backward(
    call: Call, plan: Any, dy: Tensor, h: Tensor, scale: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    inverse_rms: Tensor | None, dh: Tensor | None, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """dx + dh in T, dscale, dbias and dgate in the dtypes of the parameters and the gate.

    The kernels for the CPU compute 1 / rho if it is None.
    """
    if plan is None or not (is_plain if h.is_cpu else is_plain_on_gpu)(dy, dh):
        dx, *others = operations.gradients(call, dy, h, scale, bias, mask, dh, gate, inverse_rms)
        return cast(dx, call.x), *others
    if type(plan) is gpu.Plan:
        return *gpu.backward(plan, dy, h, scale, None if bias is None else bias.dtype, mask, inverse_rms, dh), None
    dx = torch.empty(*h.shape, dtype=h.dtype, device=CPU)
    dscale, dbias = (None if p is None else torch.empty(*p.shape, dtype=p.dtype, device=CPU) for p in (scale, bias))
    dgate = None if gate is None else torch.empty(*h.shape, dtype=gate.dtype, device=CPU)
    matrix = h if h.is_contiguous() else rows_of(h, plan.n)
    masks, mask_step, mask_stride = mask_rows(mask, h, plan.n)
    dy, dh, gain, (gates, gate_step) = dy.contiguous(), gapless(dh), gapless(scale), _gates(gate, plan.n)
    shift = None if gate is None else gapless(bias)  # dgate needs it
    plan.run_backward(
        openmp_threads, matrix.data_ptr(), plan.x_bytes if matrix is h else matrix.stride(0) * h.element_size(),
        _address(gain), _address(masks), mask_step, mask_stride,
        _address(inverse_rms), dy.data_ptr(), _address(dh), dx.data_ptr(), _address(dscale), _address(dbias),
        _address(gates), gate_step, _address(dgate), _address(shift),
    )  # fmt: skip
    return dx, dscale, dbias, dgate


def gradients(
    call: Call, dy: Tensor, x: Tensor, residual: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    mask: Tensor | None, dh: Tensor | None, gate: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] | None:  # fmt: skip
    """As backward, by kernels and without a forward pass before; None if no kernel can compute with these tensors."""
    if not are_readable(x, dy, residual, scale, bias, mask, dh, gate):
        return None
    whole, call = call, axes_last(call)
    g, b, z = (None if p is None else dtype_name(p.dtype) for p in (scale, bias, gate))
    kernels = plan(x.device, replace(call, result=dtype_name(dy.dtype)), g, b, z)
    if kernels is None:
        return None
    dy, x, residual, mask, dh, gate = moved(whole, dy, x, residual, mask, dh, gate)
    h = x if residual is None else x + residual  # of one dtype: rounded once
    inverse_rms = None
    if type(kernels) is gpu.Plan:
        statistic = plan(x.device, call, None, None)
        inverse_rms = forward(call, statistic, True, h, None, None, None, mask)[2]
    dx, dscale, dbias, dgate = backward(call, kernels, dy, h, scale, bias, mask, inverse_rms, dh, gate)
    dx, dgate = moved_back(whole, dx, dgate)
    return dx, dscale, dbias, dgate


def _gates(gate: Tensor | None, n: int) -> tuple[Tensor | None, int]:
    """The gate in rows of n, and the bytes from one to the next."""
    if gate is None:
        return None, 0
    gates = rows_of(gate, n)
    return gates, gates.stride(0) * gates.element_size()


def openmp_threads() -> tuple[int, int]:
    """How many threads PyTorch uses, and the function that starts them: a ``Threads`` of cpu/launch.py."""
    return torch.get_num_threads(), openmp.gomp_parallel()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
