"""What `check` asks beyond values and gradients: edges, equal bits in every batch, large calls, compiled functions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from mutants import MUTANTS
from torch_zoo import blocks_by_rows, mamba2, torch
from torch_zoo import standard as right

from rmsnorm.identify import identify
from rmsnorm.parity import beyond, check
from rmsnorm.parity.cases import Case
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import open_target

LARGE = {"many rows", "long sequences", "many, 3 axes", "very wide", "one sign"}  # mistakes that few rows do not show
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("few_circumstances")]


def rows_from(first: int, change: Any) -> Any:
    def norm(x: Any, weight: Any) -> Any:
        y = right(x, weight)
        if x.ndim < 2 or not x.numel():
            return y
        flat = y.reshape(-1, x.shape[-1])
        return torch.cat([flat[:first], change(flat[first:])]).reshape(x.shape)

    return norm


def test_what_is_right_passes_in_every_dtype() -> None:
    report = check(right, batch_invariant=True, edges=True)
    assert report.passed, report.text
    assert {record.quantity for record in report.run.records if record.case == "batches"} == {"y", "dx", "dscale"}
    compared = {(record.case, record.dtype, record.quantity) for record in report.run.records}
    assert set(product(LARGE, ("float16", "bfloat16", "float32"), ("y", "dscale"))) <= compared
    assert {case for mutant in MUTANTS for case, _ in mutant.pairs} >= LARGE, "each with a mutant that it rejects"


def test_a_statistic_that_depends_on_the_number_of_rows() -> None:
    """It is right in every case, so that `identify` names the variant, and says it beside it."""
    identity = identify(blocks_by_rows)
    assert (identity.recognised, identity["batches"]) == (True, "differ")
    assert "y of a row depends on how many rows there are: from 257 rows on, " in identity.text.replace(
        "\n" + 20 * " ", " "
    )
    report = check(blocks_by_rows, dtypes="float32", batch_invariant=True)
    assert not report.passed
    assert {record.case for record in report.run.failures} == {beyond.BATCHES}
    assert "'batches' f32 y: y of a row depends on how many rows there are: from 256 rows on, " in report.text


def test_a_result_that_differs_from_call_to_call() -> None:
    calls = iter(range(10**6))

    class Unsteady(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, dw: Any) -> Any:
            return dw * (1 + next(calls) % 2 * 2.0**-23)

    function = open_target(lambda x, weight: right(x, Unsteady.apply(weight)), framework="torch")
    report = check(function, dtypes="float32", batch_invariant=True)
    sentences = [record.detail for record in report.run.failures if record.case == "batches"]
    assert len(sentences) == 1
    assert sentences[0].startswith("dscale is not the same in two equal calls: ")


def test_a_refusal_is_an_edge() -> None:
    def no_columns(x: Any, weight: Any) -> Any:
        if not x.shape[-1]:
            raise RuntimeError("there is nothing to divide")
        return right(x, weight)

    report = check(no_columns, dtypes=("float32", "bfloat16"), gradients=False)
    assert report.passed
    edge = (
        "edge: 'no columns': x of shape (4, 0) is refused: RuntimeError: there is nothing to divide; "
        "it fails with edges=True"
    )
    for text in (report.text, report.details):
        assert edge in " ".join(text.split())
    strict = check(no_columns, dtypes="float32", gradients=False, edges=True)
    assert [(record.case, record.quantity) for record in strict.run.failures] == [("no columns", "y")]


def test_more_elements_than_an_index_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2^16 in the place of 2^31."""
    monkeypatch.setattr(beyond, "ELEMENTS", 2**16)
    options: dict[str, Any] = {"dtypes": "float32", "gradients": False, "large": True}
    assert check(right, **options).passed
    wrong = rows_from(1000, lambda y: y + (len(y) < 2000))
    report = check(wrong, **options)
    (detail,) = [record.detail for record in report.run.failures if record.case == beyond.LARGE.name]
    assert detail.startswith("after ")


def test_every_question_is_asked_of_groups_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group of a row has a gain of its own."""
    monkeypatch.setattr(beyond, "ELEMENTS", 2**16)
    variant = Variant.get("llama").replace(gate_position="before")
    report = check(mamba2, variant, dtypes="bfloat16", group_size=4, batch_invariant=True, large=True)
    assert report.passed, report.text
    assert {beyond.BATCHES, beyond.LARGE.name} <= {record.case for record in report.run.records}
    assert identify(mamba2)["batches"] == "the same"


def test_what_is_compiled_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of this target makes another function: one whose blocks depend on the number of rows."""
    target = open_target(lambda x, weight: right(x, weight), framework="torch")
    changed = replace(open_target(lambda x, weight: blocks_by_rows(x, weight), framework="torch"), resized=None)
    monkeypatch.setattr(type(target), "compiled", property(lambda self: changed))
    more = beyond.Beyond(target, Variant.get("standard"), gradients=False, compiled=True)
    (verdict,) = more.batches()
    assert verdict.detail.startswith("compiled: y of a row depends on how many rows there are: from 256 rows on, ")
    assert all(entry.passed for entry in replace(more, compiled=False).batches())


def test_repeated_rows_are_those_of_the_golden() -> None:
    from rmsnorm.parity.cases import make
    from rmsnorm.parity.judge import expect

    case = Case("few", (12, 2, 5), ("llama",), "", repeats=(4, 1, 1))
    data = make(case, "llama", "float32")
    repeated = expect(data)
    plain = expect(type(data)(**{**vars(data), "once": None}))
    assert repeated.keys() == plain.keys()
    for name, want in plain.items():
        assert np.array_equal(repeated[name].value, want.value), name
        np.testing.assert_allclose(repeated[name].unit, want.unit, rtol=1e-12)
        assert repeated[name].bound == want.bound
