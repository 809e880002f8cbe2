"""Derivatives of derivatives, batched, compiled, recomputed and in loops, in every framework.

Each is that of the textbook's formula, written in plain float64 operations of the same framework and wrapped alike.
``make fuzz`` draws 2,000 compositions of each framework, from the seed in RMSNORM_FUZZ_SEED or the date.
"""

from __future__ import annotations

import os
import zlib
from datetime import date
from typing import Any

import calls
import numpy as np
import pytest
import transforms
from hypothesis import settings
from transforms import compared

from rmsnorm import numpy_impl

NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
SEED = os.environ.get("RMSNORM_FUZZ_SEED") or (f"{date.today()}" if NIGHTLY else "3")
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


@pytest.mark.parametrize("framework", [
    pytest.param("torch", marks=pytest.mark.xfail(reason="the tangent of 1 / rho meets the NaN", strict=True)),
    pytest.param("tf", marks=pytest.mark.xfail(reason="the tangent of 1 / rho meets the NaN", strict=True)),
    "flax",
], indirect=True)  # fmt: skip
def test_nan_under_a_mask_in_mixed_derivatives(framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward mode over reverse mode."""
    kind = transforms.KINDS[framework.name]()
    monkeypatch.setattr(kind, "under_mask", np.nan)
    row = {"variant": "standard", "x": "float32", "layout": "small", "mask": "row mask"}
    names = ["tape", "forward"] if framework.name == "tf" else ["grad", "jvp"]
    assert compared(kind, row, names, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
def test_compositions(framework: Any, engine: str) -> None:
    """Two to four transforms at random, of which two differentiate at least."""
    kind, count = transforms.KINDS[framework.name](), settings().max_examples // 2 if NIGHTLY else 3
    random, done = np.random.default_rng(zlib.crc32(f"{framework.name} {engine} {SEED}".encode())), 0
    for row in calls.drawn(3 * count, random, calls.COMPOSED):
        names = [str(random.choice(kind.derivatives)) for _ in range(2)]
        names += [str(random.choice([*kind.derivatives, *kind.others])) for _ in range(random.integers(3))]
        random.shuffle(names)
        done += compared(kind, row, names, random)
        if done == count:
            return
    assert done >= count / 2, f"of {3 * count} compositions {done} could be compared"


@pytest.mark.parametrize("name", ["standard", "llama", "zhang_torch", "x_transformers"])
@pytest.mark.parametrize("framework", DIFFERENTIABLE, indirect=True)
def test_second_derivatives_are_those_of_the_golden(framework: Any, name: str) -> None:
    """That of the gradient of x along a direction, by differences of the golden's gradients in float64."""
    gates = ({}, {"mask": "row mask"}, {"gate": "silu after"}, {"gate": "sigmoid before"})
    for levels in gates[:: 1 if framework.name == "torch" else 2]:
        data = calls.arguments_of({"variant": name, "x": "float64", "values": "alike", "bias": "bias", "eps": "0.1",
                                   "layout": "small", **levels})  # fmt: skip
        x = np.nan_to_num(data.x, nan=0.5)
        x /= np.abs(x).mean(axis=-1, keepdims=True)
        along, step, more = np.random.default_rng(4).normal(size=x.shape), 1e-5, {**data.options, **data.arrays}

        def dx(x: Any, data: Any = data, more: Any = more) -> Any:
            return numpy_impl.rms_norm_vjp(data.dy, x, data.scale, data.bias, **more)[0]

        want = (dx(x + step * along) - dx(x - step * along)) / (2 * step)
        with framework.precision(True):
            send = framework.send
            scale, bias, dy = map(send, (data.scale, data.bias, data.dy))
            arrays = {key: send(value) for key, value in data.arrays.items() if value is not None}

            def gradient(tensors: Any, data: Any = data, arrays: Any = arrays, dy: Any = dy) -> Any:
                norm = lambda t: [framework.functional.rms_norm(t["x"], scale, bias, **data.options, **arrays)]  # noqa: E731, B023
                return _derived(framework, norm, tensors, dy)

            got = framework.fetch(framework.bridge.push(lambda t: [gradient(t)], {"x": send(x)}, {"x": send(along)}))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * abs(want).max(), err_msg=f"{name} {levels}")


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
