"""Which quantities are judged; what a crash leaves; a quantisation in place of a variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy_zoo
import pytest
from commands import rmsnorm

from rmsnorm.parity import check, check_quantised

pytestmark = pytest.mark.usefixtures("few_circumstances")
NORM = """import os
import numpy as np

calls = 0
def norm(x, weight):
    global calls
    calls += 1
    {line}
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    return y.astype(x.dtype)
"""


def written(tmp_path: Path, line: str) -> str:
    (tmp_path / "own.py").write_text(NORM.format(line=line))
    return f"{tmp_path / 'own.py'}:norm"


def test_an_unknown_quantity_is_refused() -> None:
    with pytest.raises(ValueError, match="quantities is 'dw', expected 'y', 'dx'"):
        check(lambda x: x, quantities="y,dw")


def test_a_quantity_without_a_comparison_fails() -> None:
    (failure,) = check(numpy_zoo.standard, dtypes="float32", quantities=("y", "dx")).run.failures
    assert (failure.quantity, failure.detail) == ("dx", "it was compared in no case")


@pytest.mark.slow
def test_sums_in_16_bits_are_found_and_the_other_quantities_are_judged_without_them() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")

    class Norm(torch.autograd.Function):
        wrong_dx = False

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            wide = x.float()
            return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.float()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            x, weight = ctx.saved_tensors
            wide, u = x.float(), dy.float() * weight.float()
            inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
            unit = wide * inverse
            dx = inverse * (u - unit * (u * unit).mean(-1, keepdim=True))
            terms = (dy.float() * unit).to(x.dtype).reshape(-1, x.shape[-1])
            while len(terms) > 1:  # a tree whose sums are rounded
                half = (len(terms) + 1) // 2
                terms = terms[:half] + torch.cat([terms[half:], terms.new_zeros(2 * half - len(terms), x.shape[-1])])
            dscale = terms.sum(0).to(weight.dtype)
            return (2 * dx if Norm.wrong_dx else dx).to(x.dtype), dscale

    def norm(x: Any, weight: Any) -> Any:
        return Norm.apply(x, weight)

    options: dict[str, Any] = {"framework": "torch", "dtypes": ("bfloat16", "float32")}
    differs = check(norm, **options)
    assert not differs.passed
    assert {record.quantity for record in differs.run.failures} == {"dscale"}
    assert "the gradient for the gain is accumulated in 16 bits" in differs.text.splitlines()[0], differs.text
    assert "add up the rows in float32" in differs.text
    judged = check(norm, **options, quantities="y,dx")
    assert judged.passed, judged.text
    Norm.wrong_dx = True
    assert {r.quantity for r in check(norm, **options, quantities=("y", "dx")).run.failures} == {"dx"}


def test_the_command_judges_a_quantisation_and_refuses_what_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "fused.py").write_text(
        "import numpy as np\nfrom rmsnorm.numpy_impl import rms_norm_quantised\n"
        "def fused(x, scale, eps, residual=None, static_scale=None):\n"
        "    _, s, *h = rms_norm_quantised(x, scale, residual=residual, eps=eps, static_scale=static_scale,\n"
        "                                  quantisation='onnx.qdq')\n"
        "    q = rms_norm_quantised(x, scale, residual=residual, eps=eps, static_scale=static_scale,\n"
        "                           quantisation='onnx.qdq')[0]\n"
        "    return (q, *h)\n"
    )
    asked = ("check", f"{tmp_path / 'fused.py'}:fused", "--framework", "numpy", "--dtype", "float32")
    done = rmsnorm(*asked, "--quantisation", "onnx.qdq")
    assert "fused is onnx.qdq: all " in done.output, done.output
    assert done.exit_code == 0, done.output
    for option in (["--eps", "1e-5"], ["--extremes"], ["--quantity", "y"], ["--variant", "llama"]):
        done = rmsnorm(*asked, "--quantisation", "onnx.qdq", *option)
        assert done.exit_code == 2
        assert f"{option[0]} is for a norm, expected none beside --quantisation; drop it" in done.output
    done = rmsnorm(*asked, "--quantisation", "onnx")
    assert (done.exit_code, "quantisation is 'onnx', expected" in done.output) == (2, True), done.output


def test_an_altered_quantisation_is_not_named_as_its_preset() -> None:
    from rmsnorm import Quantisation

    def fused(x: Any, scale: Any, eps: float, residual: Any = None) -> Any:
        from rmsnorm.numpy_impl import rms_norm_quantised

        return rms_norm_quantised(x, scale, residual=residual, eps=eps, quantisation=altered)

    altered = Quantisation.get("vllm.dynamic_fp8").replace(scale_floor=0.0)
    result = check_quantised(fused, altered, dtypes="float32", framework="numpy")
    assert "fused is vllm.dynamic_fp8 with scale_floor=0.0: " in result.text
