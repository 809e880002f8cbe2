"""What replace proves, keeps watching after it, and leaves, in PyTorch."""

from __future__ import annotations

import copy
import importlib
import pickle
import types
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import LlamaRMSNorm  # noqa: E402

from rmsnorm.conversion import replace  # noqa: E402
from rmsnorm.identify import Identity  # noqa: E402


class FromObjects(nn.Module):
    """Its eps is in an object, its factor in a method, its bias nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.ones(8)), types.SimpleNamespace(eps=[1e-6])

    def gain(self) -> Any:
        return self.weight

    def forward(self, x: Any) -> Any:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.options.eps[0]) * self.gain()
        offset = getattr(self, "offset", None)
        return y if offset is None else y + offset


CHANGES: dict[str, tuple[Any, Any]] = {
    "eps": (lambda: LlamaRMSNorm(8), lambda m: setattr(m, "variance_epsilon", 1e-3)),
    "in its dict": (lambda: LlamaRMSNorm(8), lambda m: vars(m).update(variance_epsilon=1e-3)),
    "in an object": (FromObjects, lambda m: m.options.eps.__setitem__(0, 1e-3)),
    "a method": (FromObjects, lambda m: setattr(m, "gain", lambda: 3.0)),
    "an attribute more": (FromObjects, lambda m: setattr(m, "offset", 1.0)),
    "the built-in's": (lambda: nn.RMSNorm(8, 1e-6), lambda m: setattr(m, "eps", 1e-3)),
    "its axes": (lambda: nn.RMSNorm(8, 1e-6, False), lambda m: setattr(m, "normalized_shape", (4, 8))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_that_is_set_later_counts(name: str) -> None:
    make, set_later = CHANGES[name]
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


def test_an_eps_that_is_set_later_counts_where_it_is_compiled_and_back() -> None:
    model = nn.Sequential(LlamaRMSNorm(8))
    replace(model)
    x = 1e-3 * randn(4, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for eps in (1e-6, 1e-3, 1e-6, 1e-2):
        model[0].variance_epsilon = eps
        for each in (compiled, model, pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(each(x), LlamaRMSNorm(8, eps)(x))
    torch._dynamo.reset()


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


@pytest.mark.parametrize("make", [lambda: LlamaRMSNorm(8), lambda: nn.RMSNorm(8, 1e-6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_may_write_into_x_where_its_norm_keeps_a_copy(make: Any, dtype: torch.dtype) -> None:
    own = make()
    mine = copy.deepcopy(own)
    replace(mine)
    with torch.inference_mode():
        features = randn(4, 8, dtype=dtype)
    results = []
    for norm in (own, mine, mine):
        x, norm.weight.grad = randn(4, 8, dtype=dtype).requires_grad_(), None
        h = x * 1
        h += norm(h).to(dtype)
        h.sum().backward()
        norm.weight.grad = None
        norm(features).sum().backward()
        results.append((x.grad, norm.weight.grad))
        norm.weight.grad = None
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=2.0**-6, atol=2.0**-6)  # theirs rounds terms to 16 bits
    h = (randn(4, 8) * 1).requires_grad_() * 1  # in float32 neither has a copy
    y = mine(h).sum()
    h += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


class TooSmall(LlamaRMSNorm):
    """In bfloat16, of three axes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (0.9 * y).to(y.dtype) if x.dtype == torch.bfloat16 and x.ndim == 3 else y


class TooSmallInFloat64(LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return 0.999 * y if x.dtype == torch.float64 else y


@pytest.mark.parametrize("width", [64, 768])
def test_a_factor_of_16_bits_or_of_64_is_seen_at_every_width(width: int) -> None:
    small, doubled, right = replace(nn.ModuleList([TooSmall(width), TooSmallInFloat64(width), LlamaRMSNorm(width)]))
    assert small.why == "recognised; with x of 3 axes it runs its own code"
    assert doubled.variant is None
    assert right.why == "recognised"
