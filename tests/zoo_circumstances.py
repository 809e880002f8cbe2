"""RMSNorms of PyTorch that are wrong in one circumstance of a call, or in two together, and right everywhere else.

Each has what `identify` says of it first, and words of why `replace` leaves it, where those see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from zoo import masked, mean_square
from zoo import standard as right
from zoo import wide as up

EPS = 1e-6


class Wrong(NamedTuple):
    """A norm that `check` rejects.

    Attributes:
        identify: the first defect that `identify` says; empty where it does not ask for the circumstance.
        replace: words of the line of `replace` that leaves it; None where that is not asked.
        width: of the layer that `replace` is asked about.
        dtypes: of x, in which it is wrong.
    """

    norm: Any
    identify: str = ""
    replace: str | None = None
    width: int = 72
    dtypes: tuple[str, ...] = ("float32",)


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


def static_memory() -> Callable[[Any], Any]:
    """Copies a tensor into the memory of the one before of that shape and dtype."""
    buffers = {}

    def copied(y):
        key = y.shape, y.dtype
        if key not in buffers:
            buffers.clear()
            buffers[key] = torch.empty_like(y, memory_format=torch.contiguous_format)
        return buffers[key].copy_(y)

    return copied


def static_output() -> Callable[..., Any]:
    copied = static_memory()
    return lambda x, weight: (
        right(x, weight) if x.requires_grad or weight.requires_grad else copied(right(x, weight))
    )  # fmt: skip


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


def of_mask(x, weight, mask):
    """The mean square is over what the mask lets through."""
    return masked(x, weight, mask).to(x.dtype)


def read_wrongly(option: str) -> dict[str, Callable[..., Any]]:
    """Norms that read an option of the shape of x from the wrong elements of it, where rows are long or many."""

    def norm(read):
        return {
            "residual": lambda x, weight, residual: (right(x + read(residual), weight), x + residual),
            "gate": lambda x, weight, gate: gated(x, weight, read(gate)),
            "mask": lambda x, weight, mask: of_mask(x, weight, read(mask)),
        }[option]

    def first_columns(tensor):
        return torch.where(torch.arange(tensor.shape[-1]) < 1024, tensor, tensor[..., :1])

    def without_tail_of_columns(tensor):
        return torch.where(torch.arange(tensor.shape[-1]) < tensor.shape[-1] // 8 * 8, tensor, tensor[..., :1])

    def as_if_dense(tensor):
        """The elements of its memory that a dense tensor would have."""
        strides = torch.empty(tensor.shape, device="meta").stride()
        room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return tensor.as_strided(tensor.shape, strides) if room >= tensor.numel() else tensor

    wrong = {
        "of 1,024 columns": first_columns, "without its tail": without_tail_of_columns,
        "as if dense": as_if_dense,
    }  # fmt: skip
    return {f"{option} {words}": norm(read) for words, read in wrong.items()}


# Those of a dtype, of a size or of an option.


def norm_of(x, weight, inverse):
    return (up(x) * inverse * weight).type_as(x)


def inverse(h, eps=EPS):
    return torch.rsqrt(mean_square(h) + eps)


def lost_tail(x, weight):
    """Whole blocks of 128 columns alone are summed."""
    n = x.shape[-1]
    total = up(x)[..., : n // 128 * 128 or n].square().sum(-1, keepdim=True)
    return norm_of(x, weight, torch.rsqrt(total / n + EPS))


def odd_row(x, weight):
    """Two rows at once, of which a last one without a neighbour is forgotten."""
    r = inverse(up(x)).reshape(-1, 1)
    r = torch.cat([r[:-1], r[-2:-1]]) if len(r) % 2 and len(r) > 1 else r
    return norm_of(x, weight, r.reshape(*x.shape[:-1], 1))


def eps_of(dtype, eps, other):
    return lambda x, weight: right(x, weight, other if x.dtype == dtype else eps)


class Stale(torch.nn.Module):
    """It keeps a copy of its gain, which training alone makes anew."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight, self.kept = torch.nn.Parameter(torch.ones(dim)), None

    def forward(self, x):
        if self.training or self.kept is None:
            self.kept = self.weight.detach().clone()
        return right(x, self.weight if self.training else self.kept)


def truncated_sum(x, residual, weight):
    total = up(x) + up(residual)
    if x.dtype == torch.bfloat16:
        total = (total.view(torch.int32) & -65536).view(torch.float32)
    return right(total.type_as(x), weight), total.type_as(x)


def first_columns(x, weight):
    return norm_of(x, weight, inverse(up(x)[..., :1024] if x.shape[-1] > 1500 else up(x)))


