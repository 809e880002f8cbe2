"""What `check` says: every defect by its name, what was not compared, and a refusal where that is everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy_zoo
import pytest
from commands import rmsnorm

from rmsnorm import PRESETS
from rmsnorm.accuracy.bounds import bound
from rmsnorm.parity import check, report
from rmsnorm.parity.cases import CASES, make
from rmsnorm.targets import open_target

pytestmark = pytest.mark.usefixtures("few_circumstances")

BY_NAME = {case.name: case for case in CASES}
OPTIONS: dict[str, Any] = {"framework": "numpy", "dtypes": "float32"}


def written(x: Any, weight: Any, bias: Any = 0.0) -> Any:
    return (numpy_zoo.no_gain(x.astype(np.float64)) * weight.astype(np.float64) + bias).astype(x.dtype)


def test_what_was_not_compared_is_listed_with_the_reason(tmp_path: Path) -> None:
    result = check(written, **OPTIONS, init={"bias": 0.0})
    assert result.passed
    assert "not compared: gradients: numpy has no automatic differentiation" in result.text
    assert "not compared: huge, tiny: only with extremes=True, or --extremes" in result.text
    assert "not compared: gate, mask, residual: it has no argument of that name" in result.text
    report.write_json([result.run], tmp_path / "a.json")
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    reason = "it has no argument of that name"
    assert {"case": "mask", "dtype": "", "reason": reason, "edge": False} in backend["skipped"]


def test_lines_are_short_and_verbose_prints_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(NORM.replace("np.float64", "x.dtype"))
    monkeypatch.chdir(tmp_path)
    command = ("check", "own:norm", "--framework", "numpy")
    lines = rmsnorm(*command).stdout.splitlines()
    assert max(map(len, lines[1:])) <= 100
    shown = rmsnorm(*command, "-v").stdout
    assert shown.splitlines()[: len(lines)] == lines
    assert "parity ratio" in shown


def test_jax_is_asked_less() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed; pip install '.[flax]'")

    def norm(x: Any) -> Any:
        wide = x.astype("float32")
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    result = check(norm, framework="jax", dtypes=["float32", "bfloat16"])
    assert result.passed, result.text
    assert "not compared: some rows, widths and calls before: only with strength=2 or more, or --all" in result.text
    assert not {record.case for record in result.run.records if "8,209 rows" in record.case}
    assert {record.quantity for record in result.run.records} == {"y", "dx"}


def test_a_check_of_nothing_is_refused() -> None:
    target = open_target(written, framework="numpy", init={"bias": 0.0})
    with pytest.raises(ValueError, match=r"written was compared in no case, "):
        check(replace(target, dtypes={"x": "float64"}), dtypes="float32")


def test_automatic_differentiation_may_round_what_the_formulas_do_not() -> None:
    for variant, extra in (("llama", {"dx": 2, "dscale": 2, "y": 0}), ("standard", {"dx": 1, "dscale": 0, "y": 0})):
        call = make(BY_NAME["rows"], variant, "bfloat16").call
        for name, roundings in extra.items():
            ours, another = (bound(name, call, "bfloat16", automatic=automatic) for automatic in (False, True))
            assert another - ours == pytest.approx(roundings)


def test_opening_a_backend_leaves_jax_as_it_is() -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed; pip install '.[flax]'")
    from rmsnorm.parity.backends import open_backend

    own = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        open_backend("flax", "cpu")
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", own)


NORM = """
import numpy as np

