"""Derivatives of derivatives, batched, compiled, recomputed and in loops, in every framework.

Each is that of the textbook's formula, written in plain float64 operations of the same framework and wrapped alike.
nightly/test_drawn.py draws 2,000 compositions of each framework.
"""

from __future__ import annotations

import zlib
from typing import Any

import calls
import numpy as np
import pytest
import transforms
from transforms import compared

DIFFERENTIABLE = ("torch", "tf", "flax")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),  # forward_ad's own
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # of vmap around vmap
]


@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
def test_every_transform(framework: Any, engine: str) -> None:
    """Each once, around or within a derivative, of calls that differ."""
    kind = transforms.KINDS[framework.name]()
    random = np.random.default_rng(zlib.crc32(f"{framework.name} {engine}".encode()))
    names = [*kind.derivatives, *kind.others]
    if framework.name != "torch":  # which compile
        names = names[engine == "recipe" :: 2]
    refused = []
    for name, row in zip(names, calls.drawn(len(names), random, calls.COMPOSED), strict=True):
        beside = str(random.choice(kind.derivatives))
        if not compared(kind, row, [beside, name], random):
            refused.append(name)
    assert len(refused) <= len(names) // 3, refused


def _derived(framework: Any, norm: Any, tensors: Any, dy: Any) -> Any:
    """The gradient of x, which may be differentiated again."""
    if framework.name == "torch":
        return framework.bridge.torch.func.vjp(lambda x: norm({"x": x})[0], tensors["x"])[1](dy)[0]
    return framework.bridge.pull(norm, tensors, [dy])[1]["x"]


@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
def test_the_inverse_rms_is_a_constant(framework: Any) -> None:
    inputs = {"x": framework.send(np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32))}
    results = lambda tensors: [framework.functional.rms_norm(**tensors, return_inverse_rms=True)[1] + 0 * tensors["x"]]  # noqa: E731
    gradients = framework.bridge.pull(results, inputs, [framework.send(np.ones((3, 8), np.float32))])[1]
    assert not framework.fetch(gradients["x"]).any()


@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
def test_nan_under_a_mask_is_in_no_second_derivative(framework: Any) -> None:
    """In reverse mode, and in JAX in forward mode over it: elsewhere its tangent of 1 / rho meets the NaN."""
    random = np.random.default_rng(0)
    x, dy = random.normal(size=(2, 3, 8)).astype(np.float32)
    mask = random.random(x.shape) < 0.6
    sent = {"x": framework.send(np.where(mask, x, np.float32(np.nan)))}
    counted, mask = framework.send(np.where(mask, dy, np.float32(0))), framework.send(mask)

    def norm(tensors: Any) -> Any:
        return [framework.functional.rms_norm(tensors["x"], mask=mask)]

    def gradient(tensors: Any) -> Any:
        return _derived(framework, norm, tensors, counted)

    bridge, each = framework.bridge, lambda tensors: [gradient(tensors)]
    second = [bridge.pull(each, sent, [counted])[1]["x"]]
    if framework.name == "flax":
        second.append(bridge.push(each, sent, {"x": counted}))
        second.append(bridge.push(lambda tensors: [bridge.push(norm, tensors, {"x": counted})], sent, {"x": counted}))
    assert all(np.isfinite(framework.fetch(entry)).all() for entry in second)


@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
def test_derivatives_at_every_magnitude(framework: Any, position: str) -> None:
    """Of rows beside eps, whose powers alone leave the range of float32, and of rows far from it.

    No tangent is below rho: XLA and TensorFlow take the products of smaller ones as 0.
    """
    variant = calls.VARIANTS["standard"].replace(eps_position=position, eps=1e-6)
    row, along = np.random.default_rng(0).normal(size=(2, 6))

    def gradient(tensors: Any) -> Any:
        norm = lambda t: [framework.functional.rms_norm(t["x"], variant=variant)]  # noqa: E731
        return _derived(framework, norm, tensors, tensors["dy"])

    for magnitude in (1e-10, 1e-3, 1.0, 1e5, 1e12):
        found = []
        for dtype in ("float32", "float64"):
            x = row.astype("float32").astype(dtype) * np.float32(magnitude).astype(dtype)
            with framework.precision(dtype == "float64"):
                sent = {"x": framework.send(x), "dy": framework.send(np.arange(6).astype(dtype))}
                tangent = {"x": framework.send(along.astype("float32").astype(dtype) * max(np.abs(x).max(), 1e-3))}
                found.append(framework.fetch(framework.bridge.push(lambda t: [gradient(t)], sent, tangent)))
        got, want = found
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * abs(want).max() + 1e-37)
