"""replace: norms of PyTorch that are wrong, special, or cannot be asked stay, and the line says why."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
from test_replace_torch import OwnNorm  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch_layers import LlamaRMSNorm  # noqa: E402
from zoo_circumstances import WRONG  # noqa: E402

from rmsnorm.conversion import replace  # noqa: E402


def changed(change, width=8):
    """A norm whose y is what ``change`` makes of x and y."""
    forward = LlamaRMSNorm.forward
    return type("OddNorm", (LlamaRMSNorm,), {"forward": lambda self, x: change(x, forward(self, x))})(width)


class ChannelsNorm(OwnNorm):
    def forward(self, hidden):
        y = hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + 1e-5)
        return y * self.g.reshape(-1, *(1 for _ in hidden.shape[2:]))


class OneNumberNorm(OwnNorm):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(1))


class EpsInABuffer(nn.RMSNorm):
    def __init__(self):
        super().__init__(8)
        del self.eps
        self.register_buffer("eps", torch.tensor(1e-6))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class DetachedNorm(nn.RMSNorm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt().detach() * self.weight


class MaskNorm(OwnNorm):
    def forward(self, x, mask):
        return super().forward(x) * mask


class NotCopiedNorm(LlamaRMSNorm):
    def __deepcopy__(self, memory):
        raise RuntimeError("one is enough")


def parametrized():
    layer = nn.RMSNorm(8)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def patched():
    layer = nn.RMSNorm(8)
    layer.forward = layer.forward
    return layer


def too_small(x, y):
    """In bfloat16, of three axes."""
    return (0.9 * y).to(y.dtype) if x.dtype == torch.bfloat16 and x.ndim == 3 else y


def without_driver(x, y):
    raise RuntimeError("0 active drivers")


LEFT = {  # a pattern of the reason
    "driver": (lambda: changed(without_driver), "RuntimeError: 0 active drivers"),
    "tuple": (lambda: changed(lambda x, y: (y, None)), "it returns a tuple of 2"),
    "mask": (MaskNorm, "its call needs mask, expected x alone, or x and a gate"),
    "gradient": (lambda: DetachedNorm(8), r"2 of 2 circumstances: '1 row of 8, 1 axis; training' f32 dx: "),
    "modules": (parametrized, "it has modules of its own"),
    "method": (patched, "its forward is not that of its class"),
    "channels": (ChannelsNorm, "it normalises axis 1 of 3; only norms along the last axes"),
    "one number": (OneNumberNorm, r"its gain has the shape \(1,\), expected one number for each element of a"),
    "eps in a buffer": (EpsInABuffer, "its eps is a parameter or buffer, which may change, expected a num"),
    "pruned": (lambda: prune.random_unstructured(nn.RMSNorm(8), "weight", amount=0.3),
               "its weight is no parameter or buffer, and may change where replace sees nothing of it$"),
    "not copied": (lambda: NotCopiedNorm(8), r"it cannot be asked what it computes \(RuntimeError: one is enough\)$"),
    "too small": (lambda: changed(too_small, width=64), "'few rows of 64, 3 axes' bf16 y"),
    "infinity": (lambda: changed(lambda x, y: torch.where(x.isinf(), 1.0, y).to(y.dtype)),
                 "; zeros and infinity in rows; training' f32 y: .* got 1, want nan"),
    "zeros alone": (lambda: changed(lambda x, y: y if x.any() else y + 1),
                    " each with 'zeros': .* f32 y: .* got 1, want -?0"),
}  # fmt: skip


def test_what_is_left_alone_and_why():
    """In one model, beside a norm that is replaced."""
    layers = {name: make() for name, (make, _) in LEFT.items()}
    before = {name: (type(layer), dict(vars(layer))) for name, layer in layers.items()}
    *left, last = replace(nn.Sequential(nn.Linear(8, 8), *layers.values(), nn.RMSNorm(8)))
    assert last.why == "recognised"
    for place, (entry, (name, layer)) in enumerate(zip(left, layers.items(), strict=True), 1):
        kind, state = before[name]
        assert (entry.name, entry.kind, entry.variant) == (str(place), kind.__name__, None)
        assert re.search(LEFT[name][1], entry.why), entry.why
        assert str(entry) == f"{place} ({kind.__name__}): left; {entry.why}"
        assert type(layer) is kind
        assert vars(layer) == state


@pytest.mark.usefixtures("few_circumstances")
def test_parameters_without_elements_are_gathered_first():
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    for parameter in model[:2].parameters():  # as ZeRO-3 leaves them between calls
        parameter.data = torch.empty(0)
    first, last = replace(model, dry_run=True)
    assert (first.name, first.variant) == ("0", None)
    assert first.why == "its parameters have no elements, as those of ZeRO-3 between calls; gather them first"
    assert last.variant is not None


def wrong(name):
    """A module of a class of its own that computes a wrong norm."""

    class WrongNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x):
            return WRONG[name].norm(x, self.weight)

    return WrongNorm(WRONG[name].width)


@pytest.mark.parametrize("name", [name for name, entry in WRONG.items() if entry.replace is not None])
def test_a_norm_that_is_wrong_in_one_circumstance_stays(name):
    """And the line says in which, in the words of check."""
    layer = wrong(name)
    kind = type(layer)
    (entry,) = replace(layer)
    assert (entry.variant, type(layer)) == (None, kind)
    assert WRONG[name].replace in entry.why
