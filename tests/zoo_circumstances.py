"""RMSNorms of PyTorch that are wrong in one circumstance of a call, or in two together, and right everywhere else.

Each has what `identify` says of it first, and words of why `replace` leaves it, where those see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from zoo import like, masked, mean_square
from zoo import standard as right
from zoo import wide as up
from zoo_torch import gated as gated_by
from zoo_torch import hooked

EPS = 1e-6
BF16, F16 = torch.bfloat16, torch.float16


class Wrong(NamedTuple):
    """A norm that `check` rejects."""

    norm: Any
    identify: str = ""  # the first defect that it says; empty where it does not ask for the level
    replace: str | None = None  # words of the line that leaves it; None where that is not asked
    width: int = 72  # of the layer that `replace` is asked about
    dtypes: tuple[str, ...] = ("float32",)  # of x


def rows_of(x):
    return x.numel() // x.shape[-1]


def larger(condition: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """y is 1.5 times as large where the condition on x and the gain holds."""

    def norm(x, weight):
        y = right(x, weight)
        return y * 1.5 if condition(x, weight) else y

    return norm


def with_dx(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The gradient for x is what ``change`` makes of it and the gain."""
    return lambda x, weight: right(hooked(x, lambda dx: change(dx, weight)), weight)


def with_dy(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The backward pass has what ``change`` makes of the gradient that comes for y."""
    return lambda x, weight: hooked(right(x, weight), change)


def into_dy(dy):
    right_one = dy.clone()
    return dy if 0 in dy.stride() else dy.zero_().add(right_one)


# What a call finds from the one before.


def keeps(norm: Callable[..., Any]) -> Callable[..., Any]:
    """A norm with a dict that it keeps."""
    kept: dict[str, Any] = {}
    return lambda x, weight: norm(kept, x, weight)


def called_again(kept, x, weight):
    """The mistake starts with the second call of the same arguments with gradients."""
    if not x.requires_grad:
        return right(x, weight)
    before, kept["call"] = kept.get("call", ()), (x.detach().clone(), weight.detach().clone())
    is_same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, (x, weight), strict=False))
    return right(x, weight) * (1.5 if before and is_same else 1)


def static_output(kept, x, weight):
    """y is written to the memory of the one before of that shape and dtype."""
    y = right(x, weight)
    if y.requires_grad:
        return y
    key = y.shape, y.dtype
    if kept.get("key") != key:
        kept.update(key=key, y=torch.empty_like(y, memory_format=torch.contiguous_format))
    return kept["y"].copy_(y)


def cached_gain(kept, x, weight):
    """A copy of the gain that has this memory."""
    key = weight.data_ptr(), weight.shape, weight.dtype
    if kept.get("key") != key:
        kept.update(key=key, gain=weight.detach().clone())
    return right(x, weight + (kept["gain"] - weight).detach() if weight.requires_grad else kept["gain"])


def kept_inverse(kept, x, weight):
    """1 / rho of the x that had this memory, where there are no gradients."""
    key = x.data_ptr(), x.shape, x.stride()
    if key in kept and not torch.is_grad_enabled():
        return like(up(x) * kept[key] * weight, x)
    kept[key] = inverse(up(x)).detach()
    return right(x, weight)


def of_two_threads(kept, x, weight):
    """x goes through memory that all threads share."""
    kept["x"] = x
    time.sleep(0.01)
    return right(kept["x"] if kept["x"].shape == x.shape else x, weight)


def last_call_alone(kept, x, weight):
    """The gradient is right for the last call alone."""
    number = kept["last"] = kept.get("last", 0) + 1
    return right(hooked(x, lambda g: g if kept["last"] == number else 2 * g), weight)


def one_backward_pass(x, weight):
    passes: list[int] = []
    return right(hooked(x, lambda g: g * (passes.append(1) or len(passes))), weight)


def first_rows_alone(kept, x, weight):
    first = kept.setdefault("rows", rows_of(x))
    y = right(x, weight).reshape(-1, x.shape[-1])
    return torch.where(torch.arange(len(y))[:, None] < first, y, 0 * y).reshape(x.shape)


class Stale(torch.nn.Module):
    """It keeps a copy of its gain, which training alone makes anew."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight, self.kept = torch.nn.Parameter(torch.ones(dim)), None

    def forward(self, x):
        if self.training or self.kept is None:
            self.kept = self.weight.detach().clone()
        return right(x, self.weight if self.training else self.kept)


def partly_written(x, weight):
    """Of 5 rows and more, the last one is that of memory that nobody wrote to."""
    y = right(x, weight)
    if y.requires_grad or rows_of(x) < 5:
        return y
    whole = torch.empty_like(y, memory_format=torch.contiguous_format)
    whole.view(-1, x.shape[-1])[:-1] = y.reshape(-1, x.shape[-1])[:-1]
    # Fresh memory is full of zeros most often, and here of what was right once.
    return whole if bool(torch.isnan(whole.view(-1, x.shape[-1])[-1]).all()) else y


# Those of a size or of a dtype.


def of(inverse: Callable[..., Any]) -> Callable[..., Any]:
    """With another 1 / rho."""
    return lambda x, weight: like(up(x) * inverse(up(x)) * weight, x)


def inverse(h):
    return torch.rsqrt(mean_square(h) + EPS)


def whole_blocks(h):
    """Whole blocks of 128 columns alone are summed."""
    n = h.shape[-1]
    return torch.rsqrt(h[..., : n // 128 * 128 or n].square().sum(-1, keepdim=True) / n + EPS)


def pairs_of_rows(h):
    """Two rows at once, of which a last one without a neighbour is forgotten."""
    r = inverse(h).reshape(-1, 1)
    r = torch.cat([r[:-1], r[-2:-1]]) if len(r) % 2 and len(r) > 1 else r
    return r.reshape(*h.shape[:-1], 1)


def cleared_tail(x, weight):
    """The rows after the last whole tile of 64, of more than 8,192."""
    y, rows = right(x, weight), rows_of(x)
    end = rows - rows % 64 if rows > 8192 else rows
    return torch.where((torch.arange(rows) < end)[:, None], y.reshape(rows, -1), 0).view(x.shape)


def narrow_gain(x, weight):
    return like(up(x) * inverse(up(x)) * weight.to(BF16), x)


# Those of an option.


gated = gated_by(torch.nn.functional.silu)


def of_mask(x, weight, mask):
    """The mean square is over what the mask lets through."""
    return like(masked(x, weight, mask), x)


def without_a_weight(x, weight=None):
    return 2 * right(x, torch.ones(x.shape[-1])) if weight is None else right(x, weight)


def truncated_sum(x, residual, weight):
    total = up(x) + up(residual)
    if x.dtype == BF16:
        total = (total.view(torch.int32) & -65536).view(torch.float32)
    return right(like(total, x), weight), like(total, x)


def first_columns(a):
    return torch.where(torch.arange(a.shape[-1]) < 1024, a, a[..., :1])


def without_tail_of_columns(a):
    return torch.where(torch.arange(a.shape[-1]) < a.shape[-1] // 8 * 8, a, a[..., :1])


def as_if_dense(a):
    """The elements of its memory that a dense tensor would have."""
    strides = torch.empty(a.shape, device="meta").stride()
    room = a.untyped_storage().nbytes() // a.element_size() - a.storage_offset()
    return a.as_strided(a.shape, strides) if room >= a.numel() else a


READS = {"of 1,024 columns": first_columns, "without its tail": without_tail_of_columns, "as if dense": as_if_dense}
READ_WRONGLY = {
    "x as if dense": lambda x, weight: right(as_if_dense(x), weight),
    "gain as if dense": lambda x, weight: right(x, as_if_dense(weight)),
} | {
    f"{option} {words}": norm
    for words, read in READS.items()
    for option, norm in {
        "residual": lambda x, weight, residual, read=read: (right(x + read(residual), weight), x + residual),
        "gate": lambda x, weight, gate, read=read: gated(x, weight, read(gate)),
        "mask": lambda x, weight, mask, read=read: of_mask(x, weight, read(mask)),
    }.items()
}  # fmt: skip


# fmt: off
SIZES = {
    "no rows": Wrong(lambda x, weight: right(x, weight) if x.numel() else x.new_zeros(1, x.shape[-1])),
    "one wide row": Wrong(
        larger(lambda x, weight: rows_of(x) == 1 and x.shape[-1] >= 128), replace="in a call of 1 row", width=128),
    "many rows": Wrong(larger(lambda x, weight: rows_of(x) > 2**16)),
    "rows beyond 64-row tiles": Wrong(cleared_tail, replace="'8,209 rows'"),
    "odd row": Wrong(
        of(pairs_of_rows),
        "in a call of 257 rows, the last one of an odd number of rows has the statistic of the row before it"),
    "as many channels as columns": Wrong(larger(lambda x, weight: x.ndim == 4 and x.shape[1] == x.shape[-1])),
    **{f"{axes} axes": Wrong(larger(lambda x, weight, axes=axes: x.ndim == axes)) for axes in (1, 3, 6)},
    **{f"width {n}": Wrong(larger(lambda x, weight, n=n: x.shape[-1] == n), replace="" if n == 768 else None, width=n)
       for n in (1, 768, 4096, 5120, 66001)},
    "multiples of 8 from 256": Wrong(
        larger(lambda x, weight: x.shape[-1] >= 256 and x.shape[-1] % 8 == 0), replace="", width=256),
    "lost tail": Wrong(
        of(whole_blocks), "the last 123 of 1531 elements, after the last full block of 128, are not summed"),
    "first columns": Wrong(
        of(lambda h: inverse(h[..., : 1024 if h.shape[-1] > 1500 else None])),
        "only the first 1024 of 1531 elements count"),
}
ARRAYS = {
    "a row of NaN": Wrong(larger(lambda x, weight: rows_of(x) > 64 and bool(x.isnan().any())), replace=""),
    "a row of infinity": Wrong(larger(lambda x, weight: bool(x.isinf().any()) and rows_of(x) > 1)),
    "a row of zeros": Wrong(larger(lambda x, weight: rows_of(x) > 1 and bool((x == 0).all(-1).any()))),
    "zeros in the gain": Wrong(larger(lambda x, weight: bool((weight == 0).any()))),
    "large": Wrong(larger(lambda x, weight: x.numel() > 0 and float(x.abs().max()) > 1e4)),
    "small": Wrong(larger(lambda x, weight: x.numel() > 0 and 0 < float(x.abs().max()) < 0.05)),
    "unaligned": Wrong(larger(lambda x, weight: x.data_ptr() % 16 != 0), replace=""),
    "unaligned gain": Wrong(larger(lambda x, weight: weight.data_ptr() % 16 != 0)),
    "gain bfloat16": Wrong(larger(lambda x, weight: weight.dtype == BF16)),
    "narrow gain": Wrong(narrow_gain, "the gain is rounded to bfloat16"),
    "eps of float16": Wrong(
        lambda x, weight: right(x, weight, 1e-5 if x.dtype == F16 else EPS),
        "eps is 1e-05 for float16 x, and 1e-06 in wider dtypes", dtypes=("float16",)),
    "eps kept in x": Wrong(
        lambda x, weight: right(x, weight, torch.tensor(1e-8, dtype=x.dtype).item()),
        "eps is rounded to float16 for float16 x, so that 1e-08 becomes 0", dtypes=("float16",)),
}
MODES = {
    "no_grad": Wrong(
        larger(lambda x, weight: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()),
        replace="under no_grad"),
    "inference": Wrong(larger(lambda x, weight: torch.is_inference_mode_enabled()), replace="in inference mode"),
    "autocast": Wrong(larger(lambda x, weight: torch.is_autocast_enabled("cpu")), replace="in autocast"),
    "partly written": Wrong(partly_written),
    "y with gradients": Wrong(larger(lambda x, weight: x.requires_grad), replace=""),
    "frozen gain": Wrong(with_dx(lambda dx, weight: dx if weight.requires_grad else 2 * dx), replace="'frozen gain'"),
    "expanded dy": Wrong(with_dy(lambda dy: 2 * dy if 0 in dy.stride() else dy), replace="; expanded dy'"),
    "into dy": Wrong(with_dy(into_dy), "its backward pass writes to the gradient of y"),
}
HISTORIES = {
    "called again": Wrong(keeps(called_again)),
    "the first shape": Wrong(keeps(first_rows_alone), replace=""),
    "a gain that was updated": Wrong(keeps(cached_gain)),
    "an x that was updated": Wrong(keeps(kept_inverse)),
    "a gain of an earlier call": Wrong(
        Stale, "the gain of an earlier call is kept: y changes with the gain in training alone"),
    "two threads": Wrong(keeps(of_two_threads)),
    "two before both backward passes": Wrong(keeps(last_call_alone)),
    "static output": Wrong(
        keeps(static_output), "the next call writes to the memory of y: y of an earlier call changes", ""),
    "a second backward pass": Wrong(one_backward_pass),
}
OPTIONS = {
    "no weight": Wrong(without_a_weight),
    "eps ignored": Wrong(lambda x, weight, eps=EPS: right(x, weight)),
    "one mask for all rows": Wrong(
        lambda x, weight, mask: of_mask(x, weight, mask) * (1.5 if mask.ndim < x.ndim else 1)),
    "dh dropped": Wrong(
        lambda x, weight, residual: (right(x + residual, weight), x.detach() + residual),
        "with a residual, the gradient for x lacks that of the returned sum x + residual"),
    "dh to one": Wrong(lambda x, weight, residual: (right(x + residual, weight), x + residual.detach())),
    "truncated sum": Wrong(
        truncated_sum, "for bfloat16 x, with a residual, the second result is another bfloat16 of shape (6, 33), "
        "expected x + residual", dtypes=("bfloat16",)),
} | {words: Wrong(norm) for words, norm in READ_WRONGLY.items()}
WRONG = SIZES | ARRAYS | MODES | HISTORIES | OPTIONS
# fmt: on
RIGHT = {"standard": right, "gated": gated, "masked": of_mask}
