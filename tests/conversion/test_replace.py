"""replace in each framework: what becomes ours and says and learns the same, what is left and why, an eps set later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from norms import FRAMEWORKS, RIGHT, WRONG, own

from rmsnorm import Variant
from rmsnorm.conversion import replace

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
# what Keras is warned of by NumPy
X = np.random.default_rng(0).normal(size=(4, 5, 8)).astype("float32")


@pytest.fixture(params=[
    pytest.param("torch", marks=pytest.mark.torch), pytest.param("keras", marks=pytest.mark.tf),
    pytest.param("flax", marks=pytest.mark.flax),
])  # fmt: skip
def norms(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The norms of a framework."""
    framework = FRAMEWORKS[request.param]()
    if request.param == "flax":
        with framework.jax.numpy_dtype_promotion("standard"):  # that of JAX by default, which its users have
            yield framework
    else:
        yield framework


RECOGNISED = {
    "own": "recognised",
    "with an argument": "recognised; with extra it runs its own code",
    "groups": "recognised, in groups of 4",
    "silu gate": "recognised, with a silu gate before the norm, in groups of 4",
    "sigmoid gate": "recognised, with a sigmoid gate after the norm",
}
LEFT = {
    "LayerNorm": "it computes LayerNorm",
    "BatchNorm": "it holds ",
    "counting": "a call changes its ",
    "training": "in training, y is another one than in evaluation",
    "NaN": "NaN in a row",
    "L2": "it computes the L2 norm, eps below the norm: x / max(|x|, 1e-12), which is RMSNorm with the same eps and "
    "1 / sqrt(n) times the gain",
}


@pytest.mark.usefixtures("few_circumstances")
@pytest.mark.parametrize("name", RECOGNISED)
def test_what_is_recognised_says_and_learns_the_same(norms: Any, name: str) -> None:
    """It keeps its class, its state and its own code for the calls that were not proven.

    In few circumstances: a file for each framework has models that are asked in all.
    """
    layer = norms.layer(RIGHT[name])
    kind, inputs = type(layer), [X, X[::-1].copy()] if "gate" in name else [X]
    want = norms.results(layer, *inputs)
    before = norms.call(layer, *inputs)
    (entry,) = replace(layer)
    assert entry.why == RECOGNISED[name]
    assert entry.variant.eps == pytest.approx(1e-5, rel=1e-3)
    assert isinstance(layer, kind)
    in_place = norms.key == "keras"  # there the layer gets another call
    assert (type(layer) is kind, "computed" not in repr(layer)) == (in_place, in_place)
    for each in norms.copies(layer):
        for got, right in zip(norms.results(each, *inputs), want, strict=True):
            np.testing.assert_allclose(got, right, rtol=norms.rounding, atol=norms.rounding)
    if "gate" in name:
        assert np.array_equal(norms.call(layer, X), norms.own_code(kind, layer, X)), "its own code, without a gate"
        assert np.array_equal(norms.call(layer, X, gate=inputs[1]), norms.call(layer, *inputs)), "the gate has its name"
    if name == "with an argument":
        assert np.array_equal(norms.call(layer, X, extra=2.0), norms.own_code(kind, layer, X, extra=2.0))
    other = norms.layer(RIGHT[name])
    replace(other, Variant.get("keras").replace(eps=0.1))
    assert np.abs(norms.call(other, *inputs) - before).max() > 1e-3, "it is not its own code that runs"


@pytest.mark.usefixtures("few_circumstances")
def test_a_dry_run_says_the_same_and_changes_nothing(norms: Any) -> None:
    layer = norms.layer(own)
    kind, state = type(layer), {**vars(layer)}
    (dry,) = replace(layer, dry_run=True)
    assert (type(layer), vars(layer)) == (kind, state)
    (entry,) = replace(layer)
    assert entry == dry
    assert ("would be RMSNorm" in str(dry), "now RMSNorm" in str(entry)) == (True, True)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_and_why(norms: Any, name: str) -> None:
    if name == "training" and not norms.has_mode:
        pytest.skip("a module of Flax has no mode of training of its own")
    layer = norms.layer(WRONG[name]) if name in WRONG else norms.built_in[name]()
    kind, state = type(layer), {**vars(layer)}
    (entry,) = replace(layer)
    assert (entry.variant, type(layer)) == (None, kind)
    assert LEFT[name] in entry.why
    assert str(entry) == f"the model ({kind.__name__}): left; {entry.why}"
    assert name == "counting" or vars(layer) == state


@pytest.mark.usefixtures("few_circumstances")
def test_an_eps_that_is_set_later_is_refused(norms: Any) -> None:
    """What loads, copies, moves and trains a model sets what it likes, and so does its user but for the eps."""
    layer = norms.layer(own)
    replace(layer)
    want = norms.call(layer, X)
    words = "replace: eps is 0.001, expected 1e-05, with which replace has replaced this norm; set it before"
    for each in norms.copies(layer):
        with pytest.raises(ValueError, match=words):
            each.eps = 1e-3
        each.eps, each.note = each.eps, "kept"
        np.testing.assert_allclose(norms.call(each, X), want, rtol=1e-6)
        norms.double(each)
        np.testing.assert_allclose(norms.call(each, X), 2 * want, rtol=1e-6)


def test_what_is_no_model() -> None:
    with pytest.raises(
        TypeError, match=r"model is None \(NoneType\), expected a torch.nn.Module, keras.Model or .*; pass"
    ):
        replace(None)
    nn = pytest.importorskip("torch").nn
    with pytest.raises(TypeError, match=r"flax.nnx.Module; make an object of it first"):
        replace(nn.Linear)
    (entry,) = replace(nn.Linear(8, 8))
    why = 'no class of its modules has "norm" in its name, and none with a gain or a bias alone is RMSNorm'
    assert str(entry) == f"the model (Linear): left; {why}"
    linen = pytest.importorskip("flax.linen")
    with pytest.raises(TypeError, match=r"a linen model makes its norms in each call; name rmsnorm.flax_impl.linen"):
        replace(linen.RMSNorm())
