"""What depends on the width is found at three widths, and said in words; one width alone says what it cannot tell."""

from __future__ import annotations

import numpy as np
import pytest

from rmsnorm.identify import identify

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'rmsnorm[torch]'")

ON_THE_SUM = "eps is 1e-06 / n: it is added to the sum of squares, not to their mean"
ON_THE_NORM = "eps is 1e-06 / sqrt(n): it is added to the norm, not to the root of the mean square"


def asked(function, **options):
    """A function of x, in float32 at least."""

    def norm(x):
        return function(x.astype(np.promote_types(x.dtype, np.float32))).astype(x.dtype)

    return identify(norm, framework="numpy", **options)


def total(x):
    return (x * x).sum(-1, keepdims=True)


def in_groups(x, size):
    groups = x.reshape(*x.shape[:-1], -1, size)
    return (groups / np.sqrt((groups * groups).mean(-1, keepdims=True) + 1e-6)).reshape(x.shape)


# the function of x, its defects at width 64, and the eps that somebody wrote
WRONG = {
    "eps on the sum": (lambda x: x / np.sqrt(total(x) + 1e-6) * x.shape[-1] ** 0.5, [ON_THE_SUM], 1e-6),
    "eps on the norm": (lambda x: x / (np.sqrt(total(x)) + 1e-6) * x.shape[-1] ** 0.5, [ON_THE_NORM], 1e-6),
    "over 64": (
        lambda x: x / np.sqrt(total(x) / 64 + 1e-6), ["the sum of squares is divided by 64 at every width, not by n"],
        1e-6,
    ),
    "floor of rho": (
        lambda x: x / np.maximum(np.sqrt(total(x) / x.shape[-1]), 1e-6),
        ["rho has the floor 1e-06 (q has 1e-12) at every width, not eps / sqrt(n)"], 1e-6,
    ),
    "floor of q": (
        lambda x: x / np.sqrt(np.maximum(total(x) / x.shape[-1], 1e-6)),
        ["rho has the floor 0.001 (q has 1e-06) at every width, not eps / sqrt(n)"], 1e-3,
    ),
    "root n twice": (
        lambda x: x / np.sqrt(total(x) / x.shape[-1] + 1e-6) * x.shape[-1] ** 0.5,
        ["y is 8 (sqrt(n)) times too large"], 1e-6,
    ),
    "root n not taken back": (
        lambda x: x / np.sqrt(total(x) / x.shape[-1] + 1e-6) / x.shape[-1] ** 0.5,
        ["y is 0.125 (1 / sqrt(n)) times what it must be"], 1e-6,
    ),
    "32 elements": (
        lambda x: x / np.sqrt(total(x[..., :32]) / 32 + 1e-6),
        ["the statistic has 32 elements at every width, whatever n is"], 1e-6,
    ),
    "64 elements": (
        lambda x: x / np.sqrt(total(x[..., :64]) / 64 + 1e-6),
        ["the statistic has 64 elements at every width, whatever n is"], 1e-6,
    ),
    "no known rule": (
        lambda x: x / np.sqrt(total(x) / x.shape[-1] ** 0.9 + 1e-6),
        ["the denominator depends on the width in no known way: with 64, 128 and 192 elements in a row the sum of "
         "squares is divided by 42.22, 78.79 and 113.5, and eps is 1e-06, 1e-06 and 1e-06"],
        1e-6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_depends_on_the_width_is_a_defect_in_words(name):
    function, defects, eps = WRONG[name]
    identity = asked(function)
    assert list(identity.defects) == defects, identity.text
    assert identity["confirmed"], identity.text
    assert identity["eps"] == pytest.approx(eps, rel=1e-3)
    assert not identity.recognised


@pytest.mark.parametrize("width", [48, 64])
def test_a_clamp_of_the_norm_is_the_same_at_every_width(width):
    def norm(x):
        return x / np.maximum(np.sqrt(total(x)), 1e-12) * x.shape[-1] ** 0.5

    identity = asked(norm, width=width)
    assert identity.recognised, identity.text
    assert identity["widths"] == f"{width}, {2 * width} and {3 * width}"
    assert not identity.differences("x_transformers") or identity["eps"] == 1e-12


def layer(function, width):
    """A layer of that width alone."""

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))

        def forward(self, x):
            h = x.to(torch.promote_types(x.dtype, torch.float32))
            return (function(h) * self.weight).type_as(x)

    return Norm()


