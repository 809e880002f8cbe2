"""What `check` asks beyond values and gradients: edges, equal bits in every batch, large calls, compiled functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch_zoo import blocks_by_rows, mamba2, torch
from torch_zoo import standard as right

from rmsnorm.identify import identify
from rmsnorm.parity import beyond, check
from rmsnorm.parity.cases import Case, make
from rmsnorm.parity.judge import expect
from rmsnorm.specification.variants import Variant
from rmsnorm.targets import open_target

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
    report = check(right, batch_invariant=True)
    assert report.passed, report.text
    assert {record.quantity for record in report.run.records if record.case == "batches"} == {"y", "dx", "dscale"}
    assert {record.dtype for record in report.run.records} == {"float16", "bfloat16", "float32"}


def test_a_statistic_that_depends_on_the_number_of_rows() -> None:
    """It is right in every case, so that `identify` names the variant."""
    assert identify(blocks_by_rows).recognised
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
    def not_wide(x: Any, weight: Any) -> Any:
        if x.shape[-1] > 10000:
            raise RuntimeError("there is no room")
        return right(x, weight)

    report = check(not_wide, dtypes=("float32", "bfloat16"), gradients=False)
    assert report.passed
    refused = "is refused: RuntimeError: there is no room; it fails with extremes=True"
    for text in (report.text, report.details):
        assert "edge: '66001': x of shape (" in " ".join(text.split())
        assert f"66001) {refused}" in " ".join(text.split())
    strict = check(not_wide, dtypes="float32", gradients=False, extremes=True)
    assert strict.run.refusals
    assert not strict.passed


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


def test_what_is_compiled_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of this target makes another function: it is wrong for x of six axes, and depends on the batch."""

    def wrong(x: Any, weight: Any) -> Any:
        return right(x, weight) * 2 if x.ndim == 6 else blocks_by_rows(x, weight)

    target = open_target(lambda x, weight: right(x, weight), framework="torch")
    changed = replace(open_target(wrong, framework="torch"), resized=None)
    monkeypatch.setattr(type(target), "compiled", property(lambda self: changed))
    options: dict[str, Any] = {"dtypes": "float32", "gradients": False, "batch_invariant": True}
    assert check(target, **options).passed
    failures = check(target, **options, compiled=True).run.failures
    assert {"batches", "6 axes"} == {"6 axes" if "6 axes" in failure.case else failure.case for failure in failures}
    assert all(failure.detail.startswith("compiled: ") for failure in failures if failure.case != "batches")


def test_repeated_rows_are_those_of_the_golden() -> None:
    case = Case("few", (12, 2, 5), ("llama",), "", repeats=(4, 1, 1))
    data = make(case, "llama", "float32")
    repeated = expect(data)
    plain = expect(type(data)(**{**vars(data), "once": None}))
    assert repeated.keys() == plain.keys()
    for name, want in plain.items():
        assert np.array_equal(repeated[name].value, want.value), name
        for end in ("unit", "low", "high"):
            np.testing.assert_allclose(getattr(repeated[name], end), getattr(want, end), rtol=1e-12)
        assert repeated[name].bound == want.bound