TRUNCATED = (
    "for bfloat16 x, with a residual, the second result is another bfloat16 of shape (6, 33), expected x + residual"
)
WRONG = {name: wrong if isinstance(wrong, Wrong) else Wrong(wrong) for name, wrong in {
    # gradients, and what a call finds from the one before
    "y with gradients": Wrong(with_backward(lambda context, dy, dx, dweight: (dx, dweight), factor=2), replace=""),
    "frozen gain": Wrong(
        with_backward(lambda c, dy, dx, dweight: (dx * (1 if c.needs_input_grad[1] else 2), dweight)),
        replace="'frozen gain'"),
    "expanded dy": Wrong(
        with_backward(lambda c, dy, dx, dweight: (dx * (2 if 0 in dy.stride() else 1), dweight)),
        replace="; expanded dy'"),
    "into dy": Wrong(
        with_backward(lambda context, dy, dx, dweight: (dx if 0 in dy.stride() else dy.copy_(dx), dweight)),
        "its backward pass writes to the gradient of y"),
    "static output": Wrong(
        static_output(), "the next call writes to the memory of y: y of an earlier call changes", ""),
    "a gain that was updated": cached_gain(),
    "a gain of an earlier call": Wrong(
        Stale, "the gain of an earlier call is kept: y changes with the gain in training alone"),
    "two threads": of_two_threads(),
    "partly written": partly_written,
    "the first shape": Wrong(first_rows_without_the_rest(), replace=""),
    # modes
    "no_grad": Wrong(
        larger_where(lambda x: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()),
        replace="under no_grad"),
    "inference": Wrong(larger_where(lambda x: torch.is_inference_mode_enabled()), replace="in inference mode"),
    "autocast": Wrong(larger_where(lambda x: torch.is_autocast_enabled("cpu")), replace="in autocast"),
    # shapes
    "multiples of 8 from 256": Wrong(
        larger_where(lambda x: x.shape[-1] >= 256 and x.shape[-1] % 8 == 0), replace="", width=256),
    **{f"width {n}": Wrong(larger_where(lambda x, n=n: x.shape[-1] == n), replace="" if n < 2000 else None, width=n)
       for n in (768, 4096, 5120)},
    "width 1": larger_where(lambda x: x.shape[-1] == 1),
    "one wide row": Wrong(
        larger_where(lambda x: rows_of(x) == 1 and x.shape[-1] >= 128), replace="in a call of 1 row", width=128),
    "six axes": larger_where(lambda x: x.ndim == 6),
    "no rows": lambda x, weight: right(x, weight) if x.numel() else x.new_zeros(1, x.shape[-1]),
    "rows beyond 64-row tiles": Wrong(cleared_tail, replace="'8,209 rows'"),
    "as many channels as columns": larger_where(lambda x: x.ndim == 4 and x.shape[1] == x.shape[-1]),
    "lost tail": Wrong(lost_tail, "the last 123 of 1531 elements, after the last full block of 128, are not summed"),
    "odd row": Wrong(
        odd_row, "in a call of 257 rows, the last one of an odd number of rows has the statistic of the row before it"),
    "first columns": Wrong(first_columns, "only the first 1024 of 1531 elements count"),
    # values and memory
    "a row of NaN": Wrong(larger_where(lambda x: rows_of(x) > 64 and bool(torch.isnan(x).any())), replace=""),
    "a row of zeros": larger_where(lambda x: rows_of(x) > 1 and bool((x == 0).all(-1).any())),
    "unaligned": Wrong(larger_where(lambda x: x.data_ptr() % 16 != 0), replace=""),
    "unaligned gain": lambda x, weight: right(x, weight) * (1.5 if weight.data_ptr() % 16 else 1),
    # dtypes
    "gain bfloat16": lambda x, weight: right(x, weight) * (1.5 if weight.dtype == torch.bfloat16 else 1),
    "narrow gain": Wrong(
        lambda x, weight: norm_of(x, weight.to(torch.bfloat16), inverse(up(x))), "the gain is rounded to bfloat16"),
    "eps of float16": Wrong(
        eps_of(torch.float16, 1e-6, 1e-5), "eps is 1e-05 for float16 x, and 1e-06 in wider dtypes",
        dtypes=("float16",)),
    "eps kept in x": Wrong(
        lambda x, weight: right(x, weight, torch.tensor(1e-8, dtype=x.dtype).item()),
        "eps is rounded to float16 for float16 x, so that 1e-08 becomes 0", dtypes=("float16",)),
    # options
    "no weight": without_a_weight,
    "eps ignored": lambda x, weight, eps=EPS: right(x, weight),
    "dh dropped": Wrong(
        with_dh(lambda through_y, dh: (through_y, through_y)),
        "with a residual, the gradient for x lacks that of the returned sum x + residual"),
    "dh to one": with_dh(lambda through_y, dh: (through_y + dh, through_y)),
    "truncated sum": Wrong(truncated_sum, TRUNCATED, dtypes=("bfloat16",)),
    **{words: norm for option in ("residual", "gate", "mask") for words, norm in read_wrongly(option).items()},
}.items()}  # fmt: skip
RIGHT = {"standard": right, "gated": gated, "masked": of_mask}
