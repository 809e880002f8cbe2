"""What PyTorch's operations do to the means of their results: the rules of those that are linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from rmsnorm.conversion.layer_norm.streams import Operand, Rule, Value, moved, spread, sum_of
from rmsnorm.conversion.replacement.torch import is_float

_SAME: Final = {"alias", "clone", "detach", "lift_fresh", "neg", "_to_copy"}
_MOVES: Final = {
    "_unsafe_view", "cat", "embedding", "expand", "flip", "index", "index_select", "permute", "repeat", "roll",
    "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


def rule_of(
    func: Any, args: Any, kwargs: Any, values: Mapping[int, Value], inputs: Sequence[Value], outputs: Sequence[Value]
) -> Rule | None:
    """The rule of an operation; None if it is not linear."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    shape = outputs[0].shape if outputs else ()

    def broadcast(tensor: Tensor, linear: bool = True) -> Operand:
        return spread(values.get(id(tensor)), tensor.shape, shape, linear)

    def along(tensor: Tensor, axes: dict[int, int]) -> Operand:
        return Operand(values.get(id(tensor)), axes)

    tensors = [operand for operand in args if isinstance(operand, Tensor)]
    if name in _SAME:
        return sum_of([broadcast(args[0])])
    if name in _MOVES:
        return moved(inputs, partial(_move, func, args, kwargs))
    if name in ("add", "sub", "rsub"):
        return sum_of(*([broadcast(term)] if isinstance(term, Tensor) else [] for term in args[:2]))
    if name == "mul":
        return sum_of(map(broadcast, tensors))
    if name == "div" and not kwargs:
        return sum_of([broadcast(tensors[0]), *(broadcast(divisor, False) for divisor in tensors[1:])])
    if name == "masked_fill" and not isinstance(args[2], Tensor) and args[2] == 0:
        return sum_of([broadcast(args[0]), broadcast(args[1])])
    if name in ("mm", "addmm"):
        factors = [along(args[-2], {0: 0}), along(args[-1], {1: 1})]
        return sum_of(factors, *([broadcast(term)] for term in args[:-2]))
    if name in ("bmm", "baddbmm"):
        factors = [along(args[-2], {0: 0, 1: 1}), along(args[-1], {0: 0, 2: 2})]
        return sum_of(factors, *([broadcast(term)] for term in args[:-2]))
    if name == "linear":
        last = len(shape) - 1
        factors = [along(args[0], {axis: axis for axis in range(last)}), along(args[1], {last: 0})]
        return sum_of(factors, *([broadcast(term)] for term in tensors[2:]))
    if name == "convolution" and args[8] == 1:  # one group: every output channel reads all input channels
        factors = [along(args[0], {0: 0}), along(args[1], {1: 1 if args[6] else 0})]
        return sum_of(factors, *([along(bias, {1: 0})] for bias in tensors[2:]))
    if name in ("mean", "sum") and len(args) > 1 and args[1]:
        summed = {axis % args[0].ndim for axis in args[1]}
        remaining = [axis for axis in range(args[0].ndim) if axis not in summed]
        result_axes = remaining if len(shape) == args[0].ndim else range(len(shape))
        return sum_of([along(args[0], dict(zip(result_axes, remaining, strict=True)))])
    if name in ("_embedding_bag", "_embedding_bag_forward_only") and (len(args) < 5 or args[4] != 2):  # 2: the maximum
        return sum_of([along(args[0], {1: 1})])
    return None


def _move(func: Any, args: Any, kwargs: Any, numbers: list[np.ndarray]) -> list[np.ndarray]:
    rest = iter(numbers)
    args, kwargs = tree_map(lambda leaf: torch.from_numpy(next(rest)) if is_float(leaf) else leaf, (args, kwargs))
    with torch.no_grad():
        out = func(*args, **kwargs)
    return [tensor.numpy() for tensor in tree_leaves(out)]
