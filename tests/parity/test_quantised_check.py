"""``check_quantised``: kernels whose 1 / rho is that of float32 pass, and one wrong field is refused."""

from __future__ import annotations

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
STATIC, DYNAMIC, FP4, MX = map(Quantisation.get, ("vllm.static", "vllm.dynamic_fp8", "flashinfer.fp4", "torchao.mx"))


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


def refused(preset, function, *, search=False, dtypes="bfloat16", **options):
    """Its report. search: for what it is instead, which takes several times as long."""
    with pytest.MonkeyPatch.context() as patch:
        if not search:
            patch.setattr(quantised, "QUANTISATIONS", {})
            patch.setattr(quantised, "_neighbours", lambda preset: ())
        report = check_quantised(function, preset, framework="numpy", dtypes=dtypes, **options)
    assert not report.passed
    return report


@pytest.mark.parametrize("name", QUANTISATIONS)
def test_an_honest_kernel_passes(name):
    """One in every dtype, the others in one."""
    dtypes = None if name == DYNAMIC.name else ("float32", "float16", "bfloat16")[[*QUANTISATIONS].index(name) % 3]
    report = check_quantised(kernel(Quantisation.get(name), error=FLOAT32), name, framework="numpy", dtypes=dtypes)
    assert report.passed, report.text
    counts = report.counts
    assert (counts.get("wrong", 0), counts["rows"] > 100) == (0, True)
    assert counts.get("tie", 0) < counts["rows"]  # aiter: 126 or 127 for the largest of a row
    if name == DYNAMIC.name:
        assert 0 < counts["moved"] < counts["rows"] / 4


MUTANTS = {  # each choice once, in a preset without it
    "vllm.static": [
        {"element": "e5m2", "qmax": 57344.0, "qmin": -57344.0}, {"element": "e4m3fnuz", "qmax": 240.0, "qmin": -240.0},
        {"qmax": 240.0, "qmin": -240.0}, {"residual_rounding": "truncate"}, {"statistic_reads": "sum"},
        {"values_read": "sum"}, {"round_norm": False}, {"round_gain": False}, {"offset": "exact"}, {"apply": "y / s"},
        {"round_scaled": "bfloat16"}, {"rounding": "half_down"}, {"overflow": "nan"}, {"nan": "nan"}, {"nan": "zero"},
    ],
    "vllm.dynamic_fp8": [
        {"block": 32}, {"amax_floor": 2.0**-8}, {"amax_nan": "keep"}, {"scale": "amax * (1 / qmax)"},
        {"scale_floor": 0.0}, {"scale_floor": 1e-10}, {"apply": "y * (1 / s)"},
    ],
    "flashinfer.static": [{"statistic_reads": "stored"}, {"values_read": "stored"}, {"round_gain": True}],
    "flashinfer.fp4": [
        {"order": "norm_first"}, {"zero_scale": "infinity"}, {"zero_scale": "largest"},
        {"global_scale": "amax", "scale": "amax * (g * (1 / qmax))"},
    ],
    "te.mxfp8": [{"order": "gain_first"}, {"round_norm": True}, {"scale_round": "floor"}, {"nan": "qmax"}],
    "te.nvfp4": [{"global_scale": "given"}, {"apply": "y * (g * (1 / s))"}, {"zero_scale": "zero"}],
    "torchao.mx": [
        {"block": 16}, {"amax_nan": "drop"}, {"quantise_with": "unrounded"}, {"scale_round": "rceil"},
        {"scale_round": "even"}, {"scale_round": "nearest"},
    ],  # and ceil below
    "aiter.int8": [{"residual_rounding": "nearest"}, {"amax_floor": 0.0}, {"scale": "amax / qmax"}],
    "llama.q8_0": [{"scale_format": "float32"}, {"quantise_with": "stored"}, {"rounding": "half_even"}],
    "onnx.qdq": [{"qmin": -127.0}, {"rounding": "half_away"}, {"rounding": "truncate"}, {"overflow": "wrap"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), [(name, changes) for name in MUTANTS for changes in MUTANTS[name]])
def test_one_wrong_field_is_refused(name, changes):
    preset = Quantisation.get(name)
    refused(preset, kernel(preset, preset.replace(**changes)), dtypes="float32" if name == "llama.q8_0" else "bfloat16")


@pytest.mark.parametrize(
    ("asked", "computed", "message"),
    [
        ("flashinfer.static", STATIC, "it is vllm.static"),
        ("torchao.mx", Quantisation.get("te.mxfp8"), "it is te.mxfp8"),
        ("trtllm.add_nvfp4", FP4, "it is flashinfer.fp4"),
        ("torchao.mx", MX.replace(scale_round="ceil"), "it is torchao.mx with scale_round='ceil'"),
        ("vllm.static", STATIC.replace(rounding="truncate", nan="zero"), "it is no preset, nor vllm.static but for "),
    ],
)
def test_the_report_says_what_it_is_instead(asked, computed, message, tmp_path):
    report = refused(asked, kernel(Quantisation.get(asked), computed), search=True)
    assert message in report.text
    assert report.instead == ((computed.name,) if computed == Quantisation.get(computed.name) else ())
    reports.write_json([report.run], tmp_path / "a.json")
    assert message in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_the_fixture(rmsnorm_parity):
    report = rmsnorm_parity(kernel(MX), quantisation="torchao.mx", dtypes="bfloat16", framework="numpy")
    assert report.quantisation is MX
    with pytest.raises(pytest.fail.Exception, match=r"is not torchao\.mx"):
        rmsnorm_parity(lambda x, scale, *, eps: x, quantisation=MX, dtypes="bfloat16", framework="numpy")


# How a function is called, and what it may return.


def test_codes_in_bytes_and_two_in_a_byte():
    def pairs(x, scale, *, eps, global_scale, swapped=False):
        q, s = kernel(FP4)(x, scale, eps=eps, global_scale=global_scale)
        low, high = q.view(np.uint8)[..., ::2], q.view(np.uint8)[..., 1::2]
        low, high = (high, low) if swapped else (low, high)
        return low | (high << 4), s.view(np.uint8)

    def without_residual(x, scale, *, eps, static_scale):
        return kernel(STATIC)(x, scale, eps=eps, static_scale=static_scale)[0].view(np.uint8)

    report = check_quantised(without_residual, "vllm.static", dtypes="bfloat16")
    assert report.passed
    assert "not compared: h: it takes no argument residual" in report.text
    assert check_quantised(pairs, "flashinfer.fp4", dtypes="bfloat16").passed
    refused("flashinfer.fp4", pairs, init={"swapped": True})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tensors_of_torch_with_its_float8(device, monkeypatch):
    """On a GPU it needs no framework and leaves out libraries without one. The tensors of this GPU are on the CPU."""
    torch, opened = pytest.importorskip("torch"), Torch.__init__

    def on_the_cpu(self, device="cpu"):
        opened(self, device)
        self.device = "cpu"

    def in_torch(x, scale, *, eps, static_scale, residual=None):
        h = x if residual is None else x + residual
        wide = h.float()
        y = (wide * (1 / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps))).to(x.dtype) * scale
        v = y.float() * (1 / torch.tensor(static_scale))
        q = torch.where(v.isnan(), 448.0, v).clamp(-448, 448).to(torch.float8_e4m3fn)
        return q if residual is None else (q, h)

    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(Torch, "__init__", on_the_cpu)
    report = check_quantised(in_torch, STATIC, dtypes=("bfloat16", "float16")[device == "cuda"], device=device)
    assert report.passed, report.text
    assert (report.run.name, report.run.device) == ("torch", device)
    assert report.text.splitlines()[0].startswith(f"{__name__}:test_tensors_of_torch_with_its_float8")


