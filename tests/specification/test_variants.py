"""The presets against a second copy of their table; and the properties of a Variant."""

from __future__ import annotations

import dataclasses
import json
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest

from rmsnorm import PRESETS, Variant
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve
from rmsnorm.specification.variants import Preset, derive

# eps, its place, rounding, offset, bias, rounding of partial, dtype of y, name of the gain
TABLE = {
    "standard": (1e-6, "inside", "after_scale", 0, False, "ceil", "x", "scale"),
    "paper": (0, "inside", "after_scale", 0, False, "ceil", "x", "g"),
    "zhang_torch": (1e-8, "outside", "input_dtype", 0, False, "floor", "promote", "scale"),
    "zhang_tf": (1e-8, "inside", "input_dtype", 0, False, "floor", "x", "scale"),
    "theano": (1e-5, "inside", "input_dtype", 0, False, "ceil", "x", "s"),
    "nematus": (1e-5, "inside", "input_dtype", 0, False, "ceil", "x", "scale"),
    "lasagne": (1e-6, "inside", "input_dtype", 0, True, "ceil", "x", "g"),
    "zero": (1e-8, "inside", "input_dtype", 0, False, "ceil", "x", "scale"),
    "llama": (1e-6, "inside", "before_scale", 0, False, "ceil", "promote", "weight"),
    "gemma": (1e-6, "inside", "after_scale", 1, False, "ceil", "x", "weight"),
    "gemma4": (1e-6, "inside", "after_scale", 0, False, "ceil", "x", "weight"),
    "t5": (1e-6, "inside", "before_scale", 0, False, "ceil", "half_scale", "weight"),
    "olmo2": (1e-6, "inside", "after_scale", 0, False, "ceil", "x", "weight"),
    "torch": (None, "inside", "after_scale", 0, False, "ceil", "x", "weight"),
    "keras": (1e-6, "inside", "after_scale", 0, False, "ceil", "x", "scale"),
    "flax": (1e-6, "inside", "after_scale", 0, False, "ceil", "promote", "scale"),
    "equinox": (1e-5, "inside", "after_scale", 0, True, "ceil", "x", "weight"),
    "onnx": (1e-5, "inside", "before_scale", 0, False, "ceil", "scale", "scale"),
    "apex": (1e-5, "inside", "before_scale", 0, False, "ceil", "x", "weight"),
    "transformer_engine": (1e-5, "inside", "after_scale", 0, False, "ceil", "x", "weight"),
    "mlx": (1e-5, "inside", "before_scale", 0, False, "ceil", "promote_first", "weight"),
    "t5x": (1e-6, "inside", "before_scale", 0, False, "ceil", "x", "scale"),
    "x_transformers": (1e-12, "clamp", "input_dtype", 0, False, "ceil", "promote", "g"),
}
FIELDS = ("eps", "eps_position", "rounding", "scale_offset", "bias", "partial_rounding", "result_dtype", "scale_name")


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_what_the_table_says(name):
    preset = PRESETS[name]
    for variant in (preset, derive("test", name, None, None)):
        assert tuple(getattr(variant, field) for field in FIELDS) == TABLE[name]
    assert (preset.name, preset.partial) == (name, None), "none of them is partial unless asked"
    assert preset.source


def test_the_table_has_every_preset_and_every_field():
    assert list(PRESETS) == list(TABLE) == list(get_args(Preset)), "type checkers know every preset"
    known = {*FIELDS, "name", "partial", "source", "gate_function", "gate_position", "residual_rounding", "scale_dtype"}
    assert {name for name in PRESETS if PRESETS[name].scale_dtype == "x"} == {"t5x"}
    assert {field.name for field in dataclasses.fields(Variant)} == known


@pytest.mark.parametrize(("x", "residual", "digits"), [
    ("float16", None, 23), ("bfloat16", None, 23), ("float32", None, 23), ("float64", None, 52),
    ("float32", "float64", 52), ("bfloat16", "float32", 23),
])  # fmt: skip
def test_an_eps_of_none_is_the_machine_epsilon_of_the_sum(x, residual, digits):
    added = None if residual is None else Spec((4,), residual)
    assert resolve("rms_norm", Spec((4,), x), variant=PRESETS["torch"], residual=added).eps == 2.0**-digits


@pytest.mark.parametrize(("partial", "n", "ceil", "floor"), [
    (0.07, 100, 7, 7), (0.29, 100, 29, 29), (0.57, 100, 57, 57), (0.3, 10, 3, 3), (0.3, 48, 15, 14),
    (0.0625, 500, 32, 31), (0.001, 10, 1, 1), (0.5, 1, 1, 1), (1, 7, 7, 7), (Fraction(1, 3), 9, 3, 3),
    (Fraction(1, 3), 10, 4, 3), (0.999999, 3, 3, 2), (0.1, 10**15 + 10, 10**14 + 1, 10**14 + 1), (0.3, 0, 0, 0),
])  # fmt: skip
def test_k_is_exact(partial, n, ceil, floor):
    """100 * 0.07 is 7.000000000000001 in floating point, int(100 * 0.29) is 28."""
    variant = Variant(name="mine", partial=partial)
    assert variant.counted(n) == ceil
    assert variant.replace(partial_rounding="floor").counted(n) == floor


def test_a_variant_is_looked_up_changed_compared_and_sent():
    """It is immutable: a change is another one, in which only what is named is new."""
    standard, gemma = PRESETS["standard"], Variant.get("gemma")
    assert gemma is PRESETS["gemma"]
    changed = gemma.replace(eps=1e-5, partial=0.25)
    assert Variant.get(changed) is changed
    assert (changed.eps, changed.partial, gemma.eps, gemma.partial) == (1e-5, Fraction(1, 4), 1e-6, None)
    assert changed.replace(eps=1e-6, partial=None) == gemma
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'eps'"):
        standard.eps = 1.0
    with pytest.raises(TypeError, match="does not support item assignment"):
        PRESETS["standard"] = standard
    halves = standard.replace(partial=0.5), standard.replace(partial=Fraction(1, 2))
    assert len({*PRESETS.values(), standard.replace(eps=1e-6), *halves}) == len(PRESETS) + 1
    assert pickle.loads(pickle.dumps(standard.replace(partial=0.07))) == standard.replace(partial=0.07)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.longdouble, np.float16, Fraction, float, int, np.int8])
def test_numbers_of_any_library_become_those_of_python(number):
    """In JSON and in a compiler another one is a text or an array."""
    value = number(1) if number in (int, np.int8) else number(0.25)
    variant = Variant(name="a", eps=value, scale_offset=value, partial=value)
    assert [type(variant.eps), type(variant.scale_offset), type(variant.partial)] == [float, float, Fraction]
    assert (variant.eps, variant.scale_offset, variant.partial) == (value, value, Fraction(float(value)))
    assert json.loads(variant.json)["eps"] == json.loads(variant.json)["scale_offset"] == float(value)
    assert Variant.from_json(variant.json) == variant
    called = derive("rms_norm", "llama", value, value)
    assert [type(called.eps), type(called.partial)] == [float, Fraction]


@pytest.mark.parametrize("field", ["eps", "scale_offset", "partial"])
def test_what_is_no_real_number_is_refused(field):
    for value in (Decimal("0.5"), np.bool_(True), np.array(0.5), "0.5", 10**400, Fraction(10**400), 1j):
        with pytest.raises((TypeError, ValueError), match=rf"^Variant: {field} is .*, expected a (finite )?(num|frac)"):
            Variant(name="a", **{field: value})
