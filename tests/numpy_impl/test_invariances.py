"""Table 1 of the paper and its facts about gradients: what a transformation of data or weights leaves unchanged.

a = W x goes through each norm before and after a transformation, with eps = 0. The golden's RMSNorm stands beside the
other norms as their papers write them. A property holds if the output changes by no more than rounding can.

The bound. Let gamma = K u / (1 - K u), with u = 2^-53 and K more than the roundings on any path from the data to a
result: it bounds the error of a sum of products relative to the sum of their absolute values (Higham 2002, section
3.1). For a that is |W| |x|; kappa >= 1 is its largest ratio to the statistic rho of the same row or column. To first
order in tau = gamma kappa (the rest is in the slack of K), |da| <= tau rho, |d rho| <= tau rho, and

    |dx^| <= tau X,    X = 2 + |x^|        (2, because the mean that LayerNorm and BatchNorm subtract errs as well)
    |dy|  <= tau (|g| X + |b|)

A gradient is a sum of products of p quantities z, each with a majorant Z such that |z| <= Z and |dz| <= tau Z: it errs
by at most p tau times the same sum with Z for z. Two runs err by twice as much as the worse of them.

Source: Zhang & Sennrich 2019, arXiv 1910.07467, table 1 and section 4.2; Ba, Kiros & Hinton 2016, table 1.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp

CASES, INPUTS, OUTPUTS = 16, 24, 64
PARTIAL = 0.0625  # the paper's 6.25 %
U = 2.0**-53
TRANSFORMATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "weight matrix re-scaling": lambda d, delta: {"w": delta * d.w},
    "weight matrix re-centring": lambda d, delta: {"w": d.w + d.shift},
    "weight vector re-scaling": lambda d, delta: {"w": np.concatenate([delta * d.w[:1], d.w[1:]])},
    "dataset re-scaling": lambda d, delta: {"x": delta * d.x},
    "dataset re-centring": lambda d, delta: {"x": d.x + d.shift},
    "single training case re-scaling": lambda d, delta: {"x": np.concatenate([delta * d.x[:1], d.x[1:]])},
}
# Table 1 of the paper, row by row and in its words: x invariant, - not.
TABLE_1 = {
    "BatchNorm": "x - x x x -",
    "WeightNorm": "x - x - - -",
    "LayerNorm": "x x - x - x",
    "RMSNorm": "x - - x - x",
    "pRMSNorm": "x - - x - x",
}


def standardised(axis: int) -> Any:
    """Over the features of a case LayerNorm, over the cases of a feature BatchNorm; and its statistic."""

    def norm(d: Any) -> tuple[Any, Any]:
        sigma = d.a.std(axis=axis, keepdims=True)
        return (d.a - d.a.mean(axis=axis, keepdims=True)) / sigma * d.g + d.b, sigma

    return norm


def weight_norm(d: Any) -> tuple[Any, Any]:
    length = np.linalg.norm(d.w, axis=1)
    return d.x @ (d.g / length * d.w.T) + d.b, length[None]


def golden(counted: int = OUTPUTS, eps: float = 0.0) -> Any:
    partial = None if counted == OUTPUTS else PARTIAL

    def norm(d: Any) -> tuple[Any, Any]:
        y = rms_norm(d.a, d.g, d.b, variant="paper", partial=partial, eps=eps)
        return y, np.sqrt(np.mean(d.a[:, :counted] ** 2, axis=1, keepdims=True))

    return norm


NORMS = {
    "BatchNorm": standardised(0), "WeightNorm": weight_norm, "LayerNorm": standardised(1), "RMSNorm": golden(),
    "pRMSNorm": golden(4),
}  # fmt: skip


def data(seed: int) -> Any:
    random = np.random.default_rng(seed)
    shapes = ((CASES, INPUTS), (OUTPUTS, INPUTS), OUTPUTS, OUTPUTS, (CASES, OUTPUTS), INPUTS)
    x, w, g, b, target, shift = (random.normal(size=shape) for shape in shapes)
    return SimpleNamespace(x=x, w=w, g=g, b=b, target=target, shift=shift, a=x @ w.T)


def moved(d: Any, name: str, delta: float) -> Any:
    new = SimpleNamespace(**{**vars(d), **TRANSFORMATIONS[name](d, delta)})
    new.a = new.x @ new.w.T
    return new


def tau(d: Any, rho: Any) -> float:
    terms = np.abs(d.x) @ np.abs(d.w).T
    kappa = np.max(np.max(terms, axis=rho.shape.index(1), keepdims=True) / rho)
    roundings = 2 * (CASES + INPUTS + OUTPUTS) * U
    return float(roundings / (1 - roundings) * max(1.0, kappa))


def changes(norm: Any, seed: int, delta: float) -> list[tuple[float, float]]:
    """The largest change of an output by each transformation, and its bound, relative to the largest output."""
    d, cells = data(seed), []
    y, rho = norm(d)
    majorant = np.max(2 * np.abs(d.g) + np.abs(y - d.b) + np.abs(d.b))
    for name in TRANSFORMATIONS:
        other = moved(d, name, delta)
        new, new_rho = norm(other)
        bound = 2 * max(tau(d, rho), tau(other, new_rho)) * majorant
        cells.append((np.max(np.abs(new - y)) / np.max(np.abs(y)), bound / np.max(np.abs(y))))
    return cells


def marks(norm: Any, seed: int = 0, delta: float = 0.7) -> str:
    return " ".join("x" if change <= bound else "-" for change, bound in changes(norm, seed, delta))


@pytest.mark.parametrize("delta", [0.7, 3.0, 1e-3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_run_gives_table_1(seed: int, delta: float) -> None:
    assert {name: marks(norm, seed, delta) for name, norm in NORMS.items()} == TABLE_1


def test_a_dash_shows_and_a_re_scaling_by_a_power_of_two_changes_no_bit() -> None:
    """Such a scaling commutes with every rounding. A dash is what a reader can see, and far beyond its bound."""
    for name, norm in NORMS.items():
        cells = zip(TABLE_1[name].split(), changes(norm, 0, 0.7), changes(norm, 0, 0.5), TRANSFORMATIONS, strict=True)
        for mark, (change, bound), (by_half, _), transformation in cells:
            assert bound < 4e-10, "the bound is of the order of rounding"
            assert mark == "x" or change > 1e-4
            assert mark == "-" or by_half == 0 or "re-centring" in transformation


def test_the_table_sees_a_norm_that_is_another_and_eps() -> None:
    assert marks(NORMS["LayerNorm"]) != TABLE_1["RMSNorm"]
    assert marks(lambda d: (np.full_like(d.a, np.nan), np.ones((CASES, 1)))) == "- - - - - -"
    assert marks(golden(eps=1e-5)) == marks(golden(4, eps=1e-5)) == "- - - - - -"


@pytest.mark.parametrize("delta", [0.5, 0.7, 3.0])
@pytest.mark.parametrize("counted", [OUTPUTS, 4])
@pytest.mark.parametrize(("name", "factor"), [("dataset re-scaling", False), ("weight matrix re-scaling", True)])
def test_of_the_gradients_only_dl_dw_changes_and_only_with_w(
    name: str, factor: bool, counted: int, delta: float
) -> None:
    """L is half the squared distance of y from a random target. dL/dW does not change with x -> delta x, and is divided
    by delta with W -> delta W."""

    def gradients(d: Any) -> tuple[Any, ...]:
        options: Any = {"variant": "paper", "partial": None if counted == OUTPUTS else PARTIAL}
        v = rms_norm(d.a, d.g, d.b, **options) - d.target
        da, dg, db = rms_norm_vjp(v, d.a, d.g, d.b, **options)
        return dg, db, da.T @ d.x

    d = data(0)
    y, rho = golden(counted)(d)
    other = moved(d, name, delta)
    x_hat, gain = 2 + np.abs(d.a / rho), np.abs(d.g)
    v = np.abs(y - d.target) + gain * x_hat + np.abs(d.b)
    along = np.sum(gain * v * x_hat, axis=1, keepdims=True) / counted
    da = (gain * v + (np.arange(OUTPUTS) < counted) * x_hat * along) / rho
    majorants = 2 * np.sum(v * x_hat, axis=0), np.sum(v, axis=0), 4 * da.T @ np.abs(d.x)
    worst = max(tau(d, rho), tau(other, golden(counted)(other)[1]))
    expected = (1.0, 1.0, 1 / delta if factor else 1.0)
    for new, old, times, majorant in zip(gradients(other), gradients(d), expected, majorants, strict=True):
        change = np.max(np.abs(new / times - old))
        assert change <= 2 * worst * np.max(majorant)
        assert change == 0 or delta != 0.5
