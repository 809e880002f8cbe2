"""``check_quantised``: kernels whose 1 / rho is that of float32 pass, and one wrong field is refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from rmsnorm import Quantisation
from rmsnorm.numpy_impl import rms_norm_quantised
from rmsnorm.parity import check_quantised, quantised
from rmsnorm.parity import report as reports
from rmsnorm.specification.quantisation import QUANTISATIONS
from rmsnorm.targets.bridges import Torch

pytestmark = pytest.mark.needs("ml_dtypes>=0.5", "which has E2M1 and E8M0")
F32 = np.float32
FLOAT32 = 2.0**-22  # a relative error of 1 / rho in float32
UNIT_EPS = 0.25  # of the cases in which 1 / rho is exactly 1


def kernel(preset, computes=None, *, error=0.0):
    """A function that returns what the preset does, and computes something else, by the golden.

    error: relative, by which 1 / rho is too small in the rows where it is not 1: eps is larger by so much.
    """
    p = computes or preset

    def norm_quantised(x, scale, *, eps, residual=None, static_scale=1.0, global_scale=1.0):
        known = {"static_scale": static_scale} if p.block == "static" else {}
        known |= {"global_scale": global_scale} if p.global_scale == "given" else {}
        q, scales, *more = rms_norm_quantised(x, scale, residual=residual, eps=eps, quantisation=p, **known)
        g = more[0] if p.global_scale == "amax" else F32(global_scale)
        if error and eps != UNIT_EPS:
            given = p if p.global_scale == "none" else p.replace(global_scale="given")
            known |= {} if p.global_scale == "none" else {"global_scale": g}
            read = x.astype(np.float64) + (0 if residual is None else residual.astype(np.float64))
            for i, eps_of_row in enumerate(eps + 2 * error * (np.mean(read * read, axis=1) + eps)):
                r = None if residual is None else residual[i]
                own = rms_norm_quantised(x[i], scale, residual=r, eps=eps_of_row, quantisation=given, **known)
                q[i], scales[i if p.block != "static" else ...] = own[:2]
        outputs = [q] if preset.block == "static" else [q, scales]
        return (*outputs, *([g] if preset.global_scale == "amax" else []), *([] if residual is None else more[-1:]))

    return norm_quantised


def refused(preset, function, **options):
    report = check_quantised(function, preset, framework="numpy", **options)
    assert not report.passed
    return report


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_an_honest_kernel_passes(name):
    report = check_quantised(kernel(Quantisation.get(name), error=FLOAT32), name, framework="numpy")
    assert report.passed, report.text
    counts = report.counts
    assert counts.get("wrong", 0) == 0
    assert counts.get("tie", 0) < counts["rows"]  # aiter: 126 or 127 for the largest of a row
    assert counts["rows"] > 100


PAIRS = list(zip(QUANTISATIONS, [*list(QUANTISATIONS)[1:], "vllm.static"], strict=True))


@pytest.mark.parametrize(("asked", "computed"), PAIRS)
def test_another_preset_is_named(asked, computed):
    report = refused(asked, kernel(Quantisation.get(computed)), dtypes="bfloat16")
    assert report.instead == (computed,), report.text
    assert f"it is {computed}" in report.text


MUTANTS = [
    ("vllm.static", {"element": "e5m2"}), ("vllm.static", {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0}),
    ("vllm.static", {"qmax": 240.0, "qmin": -240.0}), ("vllm.dynamic_fp8", {"qmax": 240.0, "qmin": -240.0}),
    ("onnx.qdq", {"qmin": -127.0}),
    ("torchao.mx", {"block": 16}), ("te.nvfp4", {"block": 32}), ("vllm.dynamic_fp8", {"block": 32}),
    ("vllm.static", {"residual_rounding": "truncate"}), ("aiter.int8", {"residual_rounding": "nearest"}),
    ("vllm.static", {"statistic_reads": "sum"}), ("vllm.dynamic_fp8", {"statistic_reads": "stored"}),
    ("flashinfer.static", {"statistic_reads": "stored"}), ("vllm.static", {"values_read": "sum"}),
    ("vllm.dynamic_fp8", {"values_read": "stored"}), ("flashinfer.static", {"values_read": "stored"}),
    ("flashinfer.fp4", {"order": "norm_first"}), ("te.mxfp8", {"order": "gain_first"}),
    ("vllm.static", {"round_norm": False}), ("te.mxfp8", {"round_norm": True}),
    ("vllm.static", {"round_gain": False}), ("flashinfer.static", {"round_gain": True}),
    ("vllm.static", {"offset": "exact"}), ("aiter.int8", {"amax_floor": 0.0}),
    ("vllm.dynamic_fp8", {"amax_floor": 2.0**-8}), ("torchao.mx", {"amax_nan": "drop"}),
    ("vllm.dynamic_fp8", {"amax_nan": "keep"}), ("vllm.dynamic_fp8", {"scale": "amax * (1 / qmax)"}),
    ("aiter.int8", {"scale": "amax / qmax"}), ("vllm.dynamic_fp8", {"scale_floor": 0.0}),
    ("vllm.dynamic_fp8", {"scale_floor": 1e-10}), ("llama.q8_0", {"scale_format": "float32"}),
    ("torchao.mx", {"scale_round": "rceil"}), ("torchao.mx", {"scale_round": "ceil"}),
    ("torchao.mx", {"scale_round": "even"}), ("torchao.mx", {"scale_round": "nearest"}),
    ("te.mxfp8", {"scale_round": "floor"}), ("te.mxfp8", {"scale_round": "ceil"}),
    ("te.mxfp8", {"scale_round": "nearest"}), ("te.mxfp8", {"scale_round": "even"}),
    ("flashinfer.fp4", {"global_scale": "amax"}), ("te.nvfp4", {"global_scale": "given"}),
    ("torchao.mx", {"quantise_with": "unrounded"}), ("te.mxfp8", {"quantise_with": "unrounded"}),
    ("llama.q8_0", {"quantise_with": "stored"}), ("trtllm.add_nvfp4", {"quantise_with": "unrounded"}),
    ("vllm.static", {"apply": "y / s"}), ("vllm.dynamic_fp8", {"apply": "y * (1 / s)"}),
    ("onnx.qdq", {"apply": "y * (1 / s)"}), ("te.nvfp4", {"apply": "y * (g * (1 / s))"}),
    ("flashinfer.fp4", {"zero_scale": "infinity"}), ("flashinfer.fp4", {"zero_scale": "largest"}),
    ("trtllm.add_nvfp4", {"zero_scale": "largest"}), ("te.nvfp4", {"zero_scale": "zero"}),
    ("vllm.static", {"round_scaled": "bfloat16"}),
    ("flashinfer.static", {"round_scaled": "bfloat16"}), ("vllm.static", {"rounding": "half_down"}),
    ("vllm.static", {"rounding": "half_away"}), ("vllm.dynamic_fp8", {"rounding": "truncate"}),
    ("flashinfer.static", {"rounding": "half_down"}), ("flashinfer.fp4", {"rounding": "half_down"}),
    ("onnx.qdq", {"rounding": "half_away"}), ("onnx.qdq", {"rounding": "truncate"}),
    ("aiter.int8", {"rounding": "half_even"}), ("llama.q8_0", {"rounding": "half_even"}),
    ("onnx.qdq", {"overflow": "wrap"}), ("vllm.static", {"overflow": "nan"}), ("vllm.static", {"nan": "nan"}),
    ("vllm.static", {"nan": "zero"}), ("te.mxfp8", {"nan": "qmax"}), ("flashinfer.fp4", {"nan": "zero"}),
    ("onnx.qdq", {"nan": "qmax"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), MUTANTS)
def test_one_wrong_field_is_refused(name, changes, monkeypatch):
    """Without the search for that field, which would double the time; the next test is about it."""
    monkeypatch.setattr(quantised, "_neighbours", lambda preset: ())
    preset = Quantisation.get(name)
    full = {"qmax": 57344.0, "qmin": -57344.0} if changes.get("element") == "e5m2" else {}
    if changes == {"global_scale": "amax"}:
        full = {"scale": "amax * (g * (1 / qmax))"}
    dtype = "float32" if name == "llama.q8_0" else "bfloat16"
    refused(preset, kernel(preset, preset.replace(**changes, **full)), dtypes=dtype)


NAMED = [
    ("vllm.static", {"rounding": "half_away"}), ("vllm.static", {"round_norm": False}),
    ("torchao.mx", {"scale_round": "ceil"}), ("te.mxfp8", {"order": "gain_first"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), NAMED)
def test_one_wrong_field_is_named(name, changes):
    mutant = Quantisation.get(name).replace(**changes)
    report = refused(name, kernel(mutant), dtypes="bfloat16")
    assert not report.instead
    assert mutant.label in report.run.message


def test_every_field_has_a_mutant():
    fields = {field.name for field in dataclasses.fields(Quantisation)} - {"name", "source"}
    assert fields == {next(iter(changes)) for _, changes in MUTANTS}


def test_a_function_with_two_wrong_fields_is_no_preset():
    report = refused("vllm.static", kernel(STATIC, STATIC.replace(rounding="truncate", nan="zero")), dtypes="bfloat16")
    assert report.run.message == "it is no preset, nor vllm.static but for one field"


# How a function is called, and what it may return.


STATIC, MX = Quantisation.get("vllm.static"), Quantisation.get("torchao.mx")


def test_codes_in_bytes_and_two_in_a_byte():
    of_static, of_fp4 = kernel(STATIC), kernel(Quantisation.get("flashinfer.fp4"))

    def bytes_of(x, scale, **options):
        return tuple(output.view(np.uint8) for output in of_static(x, scale, **options))

    def pairs(x, scale, *, eps, global_scale, swapped=False):
        q, s = of_fp4(x, scale, eps=eps, global_scale=global_scale)
        low, high = q.view(np.uint8)[..., ::2], q.view(np.uint8)[..., 1::2]
        low, high = (high, low) if swapped else (low, high)
        return low | (high << 4), s.view(np.uint8)

    def without_residual(x, scale, *, eps, static_scale):
        return bytes_of(x, scale, eps=eps, static_scale=static_scale)[0]

    assert check_quantised(without_residual, "vllm.static", dtypes="bfloat16").passed
    assert check_quantised(pairs, "flashinfer.fp4", dtypes="bfloat16").passed
    refused("flashinfer.fp4", pairs, dtypes="bfloat16", init={"swapped": True})


def test_tensors_of_torch_with_its_float8():
    torch = pytest.importorskip("torch")

    def in_torch(x, scale, *, eps, static_scale, residual=None):
        h = x if residual is None else x + residual
        wide = h.float()
        inverse = 1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
        y = (wide * inverse).to(x.dtype) * scale
        v = y.float() * (1 / torch.tensor(static_scale))
        v = torch.where(v.isnan(), 448.0, v).clamp(-448, 448)
        q = v.to(torch.float8_e4m3fn)
        return q if residual is None else (q, h)

    result = check_quantised(in_torch, STATIC)
    assert result.passed, result.text
    assert result.run.name == "torch"
    assert result.text.splitlines()[0].startswith(f"{__name__}:test_tensors_of_torch_with_its_float8")


def test_on_a_gpu_it_needs_no_framework_and_leaves_out_the_libraries_without_one(monkeypatch):
    """Also NumPy, which is always loaded. The tensors of this GPU are on the CPU."""
    torch, opened = pytest.importorskip("torch"), Torch.__init__

    def on_the_cpu(self, device="cpu"):
        opened(self, device)
        self.device = "cpu"

    def in_torch(x, scale, *, eps, static_scale):
        y = (x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype) * scale
        v = y.float() * (1 / torch.tensor(static_scale))
        return torch.where(v.isnan(), 448.0, v).clamp(-448, 448).to(torch.float8_e4m3fn)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Torch, "__init__", on_the_cpu)
    result = check_quantised(in_torch, "vllm.static", dtypes="bfloat16", device="cuda")
    assert result.passed, result.text
    assert (result.run.name, result.run.device) == ("torch", "cuda")


@pytest.mark.slow
def test_h_is_judged_by_its_bits_and_scales_by_their_block():
    of_static, of_mx = kernel(STATIC), kernel(MX)

    def one_bit(x, scale, *, eps, static_scale, residual=None):
        q, *h = of_static(x, scale, eps=eps, static_scale=static_scale, residual=residual)
        return q if not h else (q, np.nextafter(h[0], h[0].dtype.type(9)))

    def neighbour(x, scale, *, eps):
        q, s = of_mx(x, scale, eps=eps)
        return q, np.roll(s, 1, axis=-1)

    assert {r.quantity for r in refused("vllm.static", one_bit, dtypes="bfloat16").run.failures} == {"h"}
    assert {r.quantity for r in refused("torchao.mx", neighbour, dtypes="bfloat16").run.failures} == {"scales", "q"}


def test_a_scale_that_moved_is_a_verdict_of_its_own():
    """As in another order of the sum, with its own codes; with the codes of the other scale it is wrong."""
    dynamic = Quantisation.get("vllm.dynamic_fp8")
    counts = check_quantised(kernel(dynamic, error=FLOAT32), dynamic, framework="numpy").counts
    assert 0 < counts["moved"] < counts["rows"] / 4

    def moved(x, scale, *, eps):
        q, s = kernel(dynamic)(x, scale, eps=eps)
        return q, s * np.float32(1 + 2.0**-7)

    failures = refused(dynamic, moved, dtypes="bfloat16").run.failures
    assert {"scales", "q"} == {record.quantity for record in failures}
    assert "expected" in failures[0].detail


def test_what_has_another_layout_is_asked_for_an_adapter():
    of_mx = kernel(MX)
    with pytest.raises(
        ValueError, match=r"^check_quantised: function is .*, expected a function f.x, scale, \*, eps, st"
    ):
        check_quantised(lambda x, scale: x, "vllm.static")
    with pytest.raises(ValueError, match=r"quantisation is 'vllm.dynamic', .*did you mean 'vllm.dynamic_fp8'"):
        check_quantised(of_mx, "vllm.dynamic")
    with pytest.raises(TypeError, match=r"function is 3 .int., expected a function of x, the gain and options"):
        check_quantised(3, "vllm.static")
    end = "or its codes in uint8; write an adapter"
    layouts = {
        rf"scales is .*\[32, 2\], expected .*\[2, 32\], {end}": lambda q, s: (q, s.T),
        r"1 outputs, expected q, scales; write an adapter that returns these": lambda q, s: q,
        rf"q is f32\[2, 1024\], expected .*, {end}": lambda q, s: (q.astype(F32), s),
        r"q is a list, expected numpy.ndarray": lambda q, s: (q.tolist(), s),
    }
    for sentence, layout in layouts.items():

        def other(x, scale, *, eps, layout=layout):
            return layout(*of_mx(x, scale, eps=eps))

        details = refused("torchao.mx", other, dtypes="bfloat16").details
        assert re.search(sentence, details), details


def test_an_exception_and_a_write_to_an_input_are_wrong():
    def writes(x, scale, *, eps):
        x[...] = 0
        return kernel(MX)(x, scale, eps=eps)

    def raises(x, scale, *, eps):
        raise RuntimeError("no kernel for this")

    assert "inputs written to: x" in refused("torchao.mx", writes, dtypes="bfloat16").details
    assert "RuntimeError: no kernel for this" in refused("torchao.mx", raises, dtypes="bfloat16").details


def test_a_residual_that_is_required_is_in_every_case_and_without_one_it_is_said():
    def required(x, scale, *, eps, static_scale, residual):
        return kernel(STATIC)(x, scale, eps=eps, static_scale=static_scale, residual=residual)

    result = check_quantised(required, "vllm.static", dtypes="bfloat16")
    assert result.passed, result.text
    assert sum(r.quantity == "h" for r in result.run.records) == result.run.cases
    none = check_quantised(lambda x, scale, *, eps: kernel(MX)(x, scale, eps=eps), MX, dtypes="bfloat16")
    assert "not compared: h: it takes no argument residual" in none.text


def test_approximate_reciprocals_have_both_codes_of_a_tie():
    def approximate(x, scale, *, eps, static_scale):
        return kernel(STATIC)(x, scale, eps=eps, static_scale=F32(static_scale) * F32(1 + 2.0**-22))[0]

    refused("vllm.static", approximate, dtypes="bfloat16")
    report = check_quantised(approximate, "vllm.static", dtypes="bfloat16", reciprocal_slack=2.0**-21)
    assert report.passed, report.text
    assert report.counts["tie"] > 100


def test_the_fixture_and_the_reports(rmsnorm_parity, tmp_path):
    report = rmsnorm_parity(kernel(MX), quantisation="torchao.mx", dtypes="bfloat16", framework="numpy")
    assert report.quantisation is MX
    wrong = refused("torchao.mx", kernel(MX, MX.replace(scale_round="ceil")), dtypes="bfloat16")
    with pytest.raises(pytest.fail.Exception, match=r"is not torchao\.mx"):
        rmsnorm_parity(kernel(MX, MX.replace(scale_round="ceil")), quantisation=MX, dtypes="bfloat16")
    reports.write_json([wrong.run], tmp_path / "a.json")
    assert "it is torchao.mx with scale_round=" in (tmp_path / "a.json").read_text(encoding="utf-8")
