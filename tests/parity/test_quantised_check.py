"""``check_quantised``: kernels whose 1 / rho is that of float32 pass, and each of the wrong ones is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rmsnorm import Quantisation
from rmsnorm.numpy_impl import rms_norm_quantised
from rmsnorm.parity import check_quantised, quantised
from rmsnorm.specification.quantisation import QUANTISATIONS

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")


def kernel(asked, error=0.0, **changes):
    """A function that returns what the preset does, and computes it with other fields, by the golden.

    error: relative, by which 1 / rho is too small at most, where it is not exactly 1 as eps is 1/4.
    """
    preset, p = Quantisation.get(asked), Quantisation.get(asked).replace(**changes)

    def norm(x, scale, *, eps, residual=None, static_scale=1.0, global_scale=1.0):
        known = {"static_scale": static_scale} if p.block == "static" else {}
        known |= {"global_scale": global_scale} if p.global_scale == "given" else {}
        eps = eps if eps == 0.25 else eps * (1 + 2 * error)
        q, scales, *more = rms_norm_quantised(x, scale, residual=residual, eps=eps, quantisation=p, **known)
        g = [more[0] if p.global_scale == "amax" else np.float32(1)] * (preset.global_scale == "amax")
        return (q, *([scales] if preset.block != "static" else []), *g, *(more[-1:] if residual is not None else []))

    return norm


def judged(function, name, *, is_searched=False, dtypes="bfloat16", framework="numpy", **options):
    """Its report, without what it is instead unless that is asked for, which takes several times as long."""
    with pytest.MonkeyPatch.context() as patch:
        if not is_searched:
            patch.setattr(quantised, "QUANTISATIONS", {})
            patch.setattr(quantised, "_neighbours", lambda preset: ())
        return check_quantised(function, name, framework=framework, dtypes=dtypes, **options)


@pytest.mark.parametrize(("place", "name"), [*enumerate(QUANTISATIONS)])
@pytest.mark.parametrize("error", [2.0**-22, -(2.0**-22)])
def test_a_kernel_passes_whose_inverse_rms_is_that_of_float32(place, name, error):
    report = judged(kernel(name, error), name, dtypes=("float32", "float16", "bfloat16")[place % 3])
    assert report.passed, report.text


WRONG = {  # each choice once, in a preset without it
    "vllm.static": [
        {"element": "e5m2", "qmax": 57344.0, "qmin": -57344.0}, {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0},
        {"qmax": 240.0, "qmin": -240.0}, {"residual_rounding": "truncate"}, {"statistic_reads": "sum"},
        {"values_read": "sum"}, {"round_norm": False}, {"round_gain": False}, {"offset": "exact"}, {"apply": "y / s"},
        {"round_scaled": "bfloat16"}, {"rounding": "half_down"}, {"overflow": "nan"}, {"nan": "nan"}, {"nan": "zero"}],
    "vllm.dynamic_fp8": [
        {"block": 32}, {"amax_floor": 2.0**-8}, {"amax_nan": "keep"}, {"scale": "amax * (1 / qmax)"},
        {"scale_floor": 0.0}, {"scale_floor": 1e-10}, {"apply": "y * (1 / s)"}],
    "flashinfer.static": [{"statistic_reads": "stored"}, {"values_read": "stored"}, {"round_gain": True}],
    "flashinfer.fp4": [
        {"order": "norm_first"}, {"zero_scale": "infinity"}, {"zero_scale": "largest"},
        {"global_scale": "amax", "scale": "amax * (g * (1 / qmax))"}],
    "te.mxfp8": [{"order": "gain_first"}, {"round_norm": True}, {"scale_round": "floor"}, {"nan": "qmax"}],
    "te.nvfp4": [{"global_scale": "given"}, {"apply": "y * (g * (1 / s))"}, {"zero_scale": "zero"}],
    "torchao.mx": [
        {"block": 16}, {"amax_nan": "drop"}, {"quantise_with": "unrounded"}, {"scale_round": "rceil"},
        {"scale_round": "even"}, {"scale_round": "nearest"}],  # and ceil below
    "aiter.int8": [
        {"residual_rounding": "nearest"}, {"amax_floor": 0.0}, {"scale": "amax / qmax"}, {"error": 2.0**-17}],
    "llama.q8_0": [{"scale_format": "float32"}, {"quantise_with": "stored"}, {"rounding": "half_even"}],
    "onnx.qdq": [{"qmin": -127.0}, {"rounding": "half_away"}, {"rounding": "truncate"}, {"overflow": "wrap"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), [(name, changes) for name in WRONG for changes in WRONG[name]])
def test_one_wrong_choice_is_refused(name, changes):
    assert not judged(kernel(name, **changes), name, dtypes="float32" if name == "llama.q8_0" else "bfloat16").passed


@pytest.mark.parametrize(("asked", "computed", "changes", "message"), [
    ("flashinfer.static", "vllm.static", {}, "it is vllm.static"),
    ("torchao.mx", "torchao.mx", {"scale_round": "ceil"}, "it is torchao.mx with scale_round='ceil'"),
    ("vllm.static", "vllm.static", {"rounding": "truncate", "nan": "zero"}, "it is no preset, nor vllm.static but"),
])  # fmt: skip
def test_the_report_says_what_it_is_instead(asked, computed, changes, message):
    report = judged(kernel(computed, **changes), asked, is_searched=True)
    assert message in report.text.splitlines()[0]


def test_the_fixture(rmsnorm_parity):
    assert rmsnorm_parity(kernel("torchao.mx"), quantisation="torchao.mx", dtypes="bfloat16").label == "torchao.mx"
    with pytest.raises(pytest.fail.Exception, match=r"is not torchao\.mx"):
        rmsnorm_parity(lambda x, scale, *, eps: x, quantisation="torchao.mx", dtypes="bfloat16", framework="numpy")


def pairs(q):
    """Two codes of E2M1 in a byte, the first in its low half."""
    return q.view(np.uint8)[:, ::2] | (q.view(np.uint8)[:, 1::2] << 4)


# What a function returns of x and the right outputs of a preset; what the report says, empty where it passes.
LAYOUTS = [
    ("vllm.static", lambda x, q, *h: (q.view(np.uint8), *h), ""),
    ("vllm.static", lambda x, q, *h: (q, np.float32(1), *h), "2 outputs, expected q; write an adapter"),
    ("vllm.static", lambda x, q, *h: (q, *(np.nextafter(a, a.dtype.type(9)) for a in h)), r"h: at \(0, 0\) it is"),
    ("vllm.static", lambda x, q, *h: (np.where(q == 0, abs(q), q), *h), "q: at .* it is 0.0, expected -0.0"),
    ("vllm.dynamic_fp8", lambda x, q, s, *h: (q, s[:, 0], *h), ""),
    ("vllm.dynamic_fp8", lambda x, q, s, *h: (q, np.nextafter(s, np.float32(9)), *h), "scales: at .* it is"),
    ("vllm.dynamic_fp8", lambda x, q, s, *h: (q, s.astype(float), *h), r"scales is f64\[2, 1\], expected f32"),
    ("flashinfer.fp4", lambda x, q, s, *h: (pairs(q), s.view(np.uint8), *h), ""),
    ("flashinfer.fp4", lambda x, q, s, *h: (pairs(q[:, ::-1])[:, ::-1], s, *h), "q: at"),
    ("torchao.mx", lambda x, q, s, *h: (q, s.T, *h), r"scales is .*\[32, 2\], expected .*, or its codes in uint8"),
    ("torchao.mx", lambda x, q, s, *h: q, "1 outputs, expected q, scales; write an adapter that returns these"),
    ("torchao.mx", lambda x, q, s, *h: (q.tolist(), s, *h), "q is a list, expected numpy.ndarray"),
    ("torchao.mx", lambda x, q, s, *h: (x.fill(0), q, s, *h)[1:], "inputs written to: x"),
    ("torchao.mx", lambda x, q, s, *h: 1 // 0, "ZeroDivisionError"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "message"), LAYOUTS)
def test_what_a_function_may_return(name, layout, message):
    def norm(x, scale, *, eps, residual=None, static_scale=1.0, global_scale=1.0):
        options = {"eps": eps, "residual": residual, "static_scale": static_scale, "global_scale": global_scale}
        return layout(x, *kernel(name)(x, scale, **options))

    report = judged(norm, name)
    assert (report.passed, bool(re.search(message, report.details))) == (not message, True), report.details


def test_what_it_cannot_call_is_refused_and_what_it_does_not_compare_is_named():
    with pytest.raises(ValueError, match=r"^check_quantised: function is .*, expected a function f.x, scale, \*, eps"):
        check_quantised(lambda x, scale, *, static_scale: x, "vllm.static")
    with pytest.raises(ValueError, match=r"^check_quantised: .* takes no argument 'static_scale', expected some of x"):
        check_quantised(lambda x, scale, *, eps: x, "vllm.static")
    report = judged(lambda x, scale, *, eps, static_scale: kernel("onnx.qdq")(x, scale, eps=eps)[0], "onnx.qdq")
    assert "not compared: h: it takes no argument residual" in report.text


@pytest.mark.parametrize("slack", [0.0, 2.0**-21])
def test_tensors_of_torch_with_its_float8(slack):
    """No framework need be named. Only with ``slack`` may a reciprocal that is approximated have both codes of a tie."""
    torch = pytest.importorskip("torch")

    def in_torch(x, scale, *, eps, static_scale, residual=None):
        h = x if residual is None else x + residual
        wide = h.float()
        y = (wide * (1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps))).to(x.dtype) * scale
        v = y.float() * (1 / (torch.tensor(static_scale) * (1 + slack / 2)))
        q = torch.where(v.isnan(), 448.0, v).clamp(-448, 448).to(torch.float8_e4m3fn)
        return q if residual is None else (q, h)

    options = {"framework": None, "dtypes": "float16"}
    report = judged(in_torch, "vllm.static", reciprocal_slack=slack, **options)
    assert (report.passed, report.run.name, report.run.device) == (True, "torch", "cpu"), report.text
    assert report.text.splitlines()[0].startswith(f"{__name__}:test_tensors_of_torch_with_its_float8")
    assert slack == 0 or not judged(in_torch, "vllm.static", **options).passed
