"""The L2 norm: it is RMSNorm with another eps and a constant gain, and identify says so."""

from __future__ import annotations

import numpy as np
import pytest

from rmsnorm import Variant, numpy_impl
from rmsnorm.identify import identify

N, EPS = 96, 1e-3
POSITIONS = {  # the eps of RMSNorm, and what identify says
    "inside": (EPS / N, "the L2 norm, eps on the sum: x / sqrt(sum(x^2) + 0.001), which is RMSNorm with eps / n"),
    "outside": (EPS / N**0.5, "the L2 norm, eps on the norm: x / (|x| + 0.001), which is RMSNorm with eps / sqrt(n)"),
    "clamp": (EPS, "the L2 norm, eps below the norm: x / max(|x|, 0.001), which is RMSNorm with the same eps"),
}


def l2_norm(x, position):
    squares = (x * x).sum(-1, keepdims=True)
    if position == "inside":
        return x / np.sqrt(squares + EPS)
    return x / (np.sqrt(squares) + EPS if position == "outside" else np.maximum(np.sqrt(squares), EPS))


@pytest.mark.parametrize("position", POSITIONS)
def test_it_is_rms_norm_with_another_eps_and_gain_and_identify_says_so(position):
    x = np.random.default_rng(0).normal(size=(8, N)) * np.logspace(-6, 1, 8)[:, None]  # some are far below eps
    eps, words = POSITIONS[position]
    variant = Variant.get("standard").replace(eps_position=position, eps=eps)
    y = numpy_impl.rms_norm(x, np.full(N, N**-0.5), variant=variant)
    np.testing.assert_allclose(y, l2_norm(x, position), rtol=2.0**-48, atol=0)
    identity = identify(lambda x: l2_norm(x, position).astype(x.dtype), framework="numpy", gradients=False)
    assert words in identity.headline
    assert words in identity.cluster
    assert (identity.kind, identity["eps"], identity.recognised) == ("l2norm", EPS, False)
    assert identity["confirmed"], identity.text
    assert "other defect" not in identity.headline


@pytest.mark.parametrize(("of_sum", "kind"), [
    (lambda total, n: 1 / np.sqrt(total), "l2norm"),
    (lambda total, n: 1 / np.sqrt(total + EPS * n), "rmsnorm"),
    (lambda total, n: 1 / np.sqrt(total / 64 + EPS), "rmsnorm"),
], ids=["no eps", "eps n", "a constant"])  # fmt: skip
def test_what_else_is_divided_by_the_sum(of_sum, kind):
    def function(x):
        return (x * of_sum((x * x).sum(-1, keepdims=True), x.shape[-1])).astype(x.dtype)

    identity = identify(function, framework="numpy", gradients=False)
    assert identity.kind == kind
    assert ("the L2 norm" in identity.headline) == (kind == "l2norm")


@pytest.mark.torch
def test_the_l2_norms_of_transformers_and_torch():
    torch = pytest.importorskip("torch")
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    identity = identify(qwen.l2norm, framework="torch")
    assert "eps on the sum: x / sqrt(sum(x^2) + 1e-06)" in identity.headline
    assert (identity["rounding"], identity["gradients"]) == ("input_dtype", "agree")
    identity = identify(torch.nn.functional.normalize, framework="torch", init={"dim": -1}, gradients=False)
    assert "eps below the norm: x / max(|x|, 1e-12)" in identity.headline
