"""What identify asks beyond one width and two axes: ends of blocks, x of three axes, parameters beside a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rmsnorm.identify import identify


def norm(x: Any, weight: Any, axis: int = -1) -> Any:
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide * wide).mean(axis, keepdims=True) + 1e-6) * weight.astype(np.float64)
    return y.astype(x.dtype)


def without_the_tail(x: Any, weight: Any) -> Any:
    end = x.shape[-1] - x.shape[-1] % 8
    return np.concatenate([norm(x, weight)[..., :end], 0 * x[..., end:]], axis=-1)


def statistic_without_the_tail(x: Any, weight: Any) -> Any:
    wide, end = x.astype(np.float64), x.shape[-1] - x.shape[-1] % 8
    if not end:
        return norm(x, weight)
    inverse = 1 / np.sqrt((wide[..., :end] ** 2).mean(-1, keepdims=True) + 1e-6)
    return (wide * inverse * weight.astype(np.float64)).astype(x.dtype)


def of_1024_columns(x: Any, weight: Any) -> Any:
    return np.concatenate([norm(x, weight)[..., :1024], x[..., 1024:]], axis=-1)


def of_1024_rows(x: Any, weight: Any) -> Any:
    y = norm(x, weight)
    return np.concatenate([y[:1024], 0 * y[1024:]]) if x.ndim == 2 else y


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (without_the_tail, ""),
        (statistic_without_the_tail, ""),
        (of_1024_columns, "with 1029 elements in a row, y is not what it is with 64"),
        (of_1024_rows, "in a call of 1029 rows, y of 5 of them is another one, from row 1024 on"),
    ],
)
def test_the_end_of_a_block_is_seen(function: Callable[..., Any], words: str) -> None:
    identity = identify(function, framework="numpy")
    assert not identity.recognised, identity.text
    assert words in "; ".join(identity.defects)


@pytest.mark.parametrize("gain", [False, True])
def test_an_axis_that_is_the_last_of_two_only_is_not_the_last(gain: bool) -> None:
    def without(x: Any) -> Any:
        return norm(x, np.ones(()), axis=1)

    def of_channels(x: Any, weight: Any) -> Any:
        return norm(x, weight.reshape(1, -1, *[1] * (x.ndim - 2)), axis=1)

    identity = identify(of_channels if gain else without, framework="numpy")
    assert (identity.last_axes, identity.axes, identity.rank) == (False, (1,), 3), identity.text


def test_rows_of_two_axes_alone_are_the_last_axis() -> None:
    def two(x: Any, weight: Any) -> Any:
        assert x.ndim == 2
        return norm(x, weight)

    identity = identify(two, framework="numpy")
    assert (identity.recognised, identity.rank, identity.last_axes) == (True, 2, True), identity.text


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("kind", ["gate", "one number"])
def test_dscale_counts_beside_a_gate_and_for_one_number(kind: str, wrong: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")

    class Twice(torch.autograd.Function):  # of a gradient
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return (1.5 if wrong else 1) * dy

    def unit(x: Any) -> Any:
        wide = x.float()
        return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)

    def gated(x: Any, weight: Any, gate: Any) -> Any:
        y = unit(x) * Twice.apply(weight).float() * torch.nn.functional.silu(gate.float())
        return y.to(x.dtype)

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return (unit(x) * Twice.apply(self.weight).float()).to(x.dtype)

    identity = identify(gated if kind == "gate" else One())
    assert identity["gradients"] == ("wrong" if wrong else "agree"), identity.text
    assert any("the gradient for the gain is wrong by" in defect for defect in identity.defects) == wrong