def norm(x, weight):
    wide = x.astype(np.float64)
    normalised = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
    y = normalised.astype(np.float64) * weight.astype(np.float64)
    return y.astype(x.dtype if weight.dtype == x.dtype else np.float32)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["own:norm", "--variant", "llama", "--dtype", "bfloat16"], 0, "own:norm is llama: all "),
        (["own.py:norm", "--framework", "numpy", "--variant", "gemma"], 1, "scale_offset is 0.0, gemma has 1.0"),
        (["own:norm", "--variant", "llama", "--eps", "1e-5"], 1, "eps is 1e-06, llama has 1e-05"),
        (["own:norm", "--variant", "mlx", "--eps", "1e-6", "--dtype", "float32"], 0, "own:norm is mlx"),
        (["own:norm", "--eps", "nan"], 2, "rmsnorm check: "),
        (["--eps", "1e-5"], 2, "rmsnorm check: TARGET is missing"),
        (["own:nothing"], 2, "rmsnorm check: own has no 'nothing'; check the name"),
        (
            ["own:norm", "--variant", "llama", "--variant", "t5"],
            2,
            "--variant is given 2 times, expected one for a TARGET",
        ),
    ],
)
def test_the_command_checks_a_target(
    arguments: list[str], status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(NORM)
    monkeypatch.chdir(tmp_path)
    done = rmsnorm("check", *arguments)
    assert done.exit_code == status, done.output
    assert words in done.output


CLASSES = """
import torch

class Norm(torch.nn.Module):
    def __init__(self, secret, eps=1e-6, group=None):
        super().__init__()
        self.weight, self.eps, self.group = torch.nn.Parameter(torch.ones(secret)), eps, group

    def forward(self, x):
        h = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.flatten(-2).type_as(x) * self.weight

class WithoutGradient(Norm):
    def forward(self, x):
        return super().forward(x.detach()) + 0 * x
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["Norm"], 2),
        (["Norm", "--init", "secret=64"], 0),
        (["Norm", "--init", '{"secret": 64, "eps": 1e-5}'], 1),
        (["Norm", "--init", "secret=64", "--init", "group=16", "--group-size", "16"], 0),
        (["Norm", "--init", "secret=64", "--init", "group=16", "--group-size", "32"], 1),
        (["WithoutGradient", "--init", "secret=64", "--no-gradients"], 0),
        (["WithoutGradient", "--init", "secret=64"], 1),
    ],
)
@pytest.mark.parametrize("command", ["check", "identify"])
def test_a_class_is_opened_in_the_same_way_by_both(
    command: str, arguments: list[str], status: int, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    (tmp_path / "own.py").write_text(CLASSES)
    name, *options = arguments
    own = ["--variant", "llama", "--dtype", "float32"] if command == "check" else []
    done = rmsnorm(command, f"{tmp_path}/own.py:{name}", *options, *own)
    if command == "identify" and "1e-5" in str(options):
        status = 0  # it has another eps, which is no defect
    assert done.exit_code == status, done.output
    assert (f"rmsnorm {command}: " in done.stderr) == (status == 2)


def test_the_json_has_the_answer_of_identify_as_data(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NORM)
    target, file = f"{tmp_path}/own.py:norm", tmp_path / "a.json"
    options = ["--framework", "numpy", "--dtype", "bfloat16", "--json", file]
    assert rmsnorm("check", target, "--variant", "llama", "--eps", "1e-5", *options).exit_code == 1
    document = json.loads(file.read_text())
    (backend,) = document["backends"]
    identity = backend["identity"]
    eps = {finding["name"]: finding["value"] for finding in identity["findings"]}["eps"]
    assert (identity["variant"]["rounding"], eps) == (PRESETS["llama"].rounding, 1e-6)
    assert f"{target} is close to RMSNorm" in backend["message"]
    assert {record["backend"] for record in document["records"]} == {backend["backend"]}
    assert rmsnorm("check", target, "--variant", "llama", *options).exit_code == 0
    assert json.loads(file.read_text())["backends"][0]["identity"] is None, "it is not asked where everything agrees"


def test_what_a_terminal_obeys_and_what_is_no_text_is_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/own\xff.py")
    Path(name).write_text("def norm(x):\n    raise ValueError('\\x1b[31mred \\x00 \\ud800')\n")
    file = tmp_path / "a.json"
    command = [sys.executable, "-m", "rmsnorm", "check", f"{name}:norm", "--framework", "numpy", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    assert done.returncode == 1, done.stderr
    for text in (done.stdout, file.read_text("utf-8")):
        assert "\x1b" not in text
        assert "[31mred" in text


def test_a_norm_that_is_wrong_with_six_axes_alone_is_rejected() -> None:
    def norm(x: Any, weight: Any) -> Any:
        return numpy_zoo.standard(x, weight) * (2 if x.ndim == 6 else 1)

    report = check(norm, dtypes="float32", framework="numpy")
    assert not report.passed
    assert "circumstances, each with '6 axes'" in report.text.splitlines()[0]
