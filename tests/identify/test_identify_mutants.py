"""Every wrong RMSNorm of the kit is named by its defect, or by the field in which it is another variant."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from mutants import FAULTS, MUTANTS, WithGradients

from rmsnorm import Variant
from rmsnorm.identify import Target, identify
from rmsnorm.parity.cases import CASES, make
from rmsnorm.parity.equations import candidate
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

_PLAIN = make(CASES[0], "standard", "float64")


def target_of(fault, case_name, variant_name):
    """The mutant as a target of any width and dtype, with the options of its case."""
    case = next(case for case in CASES if case.name == case_name)
    variant = Variant.get(variant_name)
    partial = case.options.get("partial")
    if partial is not None:
        variant = variant.replace(partial=partial)
    if "eps" in case.options:
        variant = variant.replace(eps=case.options["eps"])
    if case.gate:
        variant = variant.replace(gate_function=case.gate[0], gate_position=case.gate[1])
    if case.residual_rounding:
        variant = variant.replace(residual_rounding=case.residual_rounding)

    changes = FAULTS[fault].changes if fault else {}

    def data(arrays, dy=None):
        x, scale, bias = (arrays.get(argument) for argument in ("x", "scale", "bias"))
        spec = [None if p is None else Spec(p.shape, p.dtype.name) for p in (scale, bias)]
        others = {name: arrays.get(name) for name in ("residual", "gate")}
        specs = {name: None if a is None else Spec(a.shape, a.dtype.name) for name, a in others.items()}
        call = resolve("mutant", Spec(x.shape, x.dtype.name), *spec, variant=variant, **specs)
        return dataclasses.replace(
            _PLAIN, variant=variant, call=call, x=x, scale=scale, bias=bias, mask=arrays.get("mask"), **others,
            dy=np.zeros_like(x) if dy is None else dy, dh=None, tangents=(None, None, None), axis=-1,
            feature_axis=None,
        )  # fmt: skip

    def function(arrays):
        y = candidate(data(arrays), changes).results["y"][0]
        if fault == "writes x":
            arrays["x"][...] = 0
        return y

    def derivatives(arrays, dy):
        results = candidate(data(arrays, dy), changes).results
        return {
            argument: results[name][0]
            for argument, name in (
                ("x", "dx"),
                ("scale", "dscale"),
                ("bias", "dbias"),
                ("residual", "dresidual"),
                ("gate", "dgate"),
            )
            if name in results
        }

    arguments = ["scale"]
    if case.bias or variant.bias:
        arguments.append("bias")
    asked = {"mask": case.mask, "residual": case.residual, "gate": case.gate}
    arguments += [name for name, present in asked.items() if present]
    return variant, Target(fault or "honest", "numpy", WithGradients(derivatives), function, tuple(arguments))


# what shows with more rows or columns than identify asks for is seen by `check`
LARGE = {case.name for case in CASES if case.is_large}
PAIRS = [(mutant.fault, case, variant) for mutant in MUTANTS for case, variant in mutant.pairs if case not in LARGE]
SAID = [pair for pair in PAIRS if FAULTS[pair[0]].said and pair[1] != "partial 0.001"]  # there k is 1 either way


def different(pairs):
    """One of those that are the same target, as the shape of a case is none of its fields."""
    found = {}
    for fault, case, name in pairs:
        variant, target = target_of(fault, case, name)
        found.setdefault((fault, variant, target.arguments), (fault, case, name))
    return sorted(found.values())


@pytest.mark.parametrize(("fault", "case", "name"), different(SAID), ids=str)
def test_a_mutant_is_named(fault, case, name):
    said = FAULTS[fault].said
    variant, target = target_of(fault, case, name)
    identity = identify(target, width=48)
    if isinstance(said, tuple):
        finding, value = said
        assert value in str(identity[finding]), identity.text
        return
    sentences = [*identity.defects, *identity.differences(variant)]
    other, own = (
        ("after_scale", "before_scale") if variant.rounding == "before_scale" else ("before_scale", "after_scale")
    )
    place, own_place = ("inside", "outside") if variant.eps_position == "outside" else ("outside", "inside")
    want = said.format(name=variant.name, other=other, own=own, place=place, own_place=own_place, eps=variant.eps)
    assert any(want in sentence for sentence in sentences), f"{want!r} is not among {sentences}\n{identity.text}"


@pytest.mark.parametrize(("fault", "case", "name"), different(("", *pair[1:]) for pair in PAIRS), ids=str)
def test_without_its_mistake_it_is_recognised(fault, case, name):
    variant, target = target_of(fault, case, name)
    identity = identify(target, width=48)
    assert identity.recognised, identity.text
    if variant.rounding == "input_dtype":  # the kit's candidate rounds once, which such a variant leaves free
        variant = variant.replace(rounding=identity.variant.rounding)
    if case == "partial 0.001":
        variant = variant.replace(partial=identity.variant.partial)  # k is 1 at every width that is asked for
    assert not identity.differences(variant.replace(bias=identity.variant.bias)), identity.text
