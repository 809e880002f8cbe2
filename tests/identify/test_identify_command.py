"""The command identify: its report and exit status, a target that hangs, and the page of a package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import rmsnorm

pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")


def first_axis(x):
    h = x.float()
    return (h * (h.square().mean(0, keepdim=True) + 1e-6).rsqrt()).type_as(x)


def run(*arguments, path=Path(__file__).parents[1]):  # which this file imports from
    return rmsnorm("identify", *arguments, path=path)


def test_the_command_reports_and_exits():
    shown = run("torch.nn:RMSNorm")
    assert "eps_position" in shown.stdout
    assert shown.exit_code == 0, shown.stderr
    assert "torch.nn:RMSNorm is RMSNorm: the variant torch" in shown.stdout
    shown = run(f"{__file__}:first_axis", "--shape", "64x3", "--axis", "0", "--framework", "torch")
    assert shown.exit_code == 0, shown.stderr
    assert "is RMSNorm over axis 0 of 2 (not the last): the variant standard" in shown.stdout
    shown = run("torch.nn:LayerNorm", "--json")
    assert shown.exit_code == 1
    assert json.loads(shown.stdout)["kind"] == "layernorm"


def test_the_short_report_has_the_defects_first_and_fits_into_80_columns(tmp_path):
    (tmp_path / "own.py").write_text(
        "import numpy as np\n\ndef norm(x, weight):\n"
        "    rho = np.sqrt((x * x).sum(-1, keepdims=True) / max(1, x.shape[-1] - 1))\n"
        "    return (x / rho * weight).astype(x.dtype)\n"
    )
    lines = rmsnorm("identify", f"{tmp_path}/own.py:norm", "--framework", "numpy").stdout.splitlines()
    assert lines[1] == "defect: the sum of squares is divided by n - 1 = 63"
    assert lines[2].startswith("to make it ")
    assert "divide the sum of squares by n" in lines[2]
    assert max(map(len, lines[1:])) <= 80
    assert len(lines) <= 3 + 1 + 2 + 8 + 1  # and the rest of the advice, a header, eight findings, and the last line
    full = rmsnorm("identify", f"{tmp_path}/own.py:norm", "--framework", "numpy", "-v").stdout
    assert "widths" in full
    assert "widths" not in "\n".join(lines)


def test_a_limit_may_be_infinite(tmp_path):
    (tmp_path / "own.py").write_text("def norm(x):\n    return x\n")
    shown = run(f"{tmp_path}/own.py:norm", "--time-limit", "inf", "--framework", "numpy")
    assert "nothing is normalised" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_the_page_of_a_package_has_a_row_for_each_norm(tmp_path, monkeypatch):
    package = tmp_path / "zoo"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "norms.py").write_text(
        "import torch\n"
        "class ARMSNorm(torch.nn.RMSNorm):\n    def forward(self, x): return super().forward(x)\n"
        "class BRMSNorm(ARMSNorm):\n    def __init__(self, dim):\n        super().__init__(dim)\n"
        "        self.forward = self.forward\n    def forward(self, x): return super().forward(x)\n"
        "class OtherLayerNorm(torch.nn.Module):\n    def forward(self, x): return x * x.pow(2).mean(-1, True).rsqrt()\n"
        "class TrueLayerNorm(torch.nn.LayerNorm):\n    def forward(self, x): return super().forward(x) * 1**-0.5\n"
        "class OddRMSNorm(torch.nn.Module):\n    def __init__(self, secret): super().__init__()\n"
        "    def forward(self, x): return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    import norms

    monkeypatch.setattr(norms, "version", lambda package: "1.0")
    written = norms.page("zoo")
    assert "# The RMSNorms of zoo 1.0" in written
    assert "3 classes are RMSNorm or have its name." in written
    assert "`rmsnorm.conversion.replace` can replace 2 of them." in written
    assert (
        "| 2 | the variant torch | `ARMSNorm`, `BRMSNorm` | 1 yes; 1 no: its forward is not that of its class |"
        in written
    )
    assert "| `OtherLayerNorm` | yes |" in written
    assert "Not called: 1.\n\n- `OddRMSNorm`: it requires 'secret'" in written


@pytest.mark.parametrize("name", ["transformers.models.llama", "own.py"])
def test_a_package_or_a_file_is_asked_for_the_name_of_one_norm(name):
    shown = rmsnorm("identify", name)
    assert shown.exit_code == 2
    assert f"target is '{name}', expected module:attribute such as torch.nn:RMSNorm" in " ".join(shown.stderr.split())
