"""Every call of the table, in every way, against the golden: values, dtypes, shapes and first derivatives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import calls
import numpy as np
import pytest
from frameworks import way as way_of

from rmsnorm.engines import refusal
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.judge import compare
from rmsnorm.specification import dtypes

PARTS = 6
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),  # forward_ad's own
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # from inside the compilers
]


def failures(way: Any, rows: Iterable[calls.Row], engine: str) -> list[str]:
    """What differs from the golden, by more than the judge allows, or by a bit where the bits are promised."""
    failed = []
    for row in rows:
        data, expected = calls.asked(row)
        name = calls.name_of(row)
        if way.name == "fast" or not way.has_tangents:
            expected = {quantity: want for quantity, want in expected.items() if quantity != "jvp"}
        try:
            outcome = way.outcome(data)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}"[:300])
            continue
        exact = in_bits(way, data, engine)
        for verdict in compare(outcome, expected):
            if not verdict.passed or (verdict.quantity == "y" and exact and verdict.max_ulp > 0):
                failed.append(f"{name}: {verdict.quantity} {verdict.detail or verdict.max_ulp}")
        if data.residual is not None:
            want, got = add(data.x, data.residual, data.call.sum_dtype), outcome.results["h"][0]
            if got.dtype != want.dtype or not np.array_equal(got, want, equal_nan=True):
                failed.append(f"{name}: x + residual")
    return failed


def in_bits(way: Any, data: Any, engine: str) -> bool:
    """Whether y has the golden's bits: a kernel computes it, and nothing is multiplied by a gate.

    Where rho may be eps alone, such as 0.1, many h / 0.1 are next to ties of the format that they are rounded to.
    """
    position, is_small = data.variant.eps_position, any(kind in data.name for kind in ("tiny", "clamped"))
    if is_small or (position != "inside" and data.call.eps > 0.01):
        return False
    if data.residual is not None and data.residual.dtype != data.x.dtype:  # which not every framework has a kernel for
        return False
    is_kernel = engine == "kernels" and refusal(data.call.in_rows, "cpu", calls.formats(data)) is None
    return is_kernel and data.gate is None and not data.call.exact_sum and way.name in ("fast", "torch", "tf", "flax")


def hold(failed: list[str]) -> None:
    assert not failed, "\n".join([f"{len(failed)} failed:", *failed[:30]])


@pytest.mark.parametrize("way", ["fast", "torch", "torch.func", "tf"], indirect=True)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call(way: Any, part: int, engine: str) -> None:
    if (way.name, engine) in (("fast", "recipe"), ("torch.func", "kernels")):
        pytest.skip("the golden has no recipe, and transforms have no kernel")
    hold(failures(way, calls.rows()[part::PARTS], engine))


@pytest.mark.parametrize("way", ["flax", "jit"], indirect=True)
def test_calls_of_jax(way: Any, engine: str) -> None:
    first = {"flax": 0, "jit": 1}[way.name] + 2 * (engine == "recipe")
    hold(failures(way, calls.rows(few=True)[first::6], engine))


@pytest.mark.parametrize("way", ["aot_eager", "inductor", "graph", "graph of unknown sizes", "XLA",
                                 "XLA of unknown sizes"], indirect=True)  # fmt: skip
def test_compiled_calls(way: Any) -> None:
    """Each way compiles other rows of the small table."""
    first, step = {"aot_eager": (0, 9), "inductor": (1, 14), "graph": (2, 9), "graph of unknown sizes": (3, 9),
                   "XLA": (4, 9), "XLA of unknown sizes": (5, 14)}[way.name]  # fmt: skip
    hold(failures(way, calls.rows(few=True)[first::step], "recipe"))


def test_the_golden_reads_its_arguments_alone(framework: Any) -> None:
    """The judge sees an eps of 1e-5 in place of 1e-6, a doubled gain, and an argument that is written to."""
    data, expected = calls.asked({"variant": "standard", "x": "float32"})
    for wrong in ({"variant": data.variant.replace(eps=1e-5)}, {"scale": 2 * data.scale}):
        outcome = framework.outcome(replace(data, **wrong, given={}))
        assert not all(verdict.passed for verdict in compare(outcome, expected))


def test_the_table_has_what_it_is_said_to_have() -> None:
    """Every preset in every dtype, and results of 16 bits by the thousand."""
    seen = {(row["variant"], row["x"]) for row in calls.rows()}
    assert {(variant, dtype) for variant in calls.VARIANTS for dtype in dtypes.FLOATS} <= seen
    assert way_of("numpy").outcome(calls.asked(calls.rows()[0])[0]).touched == ()