def test_each_output_is_judged():
    """h by its bits, the scales by their block; a scale that moved is wrong with the codes of the other scale."""

    def one_bit(x, scale, *, eps, static_scale, residual):  # which is then in every case
        q, h = kernel(STATIC)(x, scale, eps=eps, static_scale=static_scale, residual=residual)
        return q, np.nextafter(h, h.dtype.type(9))

    def neighbour(x, scale, *, eps):
        q, s = kernel(MX)(x, scale, eps=eps)
        return q, np.roll(s, 1, axis=-1)

    def moved(x, scale, *, eps):
        q, s = kernel(DYNAMIC)(x, scale, eps=eps)
        return q, s * F32(1 + 2.0**-7)

    reports_of = [refused(*pair).run for pair in ((STATIC, one_bit), (MX, neighbour), (DYNAMIC, moved))]
    assert [{r.quantity for r in run.failures} for run in reports_of] == [{"h"}, {"scales", "q"}, {"scales", "q"}]
    assert sum(r.quantity == "h" for r in reports_of[0].records) == reports_of[0].cases
    assert "expected" in reports_of[2].failures[0].detail


def test_what_has_another_layout_is_asked_for_an_adapter():
    wants = r"^check_quantised: function is .*, expected a function f.x, scale, \*, eps, st"
    with pytest.raises(ValueError, match=wants):
        check_quantised(lambda x, scale: x, "vllm.static")
    with pytest.raises(TypeError, match=r"function is 3 .int., expected a function of x, the gain and options"):
        check_quantised(3, "vllm.static")
    end = "or its codes in uint8; write an adapter"
    layouts = {
        rf"scales is .*\[32, 2\], expected .*\[2, 32\], {end}": lambda x, q, s: (q, s.T),
        r"1 outputs, expected q, scales; write an adapter that returns these": lambda x, q, s: q,
        rf"q is f32\[2, 1024\], expected .*, {end}": lambda x, q, s: (q.astype(F32), s),
        r"q is a list, expected numpy.ndarray": lambda x, q, s: (q.tolist(), s),
        "inputs written to: x": lambda x, q, s: (x.fill(0), q, s)[1:],
        "ZeroDivisionError": lambda x, q, s: 1 // 0,
    }
    for sentence, layout in layouts.items():

        def other(x, scale, *, eps, layout=layout):
            return layout(x, *kernel(MX)(x, scale, eps=eps))

        details = refused("torchao.mx", other).details
        assert re.search(sentence, details), details


def test_approximate_reciprocals_have_both_codes_of_a_tie():
    def approximate(x, scale, *, eps, static_scale):
        return kernel(STATIC)(x, scale, eps=eps, static_scale=F32(static_scale) * F32(1 + 2.0**-22))[0]

    refused("vllm.static", approximate)
    report = check_quantised(approximate, "vllm.static", dtypes="bfloat16", reciprocal_slack=2.0**-21)
    assert report.passed, report.text
    assert report.counts["tie"] > 100
