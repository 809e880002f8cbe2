"""RMSNorms of PyTorch that are wrong in one circumstance of a call, or in two together, and right everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch_zoo import standard as right

EPS = 1e-6


def rows_of(x):
    return x.numel() // x.shape[-1]


def larger_where(condition: Callable[[Any], bool]) -> Callable[..., Any]:
    """y is 1.5 times as large where the condition on x holds."""

    def norm(x, weight):
        y = right(x, weight)
        return y * 1.5 if condition(x) else y

    return norm


def with_backward(change: Callable[..., tuple[Any, Any]], factor: float = 1.0) -> Callable[..., Any]:
    """Gradients that ``change(context, dy, dx, dweight)`` returns, and y times a factor where they are asked for."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            context.save_for_backward(x, weight)
            context.calls = 0
            return right(x, weight) * factor

        @staticmethod
        def backward(context, dy):
            leaves = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
            context.calls += 1
            with torch.enable_grad():
                dx, dweight = torch.autograd.grad(right(*leaves), leaves, dy)
            return change(context, dy, dx, dweight)

    def norm(x, weight):
        return Norm.apply(x, weight) if x.requires_grad or weight.requires_grad else right(x, weight)

    return norm


def with_dh(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    """The gradients for x and the residual are what ``change`` makes of the one through y and of dh."""

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight, residual):
            h = x + residual
            context.save_for_backward(h, weight)
            return right(h, weight), h

        @staticmethod
        def backward(context, dy, dh):
            leaves = [tensor.detach().requires_grad_() for tensor in context.saved_tensors]
            with torch.enable_grad():
                through_y, dweight = torch.autograd.grad(right(*leaves), leaves, dy)
            dx, dresidual = change(through_y, dh)
            return dx, dweight, dresidual

    return lambda x, weight, residual: Norm.apply(x, weight, residual)


def static_output() -> Callable[..., Any]:
    buffers = {}

    def norm(x, weight):
        y = right(x, weight)
        if x.requires_grad or weight.requires_grad:
            return y
        key = x.shape, x.dtype
        if key not in buffers:
            buffers.clear()
            buffers[key] = torch.empty_like(y, memory_format=torch.contiguous_format)
        return buffers[key].copy_(y)

    return norm


def static_gradient() -> Callable[..., Any]:
    """dx of the last backward pass lies in the memory of the one before."""
    buffers = {}

    def change(context, dy, dx, dweight):
        key = dx.shape, dx.dtype
        if key not in buffers:
            buffers.clear()
            buffers[key] = torch.empty_like(dx, memory_format=torch.contiguous_format)
        return buffers[key].copy_(dx), dweight

    return with_backward(change)


def cached_gain() -> Callable[..., Any]:
    """A copy in float32 of the gain that has this memory."""
    copies = {}

    def norm(x, weight):
        key = weight.data_ptr(), weight.shape, weight.dtype
        if key not in copies:
            copies.clear()
            copies[key] = weight.detach().clone()
        return right(x, copies[key] if weight.requires_grad is False else weight + (copies[key] - weight).detach())

    return norm


def of_two_threads() -> Callable[..., Any]:
    """x goes through memory that all threads share."""
    shared = {}

    def norm(x, weight):
        shared["x"] = x
        time.sleep(0.01)
        return right(shared["x"] if shared["x"].shape == x.shape else x, weight)

    return norm


def partly_written(x, weight):
    """Of 5 rows and more, the last ones are those of memory that nobody wrote to."""
    y = right(x, weight)
    if x.requires_grad or weight.requires_grad or rows_of(x) < 5:
        return y
    whole = torch.empty_like(y, memory_format=torch.contiguous_format)
    whole.view(-1, x.shape[-1])[:-1] = y.reshape(-1, x.shape[-1])[:-1]
    # Fresh memory is full of zeros most often, and here of what was right once.
    return whole if bool(torch.isnan(whole.view(-1, x.shape[-1])[-1]).all()) else y


def first_rows_without_the_rest() -> Callable[..., Any]:
    first = []

    def norm(x, weight):
        first.append(rows_of(x))
        y = right(x, weight).reshape(-1, x.shape[-1])
        return torch.where(torch.arange(len(y))[:, None] < first[0], y, 0 * y).reshape(x.shape)

    return norm


def without_a_weight(x, weight=None):
    return 2 * right(x, torch.ones(x.shape[-1])) if weight is None else right(x, weight)


def cleared_tail(x, weight):
    y, rows = right(x, weight), rows_of(x)
    return torch.where(torch.arange(rows)[:, None] < rows - rows % 64, y.view(rows, -1), 0).view(x.shape) if (
        rows > 8192
    ) else y  # fmt: skip


def gated(x, weight, gate):
    return (right(x.float(), weight) * torch.nn.functional.silu(gate.float())).to(x.dtype)


def masked(x, weight, mask):
    """The mean square is over what the mask lets through."""
    wide, count = x.float(), mask.sum(-1, keepdim=True)
    square = torch.where(mask, wide, 0).pow(2).sum(-1, keepdim=True) / count
    return (wide * torch.rsqrt(square + EPS) * weight.float()).to(x.dtype)


