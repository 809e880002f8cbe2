"""The recipe in NumPy, with what the parity kit compares: every case, variant and dtype, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden.cases import CASES, OTHERS, case

from rmsnorm import recipe
from rmsnorm.parity.cases import Case, Data, Outcome, make
from rmsnorm.parity.judge import compare, expect, named_gradients

QUANTITIES = ("y", "inverse_rms", "dx", "dscale", "dbias", "dresidual", "dgate")


def cast(a: Any, name: str) -> Any:
    return np.asarray(a).astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def where(condition: Any, a: Any, b: Any) -> Any:
    dtype = next(value.dtype for value in (a, b) if hasattr(value, "dtype"))
    return np.where(condition, np.asarray(a, dtype), np.asarray(b, dtype))


NUMPY = SimpleNamespace(
    name_of=lambda a: a.dtype.name,
    cast=cast,
    rounded=lambda a, name: cast(cast(a, name), a.dtype.name),
    constant=lambda a: a,
    sum=lambda a, axes: np.sum(a, axis=axes, keepdims=True),
    mean=lambda a, axes: np.mean(a, axis=axes, keepdims=True),
    max=lambda a, axes: np.max(a, axis=axes, keepdims=True, initial=0),
    over=lambda a, axes: np.sum(a, axis=axes) if axes else a,
    arange=lambda n, _: np.arange(n),
    index=lambda a, entries: a[entries],
    where=where,
    maximum=lambda a, b: np.maximum(a, np.asarray(b, a.dtype)),
    sigmoid=lambda z: (1 / (1 + np.exp(-z))).astype(z.dtype),
    silu=lambda z: (z / (1 + np.exp(-z))).astype(z.dtype),
    rsqrt=lambda a: 1 / np.sqrt(a),
    sqrt=np.sqrt,
    reshape=np.reshape,
    reciprocal=lambda a: 1 / a,
    shape=np.shape,
    ones_like=np.ones_like,
    root=recipe.root,
    mean_square=recipe.mean_square,
    is_spread=False,
)


def computed(data: Data, *, again: bool) -> Outcome:
    """What the recipe gives; ``again``: the gradients compute 1 / rho again."""
    arrays = (data.x, data.residual, data.scale, data.bias, data.mask, data.gate)
    y, total, row = recipe.forward(NUMPY, data.call, *arrays)
    dx, dscale, dbias, dgate = recipe.backward(NUMPY, data.call, data.dy, data.dh, *arrays, None if again else row)
    gradients = [cast(dx, data.x.dtype.name), dscale, dbias]
    gradients += [] if data.residual is None else [cast(dx, data.residual.dtype.name)]
    gradients += [] if data.gate is None else [dgate]
    assert (total is None) == (data.residual is None)
    results = {"y": y, "inverse_rms": recipe.inverse_rms(NUMPY, data.call, row)}
    results |= {name: value for name, value in named_gradients(data, gradients).items() if value is not None}
    return Outcome({name: [value] for name, value in results.items()})


@pytest.mark.parametrize("asked", [*CASES, *OTHERS], ids=lambda asked: asked.name)
def test_every_case_is_within_the_bounds(asked: Case) -> None:
    for number, (variant, dtype) in enumerate((v, t) for v in asked.variants for t in asked.dtypes):
        data = make(asked, variant, dtype)
        with np.errstate(all="ignore"):
            got = compare(computed(data, again=bool(number % 2)), expect(data, QUANTITIES))
        wrong = [f"{variant} {dtype} {entry.quantity}: {entry.detail}" for entry in got if not entry.passed]
        assert not wrong, wrong


@pytest.mark.parametrize(("variant", "dtype", "size"), [
    ("standard", "float32", 1e26), ("standard", "bfloat16", 1e26), ("torch", "float32", 1e26),
    ("zhang_torch", "float32", 1e37), ("x_transformers", "float32", 1e37), ("paper", "float32", 1e37),
    ("paper", "float32", 1e-37), ("paper", "bfloat16", 1e-30), ("paper", "float64", 1e-300),
    ("standard", "float64", 1e300),
])  # fmt: skip
def test_rows_at_the_ends_of_the_range(variant: str, dtype: str, size: float) -> None:
    """Their squares leave the range of the arithmetic. Beyond these sizes, which docs/exactness.md names, they may."""
    unit = np.random.default_rng(0).normal(size=(3, 4096)).clip(-3, 3)
    data = make(case("rows", (3, 4096), variant), variant, dtype)
    y, _, _ = recipe.forward(NUMPY, data.call, cast(size * unit, dtype), None, None, None, None, None)
    want = unit / np.sqrt(np.mean(unit**2, axis=-1, keepdims=True))
    assert np.allclose(y.astype("float64"), want, rtol=2e-2 if dtype == "bfloat16" else 1e-5)
