"""What the layers of PyTorch, Keras, NNX and Linen promise alike. ``layer_kinds`` says what a kind of layers has.

``keras_backend`` runs these tests for Keras on its other backends.
"""

from __future__ import annotations

import inspect
from fractions import Fraction
from pathlib import Path
from typing import Any

import calls
import numpy as np
import pytest
from layer_kinds import normal

from rmsnorm import PRESETS, Variant, cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.parity.judge import compare
from rmsnorm.specification import dtypes

OWN = Variant(name="mine", eps=0.1, scale_offset=0.5, partial=Fraction(1, 3))
# What keras.ops.convert_to_numpy is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


def same(got: Any, want: Any, *, by_recipe: bool = not cpu.is_available(), about: str = "") -> None:
    """The golden's bits; by the recipe within a few roundings of float32, of numbers that are about 1."""
    got, want = (each if isinstance(each, tuple) else (each,) for each in (got, want))
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        rounding = 2.0**-20 if by_recipe else 0
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding, err_msg=about)


def beside(layers: Any) -> None:
    """For tests that compare with the built-in layer."""
    if layers.CLASSES[1] is None:
        pytest.skip("Keras has keras.layers.RMSNormalization from 3.9 on")


def test_calls_of_the_table(layers: Any) -> None:
    """y, the gradients and the derivative along tangents: every option that the layer has, in every dtype."""
    check_calls(layers, {"torch": 1, "tf": 2, "flax": 6}[layers.KEY])


def check_calls(layers: Any, step: int) -> None:
    levels = {"memory": ("contiguous",), "values": ("rows", "alike"), **layers.LEVELS}
    rows = [row for row in map(layers.row, calls.rows(few=layers.KEY == "flax", **levels)) if row is not None]
    assert len(rows) > 25
    for row in rows[::step]:
        data, expected = calls.asked(row)
        expected = {name: want for name, want in expected.items() if name != "inverse_rms"}
        for found in compare(layers.outcome(data), expected):
            assert found.passed, (calls.name_of(row), found.quantity, found.parity_ratio, found.detail)


def test_every_variant_starts_with_a_factor_of_one(layers: Any) -> None:
    """With a bias where the variant has one, of 0; a residual and a mask are passed to the function."""
    x = normal(4, 8)
    for variant in (*PRESETS.values(), OWN):
        layer, gain = layers(x.shape, variant=variant), np.ones(8, "float32")
        want = {"scale": (1 - variant.scale_offset) * gain} | ({"bias": 0 * gain} if variant.bias else {})
        assert {name: value.tolist() for name, value in layer.values.items()} == {
            name: value.tolist() for name, value in want.items()
        }
        same(layer(x), golden.rms_norm(x, variant=variant))
        same(layer.filled()(x), golden.rms_norm(x, **layer.values, variant=variant))
        if layers.KEY != "tf":
            more = {"mask": normal(4, 8, seed=2) > -0.5, "residual": normal(4, 8, seed=3)}
            same(layer(x, **more), golden.rms_norm(x, **layer.values, variant=variant, **more), by_recipe=True)


def test_options(layers: Any) -> None:
    """Of the layer, each by itself: those that are not named are the variant's."""
    x, default = normal(4, 8), layers.VARIANT
    for options, names in (
        ({}, {"scale"}),
        ({"bias": True}, {"scale", "bias"}),
        ({"variant": "equinox"}, {"scale", "bias"}),
        ({"variant": "equinox", "bias": False}, {"scale"}),
        ({"scale": False}, set()),
        ({"scale": False, "bias": True}, set() if layers.KEY == "torch" else {"bias"}),
        ({"eps": 0.25, "variant": "nematus"}, {"scale"}),
        ({"partial": 0.3, "variant": "gemma"}, {"scale"}),
    ):
        layer = layers(x.shape, **options).filled()
        assert layer.values.keys() == names, options
        named = {name: options[name] for name in ("eps", "partial") if name in options}
        same(layer(x), golden.rms_norm(x, **layer.values, variant=options.get("variant", default), **named))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # of PyTorch's
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_it_stands_for_the_built_in(layers: Any, dtype: str) -> None:
    """Dtypes, shapes and values, of y and of the gradients. The built-in layer computes in 32 bits, or 64 of float64.

    It rounds at each addition of n squares, which the root halves, and at six operations; of 16 bits also y, and with
    ``dtype`` x, which counts twice as it enters the statistic, too, or the gain.
    """
    beside(layers)
    if dtype in dtypes.HALF and not layers.ROUNDS_ONCE:
        pytest.skip("the built-in of PyTorch 2.5 computes in 16 bits, that of 2.6 rounds before the gain")
    shape = (4, 3, 8)
    x, dy = normal(*shape, dtype=dtype), normal(*shape, seed=3, dtype=dtype)
    mask = np.random.default_rng(3).uniform(size=shape) < 0.7
    mask[:, 0], mask[..., 0] = True, True
    with layers.precision(dtype == "float64"):
        for options in layers.BUILT_IN:
            named = {name: dtype if value == "x" else value for name, value in options.items()}
            ours, theirs = (layers(shape, built_in=which, **named) for which in (False, True))
            for name in layers.ATTRIBUTES:
                assert getattr(ours.own, name) == getattr(theirs.own, name)
            theirs.filled(**ours.filled().values)
            assert theirs.values.keys() == ours.values.keys()
            unit = 4 if "dtype" in options else 2
            results = [layer.gradients(dy, x=x) for layer in (ours, theirs)]
            pairs = [("y", results[0][0], results[1][0])]
            pairs += [(name, results[0][1].pop(name), want) for name, want in results[1][1].items()]
            assert results[0][1] == {}
            if "mask" in layers.INPUTS:  # what is under it has no gradient in ours
                pairs.append(("y", *(layer(x, mask=mask) for layer in (ours, theirs))))
            for name, got, want in pairs:
                assert (got.dtype, got.shape) == (want.dtype, want.shape), (options, name)
                of_y, own = (dtypes.unit_roundoff(array.dtype.name) for array in (pairs[0][2], want))
                error = (24 / 2 + 6) * (min(of_y, 2.0**-24) if layers.HAS_DOUBLE else 2.0**-24) + unit * max(
                    own, of_y if "dtype" in options else 0
                )
                got, want = got.astype(np.float64), want.astype(np.float64)
                # the terms of dx are at most |u| / rho and its mean product with a / rho, which differ like y
                size = abs(want) if name == "y" else 4 * 24**0.5 * abs(want).max()
                assert (abs(got - want) <= error * size + dtypes.smallest_normal(dtype)).all(), (
                    options,
                    name,
                    abs(got - want).max(),
                )


