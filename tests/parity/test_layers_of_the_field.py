"""Right layers of other packages agree at the widths of models: their roundings are within the bounds."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rmsnorm.identify import identify  # noqa: E402
from rmsnorm.parity.cases import CASES, Data, make  # noqa: E402
from rmsnorm.parity.checking import check  # noqa: E402
from rmsnorm.parity.judge import Outcome, compare, expect  # noqa: E402

BY_NAME = {case.name: case for case in CASES}
NAMES = ("odd", "rows", "constant", "zero rows", "huge", "gain f32", "gain bf16")
WIDTHS = (64, 768, 1024, 4096, 5120, 8192)
DTYPES = ("float16", "float32", "bfloat16")
CLASSES = {
    "LlamaRMSNorm": ("llama", "llama"), "GemmaRMSNorm": ("gemma", "gemma"), "T5LayerNorm": ("t5", "t5"),
    "Qwen3RMSNorm": ("qwen3", "llama"), "Olmo2RMSNorm": ("olmo2", "olmo2"), "RMSNorm": ("", "torch"),
}  # fmt: skip


def layer(name: str, width: int) -> Any:
    family, _ = CLASSES[name]
    if not family:
        return torch.nn.RMSNorm(width)
    pytest.importorskip("transformers")
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(width)


def of_norm(function: Any, weight: Any, data: Data) -> Outcome:
    """y and its gradients, by automatic differentiation."""

    def there(array: Any) -> Any:
        return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, array.dtype.name))

    def back(tensor: Any) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        return tensor.detach().float().numpy().astype(name)

    x = there(data.x).requires_grad_()
    weight.data = there(data.scale)
    weight.grad = None
    y = function(x)
    y.backward(there(data.dy).to(y.dtype))
    return Outcome({"y": [back(y)], "dx": [back(x.grad)], "dscale": [back(weight.grad)]})


def data_at(width: int, variant: str, dtype: str) -> list[Data]:
    cases = [BY_NAME[name] for name in NAMES]
    cases = [case for case in cases if dtype in case.dtypes and not (case.data == "huge" and dtype != "float16")]
    return [make(replace(case, shape=(*(min(s, 8) for s in case.shape[:-1]), width)), variant, dtype) for case in cases]


def failures(function: Any, weight: Any, data: list[Data]) -> list[str]:
    found = []
    for entry in data:
        expected = expect(entry, ("y", "dx", "dscale"), automatic=True)
        verdicts = compare(of_norm(function, weight, entry), expected)
        found += [f"{entry.case.name} {v.quantity}: {v.detail}" for v in verdicts if not v.passed]
    return found


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [*zip(WIDTHS, 2 * DTYPES, strict=True), (768, "bfloat16"), (4096, "bfloat16"), (8192, "float32")],
)
def test_layers_agree_at_the_widths_of_models(name: str, width: int, dtype: str) -> None:
    module = layer(name, width)
    assert failures(module, module.weight, data_at(width, CLASSES[name][1], dtype)) == []


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_another_rounding_does_not_agree_there() -> None:
    module = layer("RMSNorm", 4096)
    found = failures(module, module.weight, data_at(4096, "llama", "bfloat16"))
    assert any(entry.startswith("rows y: ") for entry in found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_the_norm_of_a_library_may_be_squared(variant: str, dtype: str) -> None:
    """torch.linalg.vector_norm adds in eight lanes, of which one loses what is small beside an outlier."""
    weight = torch.nn.Parameter(torch.ones(1))

    def norm(x: Any) -> Any:
        h = x.float()
        size = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        y = h * torch.rsqrt(size**2 / x.shape[-1] + 1e-6)
        return weight * y.to(x.dtype) if variant == "llama" else (weight.float() * y).to(x.dtype)

    assert failures(norm, weight, [make(replace(BY_NAME["wide"], shape=(3, 16381)), variant, dtype)]) == []


@pytest.mark.parametrize("name", ["T5LayerNorm", "LlamaRMSNorm"])
@pytest.mark.parametrize("width", WIDTHS)
def test_identify_names_layers_of_every_width(name: str, width: int) -> None:
    """A float32 sum that errs to one side beside an outlier is no eps that acts as a share of the largest |x|."""
    found = identify(layer(name, width), gradients=False)
    assert found.recognised, found.text
    assert found.headline.endswith(f"the variant {CLASSES[name][1]}")


@pytest.mark.slow
@pytest.mark.parametrize("width", [768, 4096, 8192])
def test_check_takes_llamas_own_layer(width: int) -> None:
    result = check(layer("LlamaRMSNorm", width), "llama")
    assert result.passed, result.text
