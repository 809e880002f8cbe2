"""Table 1 of the paper and its facts about gradients: what a transformation of data or weights leaves unchanged.

a = W x goes through each norm before and after a transformation, with eps = 0: the golden, and beside it LayerNorm.
All data have few bits, so that W x and every transformation of it are exact.
Where a transformation leaves a norm unchanged, no bit of y changes. Zhang & Sennrich 2019, table 1 and section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from rmsnorm.numpy_impl import rms_norm, rms_norm_vjp

CASES, INPUTS, OUTPUTS = 8, 6, 16
PARTIAL = 0.0625  # the paper's 6.25 %: one of the outputs
TRANSFORMATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "weight matrix re-scaling": lambda d, delta: {"w": delta * d.w},
    "weight matrix re-centring": lambda d, delta: {"w": d.w + d.shift},
    "weight vector re-scaling": lambda d, delta: {"w": np.concatenate([delta * d.w[:1], d.w[1:]])},
    "dataset re-scaling": lambda d, delta: {"x": delta * d.x},
    "dataset re-centring": lambda d, delta: {"x": d.x + d.shift},
    "single training case re-scaling": lambda d, delta: {"x": np.concatenate([delta * d.x[:1], d.x[1:]])},
}
# Table 1 of the paper, row by row and in its words: x invariant, - not.
TABLE_1 = {"LayerNorm": "x x - x - x", "RMSNorm": "x - - x - x", "pRMSNorm": "x - - x - x"}


def layer_norm(d: Any) -> Any:
    """As its paper writes it, in 50 digits."""
    with mp.workdps(50):
        a, g, b = (np.vectorize(mpf, otypes=[object])(array) for array in (d.a, d.g, d.b))
        centred = a - a.mean(axis=1, keepdims=True)
        sigma = np.vectorize(mp.sqrt, otypes=[object])((centred**2).mean(axis=1, keepdims=True))
        return (centred / sigma * g + b).astype(np.float64)


def golden(partial: float | None = None, eps: float = 0.0) -> Any:
    return lambda d: rms_norm(d.a, d.g, d.b, variant="paper", partial=partial, eps=eps)


NORMS = {"LayerNorm": layer_norm, "RMSNorm": golden(), "pRMSNorm": golden(PARTIAL)}


def data(seed: int) -> Any:
    random = np.random.default_rng(seed)
    shapes = ((CASES, INPUTS), (OUTPUTS, INPUTS), OUTPUTS, OUTPUTS, (CASES, OUTPUTS), INPUTS)
    x, w, g, b, target, shift = (np.round(64 * random.normal(size=shape)) / 64 for shape in shapes)
    return SimpleNamespace(x=x, w=w, g=g, b=b, target=target, shift=shift, a=x @ w.T)


def moved(d: Any, name: str, delta: float) -> Any:
    new = SimpleNamespace(**{**vars(d), **TRANSFORMATIONS[name](d, delta)})
    new.a = new.x @ new.w.T
    return new


def marks(norm: Any, seed: int = 0, delta: float = 0.75) -> str:
    d = data(seed)
    y = norm(d)
    changes = [np.max(np.abs(norm(moved(d, name, delta)) - y)) / np.max(np.abs(y)) for name in TRANSFORMATIONS]
    assert not any(0 < change < 1e-4 for change in changes), "a change shows"
    return " ".join("x" if change == 0 else "-" for change in changes)


@pytest.mark.parametrize(("seed", "delta"), [(0, 0.5), (1, 0.75), (2, 3.0)])
def test_the_run_gives_table_1(seed: int, delta: float) -> None:
    assert {name: marks(norm, seed, delta) for name, norm in NORMS.items()} == TABLE_1


def test_the_table_sees_a_norm_that_is_another_and_eps() -> None:
    assert marks(lambda d: np.full_like(d.a, np.nan)) == "- - - - - -"
    assert marks(golden(eps=0.5)) == marks(golden(PARTIAL, eps=0.5)) == "- - - - - -"


@pytest.mark.parametrize("delta", [0.5, 0.75])
@pytest.mark.parametrize("partial", [None, PARTIAL])
def test_of_the_gradients_only_that_of_a_changes(partial: float | None, delta: float) -> None:
    """L is half the squared distance of y from a random target: dL/dg and dL/db do not change, and dL/da is divided.

    So dL/dW = (dL/da)^T x is the same with x -> delta x, and divided by delta with W -> delta W.
    """

    def gradients(d: Any) -> Any:
        v = golden(partial)(d) - d.target
        return rms_norm_vjp(v, d.a, d.g, d.b, variant="paper", partial=partial)

    d = data(0)
    (da, dg, db), (new_da, new_dg, new_db) = gradients(d), gradients(moved(d, "dataset re-scaling", delta))
    assert np.array_equal(new_dg, dg)
    assert np.array_equal(new_db, db)
    u = 2.0**-53  # each is rounded once, and the product, too
    assert np.all(np.abs(delta * new_da - da) <= (0 if delta == 0.5 else 4 * u) * np.abs(da))
    assert np.any(new_da != da)
