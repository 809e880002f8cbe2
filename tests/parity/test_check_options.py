"""Options of a function and edges of x: a wrong answer in one of them fails `check`, with no option of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

from rmsnorm.parity import check, fitting, judging, report
from rmsnorm.parity.circumstances import is_circumstance
from rmsnorm.parity.fitting import options_of
from rmsnorm.targets import open_target

OPTIONS: dict[str, Any] = {"framework": "numpy", "dtypes": "float32"}


def computed(h: Any, weight: Any, gate: Any, mask: Any, eps_outside: bool = False, of_all: bool = False) -> Any:
    wide = h.astype(np.float64)
    counted = np.broadcast_to(True if mask is None else mask, h.shape)
    count = np.maximum(h.shape[-1] if of_all else counted.sum(-1, keepdims=True), 1)
    q = np.where(counted, wide * wide, 0.0).sum(-1, keepdims=True) / count
    y = wide / (np.sqrt(q) + 1e-6 if eps_outside else np.sqrt(q + 1e-6)) * weight.astype(np.float64)
    if gate is not None:
        z = gate.astype(np.float64)
        y = y * z / (1 + np.exp(-z))
    return y.astype(h.dtype)


def right(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None, **wrong: Any) -> Any:
    h = x if residual is None else x + residual
    y = computed(h, weight, gate, mask, **wrong)
    return y if residual is None else (y, h)


def of_mask(x: Any, weight: Any, mask: Any = None) -> Any:
    return right(x, weight, mask)


def only_masked(**wrong: Any) -> Callable[..., Any]:
    return lambda x, weight, mask=None: right(x, weight, mask, **(wrong if mask is not None else {}))


def both(x: Any, weight: Any, mask: Any = None, residual: Any = None) -> Any:
    return right(x, weight, mask if residual is None else None, residual)


def gate_or_mask(x: Any, weight: Any, mask: Any = None, gate: Any = None) -> Any:
    return right(x, weight, mask, None, gate if mask is None else None)


def two_of_three(x: Any, weight: Any, mask: Any = None, residual: Any = None, gate: Any = None) -> Any:
    every = not any(option is None for option in (mask, residual, gate))
    return right(x, weight, None if every else mask, residual, gate)


def dense_mask(x: Any, weight: Any, mask: Any = None) -> Any:
    strides = None if mask is None else np.empty(mask.shape, bool).strides
    return right(x, weight, mask if mask is None else np.lib.stride_tricks.as_strided(mask, mask.shape, strides))


WRONG: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "mask ignored": (lambda x, weight, mask=None: right(x, weight), {"mask", "mask of columns"}),
    "n for the count": (only_masked(of_all=True), {"mask", "mask of columns"}),
    "eps outside beside a mask": (only_masked(eps_outside=True), {"mask", "mask of columns"}),
    "residual ignored": (lambda x, weight, residual=None: right(x, weight), {"residual"}),
    "gate ignored": (lambda x, weight, gate=None: right(x, weight), {"gate"}),
    "mask ignored beside a residual": (both, {"mask, residual"}),
    "gate ignored beside a mask": (gate_or_mask, {"gate, mask"}),
    "mask ignored beside both": (two_of_three, {"gate, mask, residual"}),
    "the memory of a mask": (dense_mask, set()),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_wrong_option_is_in_the_cases_with_it(name: str, dtype: str) -> None:
    function, cases = WRONG[name]
    result = check(function, framework="numpy", dtypes=dtype)
    failed = {record.case for record in result.run.failures}
    assert {case for case in failed if not is_circumstance(case)} == cases, result.text
    assert {options_of(case) for case in failed if is_circumstance(case)} <= set(map(options_of, cases or {"mask"}))
    assert failed, result.text


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_right_options_hold_and_the_report_counts_them(dtype: str, tmp_path: Path) -> None:
    result = check(right, framework="numpy", dtypes=dtype)
    assert result.passed, result.text
    counts = report.options(result.run)  # of cases and of circumstances
    assert list(counts) == fitting.option_sets(fitting.OPTIONS)
    assert min(counts.values()) > 1
    line = next(line for line in result.text.splitlines() if line.startswith("options: "))
    start = (
        f"options: of {len(result.run.records)} comparisons {counts['gate']} with gate, {counts['mask']} with mask, "
    )
    assert line.startswith(start)
    report.write_json([result.run], tmp_path / "a.json")
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    assert backend["options"] == counts


def test_an_option_in_no_comparison_and_a_case_that_is_lost_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(open_target(of_mask, framework="numpy"), rank=1)
    result = check(target, dtypes="float32")
    assert result.passed  # no case has one axis and a mask, and some circumstances do
    assert report.options(result.run)["mask"]

    every = fitting.applicable_cases
    monkeypatch.setattr(judging, "applicable_cases", lambda *args, **options: list(every(*args, **options))[1:])
    failures = check(of_mask, **OPTIONS).run.failures
    assert [(record.case, record.detail) for record in failures] == [("rows", "no result came back")]


def written_to(x: Any, y: Any) -> Any:
    x[...] = 0
    return y


EDGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "dtype": (lambda x, y: y.astype(np.float64), "one element"),
    "shape": (lambda x, y: y.reshape(-1), "one element"),
    "input": (written_to, "one element"),
    "type": (lambda x, y: None, "no rows"),
    "dtype of empty x": (lambda x, y: y.astype(np.float64), "no columns"),
    "shape of a long row": (lambda x, y: y.reshape(-1), "very wide"),
}
SHAPES = {"one element": (1, 1), "no rows": (0, 16), "no columns": (4, 0), "very wide": (2, 66001)}


@pytest.mark.parametrize("name", EDGES)
def test_a_wrong_answer_on_an_edge_is_no_refusal(name: str) -> None:
    change, case = EDGES[name]

    def norm(x: Any, weight: Any) -> Any:
        y = right(x, weight)
        return change(x, y) if x.shape == SHAPES[case] else y

    result = check(norm, **OPTIONS)
    assert case in {record.case for record in result.run.failures}, result.text
    assert not [skip for skip in result.run.skipped if skip.edge]


@pytest.mark.costly
def test_a_wrong_answer_without_a_gate_does_not_make_the_gate_a_must() -> None:
    def norm(x: Any, weight: Any, gate: Any = None) -> Any:
        y = right(x, weight, None, None, gate)
        return y if gate is not None else y[..., :1]

    assert "rows" in {record.case for record in check(norm, **OPTIONS).run.failures}


@pytest.mark.costly
@pytest.mark.torch
def test_the_gradient_of_a_residual_counts() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")

    def norm(x: Any, weight: Any, residual: Any = None) -> Any:
        h = x if residual is None else x + residual.detach()
        y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight
        return y if residual is None else (y, h)

    failures = check(norm, dtypes="float32").run.failures
    assert {record.quantity for record in failures} == {"dresidual"}