def read_wrongly(option: str) -> dict[str, Callable[..., Any]]:
    """Norms that read an option of the shape of x from the wrong elements of it, where rows are long or many."""

    def norm(read):
        return {
            "residual": lambda x, weight, residual: (right(x + read(residual), weight), x + residual),
            "gate": lambda x, weight, gate: gated(x, weight, read(gate)),
            "mask": lambda x, weight, mask: masked(x, weight, read(mask)),
        }[option]

    def first_columns(tensor):
        return torch.where(torch.arange(tensor.shape[-1]) < 1024, tensor, tensor[..., :1])

    def without_tail_of_columns(tensor):
        return torch.where(torch.arange(tensor.shape[-1]) < tensor.shape[-1] // 8 * 8, tensor, tensor[..., :1])

    def row_modulo_256(tensor):
        rows = tensor.reshape(-1, tensor.shape[-1])
        return rows[torch.arange(len(rows)) % 256].reshape(tensor.shape)

    def as_if_dense(tensor):
        """The elements of its memory that a dense tensor would have."""
        strides = torch.empty(tensor.shape, device="meta").stride()
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return tensor.as_strided(tensor.shape, strides) if room >= tensor.numel() else tensor

    wrong = {
        "of 1,024 columns": first_columns, "without its tail": without_tail_of_columns,
        "by row modulo 256": row_modulo_256, "as if dense": as_if_dense,
    }  # fmt: skip
    return {f"{option} {words}": norm(read) for words, read in wrong.items()}


WRONG = {
    "y with gradients": with_backward(lambda context, dy, dx, dweight: (dx, dweight), factor=2),
    "64 rows of 128": larger_where(lambda x: rows_of(x) >= 64 and x.shape[-1] >= 128),
    "multiples of 8 from 256": larger_where(lambda x: x.shape[-1] >= 256 and x.shape[-1] % 8 == 0),
    **{f"width {n}": larger_where(lambda x, n=n: x.shape[-1] == n) for n in (768, 1024, 2048, 4096, 5120, 8192)},
    "one wide row": larger_where(lambda x: rows_of(x) == 1 and x.shape[-1] >= 128),
    "1,024 to 4,096 rows": larger_where(lambda x: 1024 <= rows_of(x) <= 4096),
    "six axes": larger_where(lambda x: x.ndim == 6),
    "rows beyond 64-row tiles": cleared_tail,
    "a row of NaN": larger_where(lambda x: rows_of(x) > 64 and bool(torch.isnan(x).any())),
    "no_grad": larger_where(lambda x: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()),
    "inference": larger_where(lambda x: torch.is_inference_mode_enabled()),
    "autocast": larger_where(lambda x: torch.is_autocast_enabled("cpu")),
    "no rows": lambda x, weight: right(x, weight) if x.numel() else x.new_zeros(1, x.shape[-1]),
    "width 1": larger_where(lambda x: x.shape[-1] == 1),
    "as many rows as columns": larger_where(lambda x: x.ndim == 2 and x.shape[0] == x.shape[1]),
    "as many channels as columns": larger_where(lambda x: x.ndim == 4 and x.shape[1] == x.shape[-1]),
    "x expanded": larger_where(lambda x: x.ndim > 1 and x.shape[0] > 1 and x.stride(0) == 0),
    "a row of infinity": larger_where(lambda x: bool(torch.isinf(x).any())),
    "a row of zeros": larger_where(lambda x: rows_of(x) > 1 and bool((x == 0).all(-1).any())),
    "unaligned gain": lambda x, weight: right(x, weight) * (1.5 if weight.data_ptr() % 16 else 1),
    "gain bfloat16": lambda x, weight: right(x, weight) * (1.5 if weight.dtype == torch.bfloat16 else 1),
    "a gain that was updated": cached_gain(),
    "two threads": of_two_threads(),
    "partly written": partly_written,
    "unaligned": larger_where(lambda x: x.data_ptr() % 16 != 0),
    "strided gain": lambda x, weight: right(x, torch.as_strided(weight, weight.shape, (1,), weight.storage_offset())),
    "no weight": without_a_weight,
    "static output": static_output(),
    "static gradient": static_gradient(),
    "the first shape": first_rows_without_the_rest(),
    "a second backward pass": with_backward(lambda context, dy, dx, dweight: (dx * context.calls, dweight)),
    "frozen gain": with_backward(lambda c, dy, dx, dweight: (dx * (1 if c.needs_input_grad[1] else 2), dweight)),
    "frozen x": with_backward(lambda c, dy, dx, dweight: (dx, dweight * (1 if c.needs_input_grad[0] else 2))),
    "expanded dy": with_backward(lambda c, dy, dx, dweight: (dx * (2 if 0 in dy.stride() else 1), dweight)),
    "dweight of three axes": with_backward(lambda c, dy, dx, dweight: (dx, dweight * (2 if dy.ndim == 3 else 1))),
    "dh dropped": with_dh(lambda through_y, dh: (through_y, through_y)),
    "dh to one": with_dh(lambda through_y, dh: (through_y + dh, through_y)),
    "dh twice": with_dh(lambda through_y, dh: (through_y + 2 * dh, through_y + 2 * dh)),
    "gates up to 20": lambda x, weight, gate: gated(x, weight, gate.clamp(-20, 20)),
    "eps ignored": lambda x, weight, eps=EPS: right(x, weight),
    **read_wrongly("residual"),
    **read_wrongly("gate"),
    **read_wrongly("mask"),
}