def square_sum(x):
    return x.square().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("width", "function", "eps", "words"),
    [
        (64, lambda x: x * (square_sum(x) / 64 + 1e-6).rsqrt(), 1e-6, "cannot be told from a constant"),
        (64, lambda x: 8 * x * (square_sum(x) + 1e-6).rsqrt(), 1e-6 / 64, f"; it may also be that {ON_THE_SUM}"),
        (48, lambda x: 48**0.5 * x * (square_sum(x) + 1e-6).rsqrt(), 1e-6 / 48, f"; it may also be that {ON_THE_SUM}"),
        (48, lambda x: 48**0.5 * x / (square_sum(x).sqrt() + 1e-6), 1e-6 / 48**0.5, f" that {ON_THE_NORM}"),
        (64, lambda x: x * (square_sum(x) / 64).clamp_min(1e-6).rsqrt(), 8e-3,
         "; it may also be that rho has the floor 0.001 (q has 1e-06) at every width, not eps / sqrt(n)"),
    ],
    ids=["over 64", "eps on the sum, 64", "eps on the sum, 48", "eps on the norm", "floor of q"],
)  # fmt: skip
def test_a_layer_of_one_width_is_right_there_and_both_readings_are_offered(width, function, eps, words):
    identity = identify(layer(function, width), gradients=False)
    assert identity.recognised, identity.text
    assert identity["eps"] == pytest.approx(eps, rel=1e-12)
    assert identity["widths"] == str(width)
    evidence = next(finding.evidence for finding in identity.findings if finding.name == "widths")
    assert evidence.startswith("no other width could be tried: a number that depends on n")
    assert evidence.endswith(words)


@pytest.mark.parametrize(
    ("size", "axes", "words"),
    [
        (lambda n: 8, "last, in groups of 8", "elements of the last axis that change one another"),
        (lambda n: n // 8, "last, in groups of 8", "there are 8 groups at a width of 128, too, of 16 elements"),
        (lambda n: 64, "last, in groups of 64", "elements of the last axis that change one another"),
    ],
    ids=["of 8", "8 of them", "as wide as the first width"],
)
def test_groups_have_one_size_or_one_number(size, axes, words):
    identity = asked(lambda x: in_groups(x, size(x.shape[-1])))
    assert identity.recognised, identity.text
    assert identity["axes"] == axes
    assert words in next(finding.evidence for finding in identity.findings if finding.name == "group_size")


def test_a_layer_that_drops_out_in_training_is_asked_in_evaluation_at_every_width():
    class Norm(torch.nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.weight, self.drop = torch.nn.Parameter(torch.ones(dim)), torch.nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6))

    identity = identify(Norm, gradients=False)
    assert identity["widths"] == "64, 128 and 192"
    assert identity.defects == ("in training, y is another one than in evaluation",)


@pytest.mark.parametrize(
    ("width", "second", "factor", "words"),
    [
        (64, 0.0, 1.0, "the gradient for x takes 1 / rho for a constant"),
        (16384, 0.0, 1.0, "the gradient for x takes 1 / rho for a constant"),
        (64, 1.0, 1.005, "the gradient for x is wrong by 0.5 % of its largest element"),
        (4096, 0.99, 1.0, "the gradient for x is wrong by "),
    ],
)
def test_a_gradient_that_is_a_little_wrong_is_seen(width, second, factor, words):
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            inverse = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(x, weight, inverse)
            return (x.double() * inverse * weight.double()).to(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            x, weight, inverse = ctx.saved_tensors
            dscale = (dy.double() * x.double() * inverse).sum(tuple(range(x.ndim - 1)))
            v, y = dy.double() * weight.double(), x.double() * inverse
            dx = factor * inverse * (v - second * y * (v * y).mean(-1, keepdim=True))
            return dx.to(x.dtype), dscale.to(weight.dtype)

    identity = identify(lambda x, weight: Norm.apply(x, weight), width=width, framework="torch")
    (defect,) = identity.defects
    assert defect.startswith(words)


@pytest.mark.parametrize("width", [3072, 1200])
def test_any_number_of_rows_tells_what_is_rounded(width):
    # of wide rows fewer are asked: 5 and 13 here
    def norm(x):
        h = x.astype(np.promote_types(x.dtype, np.float32))
        q = (x * x).astype(h.dtype)
        return (h / np.sqrt(q.mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    identity = identify(norm, framework="numpy", width=width, gradients=False)
    rounded = "the squares are rounded to {0}, before the cast to float32"
    assert identity.defects == tuple(f"for {name} x, {rounded.format(name)}" for name in ("float16", "bfloat16"))
