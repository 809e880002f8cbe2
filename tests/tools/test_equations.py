"""Every wrong equation is rejected by the kit, named by `identify`, and refused by the vectors; the right ones hold."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
from wrong_equations import WRONG, data_of
from zoo import WithGradients

from rmsnorm import Variant
from rmsnorm.identify import Target, identify
from rmsnorm.parity import static
from rmsnorm.parity.equations import EQUATIONS, candidate
from rmsnorm.parity.judge import judge
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

NO_CHANGES: dict[str, Any] = {}


def failures(data: Any, changes: Any) -> list[Any]:
    return [verdict for verdict in judge(lambda data: candidate(data, changes), data) if not verdict.passed]


@cache
def is_accepted_without_a_mistake(call: str, dtype: str) -> bool:
    return not failures(data_of(call, dtype), NO_CHANGES)


@pytest.mark.parametrize("name", WRONG)
def test_the_kit_rejects_it_wherever_it_shows(name: str) -> None:
    wrong = WRONG[name]
    assert {*wrong.changes} <= {*EQUATIONS}
    rejected = set()
    for call in wrong.calls.split("; "):
        for dtype in wrong.dtypes:
            assert is_accepted_without_a_mistake(call, dtype)
            failed = failures(data_of(call, dtype), wrong.changes)
            rejected |= {call, dtype} if failed else set()
            assert not any("Error" in verdict.detail for verdict in failed), failed[0].detail
    assert {*wrong.calls.split("; "), *wrong.dtypes} == rejected, "in each call, and of each dtype"


def target_of(call: str, changes: Any) -> tuple[Variant, Target]:
    """The candidate as a target of any width and dtype, with the options of a call."""
    plain = data_of(call, "float64")
    variant, names = plain.variant, ("x", "scale", "bias", "residual", "gate")

    def data(arrays: Any, dy: Any = None) -> Any:
        named = {name: arrays.get(name) for name in names}
        specs = {name: None if a is None else Spec(a.shape, a.dtype.name) for name, a in named.items()}
        return dataclasses.replace(
            plain, call=resolve("candidate", variant=variant, **specs), **named, mask=arrays.get("mask"),
            dy=np.zeros_like(named["x"]) if dy is None else dy, dh=None, tangents=(None, None, None), axis=-1,
            feature_axis=None,
        )  # fmt: skip

    def function(arrays: Any) -> Any:
        outcome = candidate(data(arrays), changes)
        if outcome.touched:
            arrays["x"][...] = 0
        return outcome.results["y"][0]

    def derivatives(arrays: Any, dy: Any) -> Any:
        results = candidate(data(arrays, dy), changes).results
        return {name: results["d" + name][0] for name in names if "d" + name in results}

    arguments = tuple(name for name in (*names[1:], "mask") if getattr(plain, name) is not None)
    return variant, Target("candidate", "numpy", WithGradients(derivatives), function, arguments)


@pytest.mark.parametrize("name", [name for name, wrong in WRONG.items() if wrong.says])
def test_identify_names_it(name: str) -> None:
    says, call = WRONG[name].says, WRONG[name].calls.partition("; ")[0]
    variant, target = target_of(call, WRONG[name].changes)
    identity = identify(target, width=48)
    sentences = [identity.headline, *identity.defects, *identity.differences(variant)]
    want = says.format(
        name=variant.name, eps=variant.eps, place="inside" if variant.eps_position == "outside" else "outside",
        rounding="after_scale" if variant.rounding == "before_scale" else "before_scale",
    )  # fmt: skip
    assert any(want in sentence for sentence in sentences), f"{want!r} is not among {sentences}\n{identity.text}"


HONEST = (
    "rows gemma", "eps 0.1 zhang_torch", "two axes equinox", "partial 0.3 zhang_tf", "mask standard",
    "residual, exact sum llama", "gate of x llama", "sigmoid gate standard",
)  # fmt: skip


@pytest.mark.parametrize("call", HONEST)
def test_identify_recognises_the_same_code_without_a_mistake(call: str) -> None:
    variant, target = target_of(call, NO_CHANGES)
    identity = identify(target, width=48)
    assert identity.recognised, identity.text
    if variant.rounding == "input_dtype":  # the candidate rounds once, which such a variant leaves free
        variant = variant.replace(rounding=identity.variant.rounding)
    assert not identity.differences(variant.replace(bias=identity.variant.bias)), identity.text


@pytest.mark.parametrize("dtype", static.TYPES)
def test_the_vectors_refuse_it(dtype: str) -> None:
    """Those of a gate, a mask, large calls and the like have no call there."""
    cases = [
        static.data_of(test, number, Variant.get(variant), dtype)
        for variant in ("llama", "gemma")
        for number, test in enumerate(static.TESTS, start=1)
        if not test.hashed and test.parameters != dtype
    ]
    outputs = [static.outputs_of(data) for data in cases]

    def is_refused(data: Any, wanted: Any, changes: Any) -> bool:
        results = candidate(data, changes).results
        for quantity in wanted.keys() & results.keys():
            output = wanted[quantity]
            got, low, high = (a.astype(np.float64) for a in (results[quantity][0], output.low, output.high))
            if not np.all(((low <= got) & (got <= high)) | (np.isnan(got) & np.isnan(low))):
                return True
        return False

    def are_refused(changes: Any) -> bool:
        return any(is_refused(data, wanted, changes) for data, wanted in zip(cases, outputs, strict=True))

    assert not are_refused(NO_CHANGES)
    shown = {name for name, wrong in WRONG.items() if dtype in wrong.vectors}
    assert len(shown) > 12
    assert [name for name in shown if not are_refused(WRONG[name].changes)] == []