def test_every_argument_of_the_built_in(layers: Any) -> None:
    """The same names in the same order, ours behind them; the same defaults but for those that are the variant's."""
    beside(layers)
    assert layers.KEY == "tf" or issubclass(*layers.CLASSES)
    ours, theirs = (inspect.signature(getattr(cls, layers.CALL)).parameters.values() for cls in layers.CLASSES)
    assert [(p.kind, p.default) for p in theirs] == [(p.kind, p.default) for p in [*ours][: len(theirs)]]
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in layers.CLASSES)
    names = [name for name in theirs if name != "kwargs"]
    assert [name for name in ours if name in theirs and name != "kwargs"] == names
    assert {name for name in names if ours[name].default != theirs[name].default} == layers.OTHER_DEFAULTS
    assert all(ours[name].kind == theirs[name].kind for name in names)


def test_state_goes_both_ways(layers: Any, tmp_path: Path) -> None:
    """To the built-in layer and back, through a file, in 16 bits, too."""
    beside(layers)
    for parameters in ("float32", "bfloat16"):
        pair = [layers((4, 8), built_in=which, parameters=parameters) for which in (False, True)]
        for seed, (source, target) in enumerate([pair, pair[::-1]]):
            folder = tmp_path / f"{parameters} {seed}"
            folder.mkdir()
            source.filled(seed).write(folder)
            target.filled(9).read(folder)
            assert {name: value.tobytes() for name, value in source.values.items()} == {
                name: value.tobytes() for name, value in target.values.items()
            }


def test_copies(layers: Any) -> None:
    """They compute the same, are described in the same words, and have parameters of their own."""
    x = normal(4, 3, 8)
    for options in (
        {}, {"variant": "gemma", "partial": 0.3, "bias": True}, {"variant": "llama", "eps": 1e-3},
        {"partial": Fraction(1, 3)}, {"variant": OWN}, *layers.MORE,
    ):  # fmt: skip
        layer = layers(x.shape, **options).filled()
        y = layer(x)
        for way, own in layer.copies().items():
            twin = layer.like(own)
            assert twin.description == layer.description, way
            same(twin(x), y)
            twin.filled(7)
            assert (twin(x) != y).any(), way
            same(layer(x), y)


def test_a_transform_changes_only_what_float32_rounds(layers: Any) -> None:
    """Called as it is, the layer has the golden's y. Where a transform computes by the recipe, float32 rounds."""
    x, dy, arrays = normal(4, 3, 8), normal(4, 3, 8, seed=5), {}
    if layers.KEY != "tf":
        arrays = {"residual": normal(4, 3, 8, seed=6)}
    layer = layers(x.shape, variant="gemma", bias=True).filled()
    results = golden.rms_norm(x, **layer.values, variant="gemma", **arrays)
    want = results[0] if arrays else results
    slopes = golden.rms_norm_vjp((dy, None) if arrays else dy, x, **layer.values, variant="gemma", **arrays)
    for name, way in {"none": lambda function: function, **layers.WAYS}.items():
        y, gradients = layer.gradients(dy, way, x=x, **arrays)
        same(y, want, by_recipe=name != "none" or not cpu.is_available(), about=name)
        for argument, slope in zip(("x", "scale", "bias"), slopes, strict=False):
            same(gradients[argument], slope, by_recipe=True, about=name)


def test_an_eps_that_is_set_later_counts(layers: Any) -> None:
    """In the next call, forward and backward, after a first one with another."""
    x, dy = normal(4, 8), normal(4, 8, seed=5)
    layer = layers(x.shape, variant="llama", partial=0.3).filled()
    layer.gradients(dy, x=x)
    if isinstance(layer.own, tuple):  # a module of Linen has no attribute to set
        layer.own = layer.own[0].clone(epsilon=0.25), layer.own[1]
    else:
        setattr(layer.own, "eps" if layers.KEY == "torch" else "epsilon", 0.25)
    y, gradients = layer.gradients(dy, x=x)
    options = {**layer.values, "variant": "llama", "eps": 0.25, "partial": 0.3}
    same((layer(x), y), (golden.rms_norm(x, **options),) * 2)
    same(gradients["x"], golden.rms_norm_vjp(dy, x, **options)[0], by_recipe=True)


def test_weights_that_are_set_later_count(layers: Any) -> None:
    """No call keeps those of the one before; x of another shape or number of rows is another call."""
    layer = layers((4, 8), variant="standard")
    for seed in range(2):
        layer.filled(seed)
        for shape in ((4, 8), (1, 8), (2, 3, 8), (4, 8)):
            x = normal(*shape, seed=seed)
            same(layer(x), golden.rms_norm(x, **layer.values, variant="standard"))
