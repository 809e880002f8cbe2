"""Functions that are wrong as kernels of real systems were: `check` or `identify` names what is wrong with each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch_zoo import Fused, blocks_by_rows, fused, mamba2, torch
from torch_zoo import standard as right

from rmsnorm.identify import identify
from rmsnorm.parity import beyond, check
from rmsnorm.parity.cases import Case
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


class NarrowSum(torch.autograd.Function):
    """dscale is added up one row after the other, in the dtype of the gain."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return right(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(right(x, weight), x, dy)
        terms = (right(x.detach().float(), torch.ones_like(weight)) * dy.float()).to(weight.dtype)
        total = torch.zeros_like(weight)
        for row in terms.reshape(-1, len(weight)) if terms.numel() else ():
            total = total + row
        return dx, total


def gain_of_20000(x: Any, weight: Any) -> Any:
    return right(x, torch.cat([weight[:20000], torch.ones_like(weight[20000:])]))


def first_of_300(x: Any, weight: Any) -> Any:
    y = right(x, weight)
    return y if x.ndim < 2 else torch.cat([y[:300], 1.01 * y[300:]])


WRONG = {
    "rows from 8192 on": (rows_from(8192, lambda y: 2 * y), "float32", "'many rows' f32 y: at"),
    "rows from 65535 on": (rows_from(65535, torch.zeros_like), "float32", "'many rows' f32 y: at"),
    "columns from 20000 on": (gain_of_20000, "float32", "'very wide' f32 y: at"),
    "the first index from 300 on": (first_of_300, "float32", "'many, 3 axes' f32 y: at"),
    "dscale in f16": (NarrowSum.apply, "float16", "'one sign' f16 dscale: at"),
    "dscale in bf16": (NarrowSum.apply, "bfloat16", "'one sign' bf16 dscale: at"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sample(3)
def test_what_few_rows_do_not_show(name: str) -> None:
    function, dtype, line = WRONG[name]
    report = check(lambda x, weight: function(x, weight), framework="torch", dtypes=dtype)
    assert any(text.strip().startswith(line) for text in report.details.splitlines()), report.details


def test_what_is_right_passes_in_every_dtype() -> None:
    report = check(right, batch_invariant=True, edges=True)
    assert report.passed, report.text
    assert {record.quantity for record in report.run.records if record.case == "batches"} == {"y", "dx", "dscale"}


def test_a_statistic_that_depends_on_the_number_of_rows() -> None:
    """It is right in every case, so that `identify` names the variant, and says it beside it."""
    identity = identify(blocks_by_rows)
    assert (identity.recognised, identity["batches"]) == (True, "differ")
    assert "y of a row depends on how many rows there are: from 257 rows on, " in identity.text.replace(
        "\n" + 20 * " ", " "
    )
    assert check(blocks_by_rows, dtypes="float32").passed
    report = check(blocks_by_rows, dtypes="float32", batch_invariant=True)
    assert not report.passed
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

    report = check(lambda x, weight: right(x, Unsteady.apply(weight)), framework="torch", batch_invariant=True)
    sentences = [record.detail for record in report.run.failures if record.case == "batches"]
    assert len(sentences) == 1
    assert sentences[0].startswith("dscale is not the same in two equal calls: ")


def test_a_refusal_is_an_edge() -> None:
    def no_columns(x: Any, weight: Any) -> Any:
        if not x.shape[-1]:
            raise RuntimeError("there is nothing to divide")
        return right(x, weight)

    report = check(no_columns, dtypes=("float32", "bfloat16"))
    assert report.passed
    edge = (
        "edge: 'no columns': x of shape (4, 0) is refused: RuntimeError: there is nothing to divide; "
        "it fails with edges=True"
    )
    for text in (report.text, report.details):
        assert edge in " ".join(text.split())
    strict = check(no_columns, dtypes="float32", edges=True)
    assert [(record.case, record.quantity) for record in strict.run.failures] == [("no columns", "y")]
    assert not check(lambda x, weight: right(x, weight) + (x.shape[0] == 1), framework="torch", dtypes="float32").passed


def test_more_elements_than_an_index_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2^16 in the place of 2^31."""
    monkeypatch.setattr(beyond, "ELEMENTS", 2**16)
    assert check(right, dtypes="float32", large=True).passed
    wrong = rows_from(1000, lambda y: y + (len(y) < 2000))
    report = check(wrong, dtypes="float32", large=True)
    (detail,) = [record.detail for record in report.run.failures if record.case == beyond.LARGE.name]
    assert detail.startswith("after ")


MAMBA = Variant.get("llama").replace(gate_position="before")


@pytest.mark.parametrize("question", ["batch_invariant", "large"])
def test_every_question_is_asked_of_groups_and_gates(question: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beyond, "ELEMENTS", 2**16)
    options: dict[str, Any] = {"dtypes": "bfloat16", "group_size": 4, "gradients": question != "large"}
    name = {"batch_invariant": beyond.BATCHES, "large": beyond.LARGE.name}[question]
    report = check(mamba2, MAMBA, **options, **{question: True})
    assert report.passed, report.text
    assert name in {record.case for record in report.run.records}

    if question == "batch_invariant":  # each group of a row has a gain of its own
        assert identify(mamba2)["batches"] == "the same"


@pytest.mark.parametrize("target", [fused, Fused])
def test_what_must_have_a_residual_is_asked_with_one(target: Any) -> None:
    identity = identify(target)
    assert identity.recognised, identity.text
    assert (identity["residual"], identity["residual_rounding"], identity["gradients"]) == ("added", "before", "agree")
    report = check(target, dtypes="bfloat16")
    assert report.passed, report.text
    assert {"rows", "residual", "odd"} <= {record.case for record in report.run.records}
    assert not check(
        lambda x, residual, weight: fused(x, 2 * residual, weight), framework="torch", dtypes="float32"
    ).passed


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
