"""The L2 norm: it is RMSNorm with another eps and a constant gain, and identify says so."""

from __future__ import annotations

import numpy as np
import pytest

from rmsnorm import Variant
from rmsnorm.identify import identify

N, EPS = 96, 1e-3
POSITIONS = {"inside": EPS / N, "outside": EPS / N**0.5, "clamp": EPS}


def rho(x, position):
    squares = (x * x).sum(-1, keepdims=True)
    if position == "inside":
        return np.sqrt(squares + EPS)
    return np.sqrt(squares) + EPS if position == "outside" else np.maximum(np.sqrt(squares), EPS)


def l2_norm(x, position):
    return x / rho(x, position)


def gradient(dy, x, position):
    """That of x / rho by the quotient rule, with drho / dx = x / |x| beside eps and x / rho with eps inside."""
    length, r = np.sqrt((x * x).sum(-1, keepdims=True)), rho(x, position)
    slope = x / r if position == "inside" else x / length
    if position == "clamp":
        slope = np.where(length > EPS, slope, 0)
    return dy / r - slope * (dy * x).sum(-1, keepdims=True) / r**2


def rows():
    """Some are far below eps."""
    random = np.random.default_rng(0)
    return random.normal(size=(8, N)) * np.logspace(-6, 1, 8)[:, None], random.normal(size=(8, N))


@pytest.mark.parametrize("position", POSITIONS)
def test_it_is_rms_norm_with_another_eps_and_gain(framework, position):
    x, dy = (array.astype(np.float32) for array in rows())
    variant = Variant.get("standard").replace(eps_position=position, eps=POSITIONS[position])
    gain = np.full(N, N**-0.5, np.float64 if framework.name == "numpy" else np.float32)
    y, dx = framework.rms_norm(x, gain, variant=variant), framework.rms_norm_vjp(dy, x, gain, variant=variant)[0]
    wide, upstream = x.astype(np.float64), dy.astype(np.float64)
    want, slope = l2_norm(wide, position), gradient(upstream, wide, position)
    # y is rounded, and so is the gain outside of the golden: 2^-24 each; dx has terms of the size of dy / rho
    assert np.max(np.abs(y - want) / np.abs(want)) < (1 if framework.name == "numpy" else 2.01) * 2.0**-24
    terms = np.abs(upstream) / rho(wide, position) + np.abs(upstream / rho(wide, position) - slope)
    assert np.max(np.abs(dx - slope) / terms) < 2.01 * 2.0**-24


@pytest.mark.parametrize(
    ("position", "words"),
    [
        ("inside", "the L2 norm, eps on the sum: x / sqrt(sum(x^2) + 0.001), which is RMSNorm with eps / n"),
        ("outside", "the L2 norm, eps on the norm: x / (|x| + 0.001), which is RMSNorm with eps / sqrt(n)"),
        ("clamp", "the L2 norm, eps below the norm: x / max(|x|, 0.001), which is RMSNorm with the same eps"),
    ],
)
def test_identify_says_so_and_where_eps_is(position, words):
    identity = identify(lambda x: l2_norm(x, position).astype(x.dtype), framework="numpy", gradients=False)
    assert words in identity.headline
    assert words in identity.cluster
    assert (identity.kind, identity["kind"], identity["eps"], identity.recognised) == ("l2norm", "l2norm", EPS, False)
    assert identity["confirmed"], identity.text
    assert "other defect" not in identity.headline


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True)), "l2norm"),  # no eps
        (lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS * x.shape[-1]), "rmsnorm"),  # times 1 / sqrt(n)
        (lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS) * x.shape[-1] ** 0.5, "rmsnorm"),  # eps / n
        (lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) / 64 + EPS), "rmsnorm"),  # a constant
    ],
)
def test_what_else_is_divided_by_the_sum(function, kind):
    identity = identify(lambda x: function(x).astype(x.dtype), framework="numpy", gradients=False)
    assert identity.kind == kind
    assert ("the L2 norm" in identity.headline) == (kind == "l2norm")


@pytest.mark.torch
def test_the_l2_norms_of_transformers_and_torch():
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    identity = identify(qwen.l2norm, framework="torch")
    assert "eps on the sum: x / sqrt(sum(x^2) + 1e-06)" in identity.headline
    assert identity["rounding"] == "input_dtype"
    assert identity["gradients"] == "agree"
    identity = identify(torch.nn.functional.normalize, framework="torch", init={"dim": -1})
    assert "eps below the norm: x / max(|x|, 1e-12)" in identity.headline


@pytest.mark.torch
def test_what_is_named_l2_norm_in_llama_4_is_rms_norm():
    llama = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    identity = identify(llama.Llama4TextL2Norm)
    assert identity.recognised
    assert identity.variant.name == "standard"
