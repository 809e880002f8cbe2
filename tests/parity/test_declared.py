"""What is accepted is said: quantities that may differ and why, known differences of a file, and what is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from commands import rmsnorm

from rmsnorm.parity import check, check_quantised, report

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
    return (2 * y if np.isnan(x).any() and {wrong} else y).astype(x.dtype)
"""


def written(tmp_path: Path, *, line: str = "pass", wrong: bool = True) -> str:
    (tmp_path / "own.py").write_text(NORM.format(line=line, wrong=wrong))
    return f"{tmp_path / 'own.py'}:norm"


def test_known_differences_of_a_file_are_said_and_one_that_agrees_fails(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtypes": "float32", "framework": "numpy"}
    wrong = [f"{r.case!r} f32 {r.quantity}" for r in check(written(tmp_path), **options).run.failures]
    assert wrong
    known = tmp_path / "known.txt"
    known.write_text("# of own.py\n\n" + "".join(f"{label}: it doubles a row beside NaN\n" for label in wrong))
    held = check(written(tmp_path), **options, xfails=known)
    assert held.passed
    assert f"accepted: y: it doubles a row beside NaN: {len(wrong)} comparison" in held.text
    assert f"  {wrong[0]}: at" in held.details
    report.write_junit([held.run], tmp_path / "a.xml")
    (suite,) = ElementTree.parse(tmp_path / "a.xml").getroot()
    assert (suite.get("failures"), suite.get("skipped")) == ("0", str(len(suite.findall("testcase/skipped"))))
    mended = check(written(tmp_path, wrong=False), **options, xfails=known)
    assert not mended.passed
    assert "it agrees, and was expected to differ; take the line out" in " ".join(mended.text.split())
    known.write_text("'*' * *\n'no such case' * y\n")  # some of all comparisons differ
    (stale,) = check(written(tmp_path), **options, xfails=known).run.failures
    assert "there is no such comparison" in stale.detail


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accept": "dscale"}, r"accept is 'dscale', expected a quantity and why it may differ; write it as 'dscale:"),
        ({"accept": "dgain: why"}, "accept is 'dgain', expected 'y', 'dx'"),
        ({"quantities": "y,dw"}, "quantities is 'dw', expected 'y', 'dx'"),
        ({"xfails": "no_such_file.txt"}, r"xfails is 'no_such_file.txt', expected a file of known differences"),
        ({"xfails": __file__}, r"line 1 of .*test_declared.py is .*expected 'CASE' DTYPE QUANTITY: why"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(lambda x: x, **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_sums_in_16_bits_are_found_and_accepted_where_all_else_is_right() -> None:
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
    accepted = check(norm, **options, accept="dscale: 16-bit sums")
    assert accepted.passed, accepted.text
    assert "accepted: dscale: 16-bit sums: " in accepted.text
    Norm.wrong_dx = True
    assert {r.quantity for r in check(norm, **options, accept="dscale: 16-bit sums").run.failures} == {"dx"}

    def doubled(x: Any, weight: Any) -> Any:  # its dscale is wrong, and not by 16-bit sums
        wide = x.float()
        unit = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).detach()
        unit = unit + wide * 0
        y = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6) * weight.float().detach()
        return (y + unit.detach() * (2 * weight.float() - 2 * weight.float().detach())).to(x.dtype)

    assert {r.quantity for r in check(doubled, **options, accept="dscale: 16-bit sums").run.failures} == {"dscale"}
    options["dtypes"] = "float32"
    other = check(doubled, **options, accept={"dscale": "twice as large on purpose"})
    assert other.passed, other.text
    assert check(doubled, **options, quantities="y,dx").passed


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
    assert "codes: " in done.output, done.output
    assert done.exit_code == 0, done.output
    for option in (["--eps", "1e-5"], ["--edges"], ["--quantity", "y"], ["--variant", "llama"]):
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
