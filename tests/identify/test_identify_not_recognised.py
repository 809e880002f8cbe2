"""What is no RMSNorm, or has a gate of no known function, is not recognised, and the report says why."""

from __future__ import annotations

import time

import pytest
from plain_layers import Plain

from rmsnorm.identify import identify

torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")


class Required(Plain):
    """A forward that must have a gate, as Qwen3-Next's; before the norm as in Mamba-2."""

    before = False

    def forward(self, x, gate):
        f, ones = self.act(gate.float()), torch.ones(())
        on_x, on_y = (f, ones) if self.before else (ones, f)
        h = x.float() * on_x
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float() * on_y).to(x.dtype)

    def act(self, z):
        return torch.nn.functional.silu(z)


def rms_scaling():
    keras = pytest.importorskip("keras")
    return keras.layers.LayerNormalization(rms_scaling=True)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: torch.nn.LayerNorm, "layernorm", "is LayerNorm, not RMSNorm"),
        (rms_scaling, "rms_scaling", "is not RMSNorm: x is divided by the root of its variance"),
        (lambda: torch.tanh, "none", "no element of x changes another one's y: nothing is normalised"),
        (lambda: lambda x: torch.softmax(x, -1), "none", "is not recognised"),
    ],
    ids=["LayerNorm", "rms_scaling", "tanh", "softmax"],
)
@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`")
def test_what_is_no_rmsnorm_is_not_recognised(make, kind, words):
    identity = identify(make(), framework="torch" if kind == "none" else None)
    assert identity.kind == kind, identity.text
    assert words in identity.headline
    assert not identity.recognised


class Clipped(Plain):
    def norm(self, x):
        return super().norm(x.clamp(-50, 50))


class Largest(Plain):
    def norm(self, x):
        return x / x.abs().amax(-1, keepdim=True) * self.weight.float()


class Mixed(Plain):
    def norm(self, x):
        return 0.5 * x + super().norm(x)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Largest, "the denominator is the largest |x| of a row, not its root mean square"),
        (Mixed, "y has a part that the gain does not multiply, and that is no multiple of the normalised row"),
        (Clipped, "the denominator is no function of the row's sum of squares and sum"),
    ],
)
def test_why_it_is_not_recognised_is_an_experiment(module, words):
    identity = identify(module)
    assert words in identity.headline
    assert not identity.defects


def raises(x):
    raise RuntimeError("no kernel image\nwith a long story")


def needs_a_gpu(x: torch.Tensor):
    return torch.nn.functional.rms_norm(x, x.shape[-1:]) + torch.zeros(1, device="cuda")


def narrow(x):
    return torch.mean(x, -1, keepdim=True)


def writes(x, weight):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-6)
    x.zero_()
    return y


def slow(x):
    time.sleep(0.2)
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (raises, "raises raised on x f32[4, 64]: RuntimeError: no kernel image"),
        (needs_a_gpu, "needs_a_gpu needs a GPU, expected one that runs here"),
        (narrow, "narrow returned f32[4, 1] for x f32[4, 64], expected the shape of x"),
        (writes, "it writes to its arguments: x"),
        (slow, "slow took more than its limit of 1 s"),
    ],
    ids=["raises", "GPU", "shape", "writes", "slow"],
)
def test_a_target_that_misbehaves_gets_a_sentence(function, sentence):
    identity = identify(function, framework="torch", time_limit=1.0)
    assert any(sentence in defect for defect in identity.defects), identity.text
    assert not identity.recognised


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("act", "is_known"),
    [
        (lambda z: z.sigmoid(), True),
        (lambda z: torch.nn.functional.silu(z.clamp(max=10)), False),
        (lambda z: torch.nn.functional.relu6(z), False),
        (lambda z: torch.nn.functional.hardswish(z), False),
        (lambda z: z * torch.sigmoid(1.702 * z), False),
        (lambda z: torch.where(z == 0, 1.0, torch.nn.functional.silu(z)), False),
    ],
    ids=["sigmoid", "silu up to 10", "relu6", "hardswish", "quick gelu", "0"],
)
def test_a_gate_that_is_cut_off_or_unknown_says_nothing_false_of_the_norm(act, is_known, before):
    kind = type("Norm", (Required,), {"before": before, "act": lambda self, z: act(z)})
    identity = identify(kind)
    if not is_known:
        assert identity.kind == "none"
        assert "the gate acts in no known way" in identity.text
        return
    assert not identity.defects, identity.text
    assert not [words for words in identity.differences("standard") if not words.startswith("gate_")], identity.text
