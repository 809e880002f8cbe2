"""What replace proves, refuses after it, and leaves, in PyTorch."""

from __future__ import annotations

import copy
import importlib
import pickle
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import LlamaRMSNorm  # noqa: E402

from rmsnorm.conversion import replace  # noqa: E402
from rmsnorm.identify import Identity  # noqa: E402


class TinyNorm(nn.Module):
    """Its eps is in an attribute with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.tiny, self.rate = nn.Parameter(torch.ones(8)), 1e-6, 1.0

    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, (8,), self.weight, self.tiny)


class WithoutEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), None

    def forward(self, x: Any) -> Any:
        return nn.functional.rms_norm(x, (8,), self.weight, self.eps)


EPS: dict[str, tuple[Any, str, str]] = {
    "a number": (lambda: LlamaRMSNorm(8), "variance_epsilon", "1e-06"),
    "another name": (TinyNorm, "tiny", "1e-06"),
    "none": (WithoutEps, "eps", "None"),
}


@pytest.mark.parametrize("name", EPS)
def test_an_eps_that_is_set_later_is_refused(name: str) -> None:
    """What loads, copies, moves and trains a model sets what it likes, and so does its user but for the eps."""
    make, attribute, was = EPS[name]
    norm = make()
    (entry,) = replace(norm)
    assert entry.variant is not None
    norm.load_state_dict(make().state_dict())
    x = 1e-3 * randn(4, 8)
    with torch.no_grad():
        want = norm(x)
    for each in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        words = (
            rf"replace: {attribute} is 0.001, expected {was}, with which replace has replaced this norm; set it before"
        )
        with pytest.raises(ValueError, match=words):
            setattr(each, attribute, 1e-3)
        setattr(each, attribute, getattr(each, attribute))
        each.rate = 2.0
        assert torch.equal(each.to(torch.float32).train().eval()(x), want)
        each.weight = nn.Parameter(2 * torch.ones(8))
        assert torch.equal(each(x), 2 * want)


LATER: dict[str, tuple[Any, Any]] = {
    "its eps": (lambda: nn.RMSNorm(8, 1e-6), lambda m: setattr(m, "eps", 1e-3)),
    "its axes": (lambda: nn.RMSNorm(8, 1e-6, False), lambda m: setattr(m, "normalized_shape", (4, 8))),
}


@pytest.mark.parametrize("name", LATER)
def test_an_attribute_that_is_set_later_counts_in_a_layer_of_rmsnorm(name: str) -> None:
    make, set_later = LATER[name]
    own, mine = make(), make()
    (entry,) = replace(mine)
    assert entry.variant is not None
    x = 1e-3 * randn(4, 8)
    models = [mine, copy.deepcopy(mine)]
    before = mine(x), mine(x)
    assert torch.equal(*before)
    for model in (own, *models):
        set_later(model)
    want = own(x)
    assert not torch.allclose(want, before[0], rtol=0.1)
    for model in models:
        torch.testing.assert_close(model(x), want)


class EpsInATensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), torch.tensor(1e-6)

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_what_may_change_unseen_stays() -> None:
    (entry,) = replace(EpsInATensor())
    assert entry.variant is None
    assert entry.why == "its eps is no parameter or buffer, and may change where replace sees nothing of it"


def test_parameters_without_elements_are_gathered_first() -> None:
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    for parameter in model[:2].parameters():  # as ZeRO-3 leaves them between calls
        parameter.data = torch.empty(0)
    first, last = replace(model, dry_run=True)
    assert (first.name, first.variant) == ("0", None)
    assert first.why == "its parameters have no elements, as those of ZeRO-3 between calls; gather them first"
    assert last.variant is not None


class L2Norm(nn.Module):
    def forward(self, x: Any) -> Any:
        return nn.functional.normalize(x, dim=-1)


def test_an_l2_norm_is_left_with_its_formula() -> None:
    (entry,) = replace(nn.Sequential(L2Norm()))
    assert entry.variant is None
    assert entry.why.startswith("it computes the L2 norm, eps below the norm: x / max(|x|, 1e-12), which is RMSNorm")


def test_every_kind_of_norm_has_a_reason() -> None:
    report = importlib.import_module("rmsnorm.conversion.replacement.report")
    for kind in get_args(importlib.import_module("rmsnorm.identify.identity").Kind):
        assert str(report._reason(Identity("it", "numpy", kind=kind)))


class TooSmall(LlamaRMSNorm):
    """In bfloat16, of three axes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (0.9 * y).to(y.dtype) if x.dtype == torch.bfloat16 and x.ndim == 3 else y


@pytest.mark.parametrize("width", [64, 768])
def test_a_factor_of_16_bits_is_seen_at_every_width(width: int) -> None:
    small, right = replace(nn.ModuleList([TooSmall(width), LlamaRMSNorm(width)]))
    assert small.variant is None
    assert f"'few rows of {width}, 3 axes' bf16 y" in small.why
    assert right.why == "recognised"


def computed() -> Any:
    """As a hypernetwork sets it."""
    norm = nn.RMSNorm(8)
    del norm.weight
    norm.weight = 2 * torch.ones(8, requires_grad=True)
    return norm


def pruned() -> Any:
    norm = nn.RMSNorm(8)
    return importlib.import_module("torch.nn.utils.prune").random_unstructured(norm, "weight", amount=0.3)


class NotCopied(LlamaRMSNorm):
    def __deepcopy__(self, memory: Any) -> Any:
        raise RuntimeError("one is enough")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (computed, "its weight is no parameter or buffer, and may change where replace sees nothing of it"),
        (pruned, "its weight is no parameter or buffer, and may change where replace sees nothing of it"),
        (lambda: NotCopied(8), "it cannot be asked what it computes (RuntimeError: one is enough)"),
    ],
)
def test_one_norm_that_cannot_be_asked_leaves_the_others(make: Any, why: str) -> None:
    first, second = replace(nn.Sequential(make(), nn.RMSNorm(8)))
    assert (first.variant, first.why, second.why) == (None, why, "recognised")


class EpsInABuffer(nn.Module):
    """With no word of a norm in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("eps", torch.tensor(1e-6))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class AdaRMSNorm(LlamaRMSNorm):
    def forward(self, x: Any, cond: Any = None) -> Any:
        return super().forward(x) * (1 + cond.float())


def test_what_is_missing_for_a_norm_is_said() -> None:
    buffered, conditional = replace(nn.Sequential(EpsInABuffer(), AdaRMSNorm(8)))
    assert buffered.why == "its eps is a parameter or buffer, which may change, expected a number of Python"
    assert conditional.why.startswith("it cannot be called with x alone: ")
    assert conditional.why.endswith("'NoneType' object has no attribute 'float'; does its call need cond?")
