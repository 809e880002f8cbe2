"""The paper's table 1 and its gradient facts, run; the bound itself is derived in invariances.py."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from rmsnorm.numpy_impl.paper import derivation, invariances, norms
from rmsnorm.numpy_impl.paper.invariances import PROPERTIES, GradientFact, Invariance, gradient_facts, table
from rmsnorm.numpy_impl.paper.norms import layer_norm

SEEDS = (0, 1, 2)
# Table 1 of the paper, row by row and in its words: x invariant, - not.
TABLE_1 = """
BatchNorm   x - x x x -
WeightNorm  x - x - - -
LayerNorm   x x - x - x
RMSNorm     x - - x - x
pRMSNorm    x - - x - x
"""
# What a reader can see, and more than 10^6 times what rounding can do.
VISIBLE = 1e-4


def paper() -> dict[tuple[str, str], bool]:
    rows = [line.split() for line in TABLE_1.strip().splitlines()]
    return {(norm, prop): mark == "x" for norm, *marks in rows for prop, mark in zip(PROPERTIES, marks, strict=True)}


@pytest.mark.parametrize("delta", [0.7, 3.0, 1e-3])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_run_gives_table_1(seed: int, delta: float) -> None:
    cells = table(seed=seed, delta=delta)
    assert {(cell.norm, cell.property): cell.holds for cell in cells} == paper()
    assert [cell.expected for cell in cells] == list(paper().values())


@pytest.mark.parametrize("seed", SEEDS)
def test_every_dash_is_a_counter_example_that_shows(seed: int) -> None:
    dashes = [cell for cell in table(seed=seed) if not cell.expected]
    assert len(dashes) == 14
    assert min(cell.change for cell in dashes) > VISIBLE
    assert max(cell.bound for cell in dashes) < VISIBLE / 1e6


def test_the_bound_is_of_the_order_of_rounding() -> None:
    # K is about 200 roundings, kappa and the majorants about 10 each: 2 * 200 * 100 * 2^-53 is 4e-12, and a hundred
    # times that would no longer tell rounding from a float32 on the way (6e-8) by a wide margin.
    assert max(cell.bound for cell in table()) < 4e-10
    assert max(fact.bound for fact in gradient_facts()) < 4e-10


@pytest.mark.parametrize("delta", [0.5, 2.0**20])
def test_re_scaling_by_a_power_of_two_changes_no_bit(delta: float) -> None:
    # Such a scaling commutes with every rounding, away from the ends of the range: the bound can be 0 here.
    scaled = [cell for cell in table(delta=delta) if cell.expected and "re-scaling" in cell.property]
    assert len(scaled) == 14
    assert [cell.change for cell in scaled] == [0.0] * 14
    assert [fact.change for fact in gradient_facts(delta=delta)] == [0.0] * 12


@pytest.mark.parametrize("delta", [0.7, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_facts_hold(seed: int, delta: float) -> None:
    facts = gradient_facts(seed=seed, delta=delta)
    assert len(facts) == 2 * 2 * 3
    for fact in facts:
        matrix = fact.property == "weight matrix re-scaling" and fact.gradient == "dL/dW"
        assert fact.expected == (1 / delta if matrix else 1.0)
        assert fact.holds, fact
        # Elementwise |new - e old| <= bound e max|old|, so the fit <new, old> / <old, old> is off by at most
        # bound e max|old| ||old||_1 / ||old||^2 <= bound e sqrt(size), for ||old||_1 <= sqrt(size) ||old||.
        assert abs(fact.factor - fact.expected) <= fact.bound * fact.expected * np.sqrt(64 * 24)


def test_the_table_sees_a_norm_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With LayerNorm in the place of RMSNorm the cell that tells them apart flips, and no other."""

    def imposter(x: Any, scale: Any, bias: Any, **_: Any) -> Any:
        return layer_norm(x, scale, bias, eps=0.0)

    monkeypatch.setattr(invariances, "rms_norm", imposter)
    wrong = [cell for cell in table() if cell.norm == "RMSNorm" and cell.holds != cell.expected]
    assert [cell.property for cell in wrong] == ["weight matrix re-centring"]


@pytest.mark.parametrize("eps", [1e-5, 1.0])
def test_eps_breaks_re_scaling(monkeypatch: pytest.MonkeyPatch, eps: float) -> None:
    """The properties are those of eps = 0: any other is seen, however the bound is wide."""
    for name in ("rms_norm", "rms_norm_vjp"):
        original = getattr(invariances, name)
        monkeypatch.setattr(invariances, name, lambda *args, f=original, **options: f(*args, **{**options, "eps": eps}))
    broken = [cell for cell in table() if cell.norm == "RMSNorm" and cell.expected]
    assert not any(cell.holds for cell in broken)
    assert not any(fact.holds for fact in gradient_facts())


def test_not_a_number_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariances, "layer_norm", lambda x, *_, **__: np.full_like(x, np.nan))
    assert not any(cell.holds for cell in table() if cell.norm == "LayerNorm")


@pytest.mark.parametrize("run", [table, gradient_facts])
@pytest.mark.parametrize("delta", [0.0, -1.0, 1.0, float("inf"), float("nan")])
def test_a_delta_that_transforms_nothing_is_an_error(run: Any, delta: float) -> None:
    match = rf"{run.__name__}: delta is {delta}, expected a positive number other than 1; pass one such as 0\.7"
    with pytest.raises(ValueError, match=match):
        run(delta=delta)


def test_a_delta_that_is_no_number_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"table: delta is '2' \(str\), expected a number; pass one such as 0\.7"):
        table(delta="2")  # type: ignore[arg-type]


def test_results_are_plain_data() -> None:
    cell, fact = table()[0], gradient_facts()[0]
    assert isinstance(cell, Invariance)
    assert isinstance(fact, GradientFact)
    with pytest.raises(AttributeError, match="cannot assign to field 'holds'"):
        cell.holds = False  # type: ignore[misc]
    assert {type(value) for value in vars(cell).values()} == {str, bool, float}
    assert {type(value) for value in vars(fact).values()} == {str, bool, float}


@pytest.mark.parametrize("module", [derivation, invariances, norms], ids=lambda module: module.__name__)
def test_functions_are_documented_with_an_example(module: Any) -> None:
    functions = [value for value in map(vars(module).get, module.__all__) if inspect.isfunction(value)]
    assert functions
    for function in functions:
        parts = ("Args", "Returns", "Raises", "Source: ", ">>> ")
        assert all(part in function.__doc__ for part in parts), function.__name__
