"""What reports say: the text and the JSON of `check` and of `selftest`, and the fixture of pytest."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from commands import rmsnorm
from rich.console import Console

from rmsnorm import PRESETS, Variant
from rmsnorm.parity import check, report
from rmsnorm.parity.comparison import Comparison, Run
from rmsnorm.parity.selftest import compare
from rmsnorm.targets import open_target

pytestmark = pytest.mark.usefixtures("few_circumstances")
OPTIONS: dict[str, Any] = {"framework": "numpy", "dtypes": "float32"}
NORM = """
import numpy as np

def norm(x, weight):
    wide = x.astype(np.float64)
    normalised = (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
    y = normalised.astype(np.float64) * weight.astype(np.float64)
    return y.astype(x.dtype if weight.dtype == x.dtype else np.float32)
"""


# Of check.


def test_the_text_says_where_and_what_it_is_instead() -> None:
    def wrong(x: Any, weight: Any) -> Any:
        y = zoo.llama(x, weight)
        if y.ndim == 2 and len(y) > 1 and y.size > 3000:
            y[1, 2] = -y[1, 2]
        return y

    result = check(wrong, "llama", dtypes="float32")
    assert str(result) == repr(result) == result.text
    lines, failures, records = result.text.splitlines(), result.run.failures, result.run.records
    assert "y of 1 row is another one, from row 1 on" in lines[0]
    assert f"{len(failures)} of {len(records)} comparisons differ (numpy {np.__version__} on cpu), in " in result.text
    data = failures[0]
    assert data.detail.startswith("at (1, 2) got ")
    full = f"  {data.case!r} f32 y: {data.detail}; parity ratio {data.parity_ratio:.3g}, bound {data.bound:.3g}"
    assert full in result.details.splitlines()
    assert "f32 y: at (1, 2) got " in " ".join(result.text.split())
    other = check(zoo.llama, Variant.get("llama").replace(eps=1e-3), dtypes="float32")
    assert other.text.splitlines()[:2] == [
        "zoo:llama is not llama with eps=0.001: eps is 1e-06, llama has 0.001", "mend: take eps 0.001",
    ]  # fmt: skip


def test_what_was_not_compared_is_listed_with_the_reason(tmp_path: Path) -> None:
    result = check(lambda x, weight, bias: zoo.standard(x, weight) + x.dtype.type(bias), **OPTIONS, init={"bias": 0.0})
    assert result.passed
    assert "not compared: gradients: numpy has no automatic differentiation" in result.text
    assert "not compared: huge, tiny: only with extremes=True, or --extremes" in result.text
    assert "not compared: gate, mask, residual: it has no argument of that name" in result.text
    report.write_json([result.run], tmp_path / "a.json")
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    reason = "it has no argument of that name"
    assert {"case": "mask", "dtype": "", "reason": reason, "edge": False} in backend["skipped"]


def test_a_check_of_nothing_fails() -> None:
    target = replace(open_target(zoo.standard, framework="numpy"), dtypes={"x": "float64"})
    with pytest.raises(ValueError, match=r"standard was compared in no case, "):
        check(target, dtypes="float32")
    (failure,) = check(zoo.standard, **OPTIONS, quantities=("y", "dx")).run.failures
    assert (failure.quantity, failure.detail) == ("dx", "it was compared in no case")


# Of the command.


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("own:norm --variant llama --dtype bfloat16", 0, "own:norm is llama: all "),
        ("own.py:norm --framework numpy --variant gemma", 1, "scale_offset is 0.0, gemma has 1.0"),
        ("own:norm --variant mlx --eps 1e-6 --dtype float32", 0, "own:norm is mlx"),
        ("own:norm --eps nan", 2, "rmsnorm check: "),
        ("--eps 1e-5", 2, "rmsnorm check: TARGET is missing"),
        ("own:nothing", 2, "rmsnorm check: own has no 'nothing'; check the name"),
        ("own:norm --variant llama --variant t5", 2, "--variant is given 2 times, expected one for a TARGET"),
        ("own:norm --quantisation onnx", 2, "quantisation is 'onnx', expected"),
        *((f"own:norm --quantisation onnx.qdq {option}", 2,
           f"{option.split()[0]} is for a norm, expected none beside --quantisation; drop it")
          for option in ("--eps 1e-5", "--extremes", "--quantity y", "--variant llama")),
    ],
)  # fmt: skip
def test_the_command_checks_a_target(
    arguments: str, status: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(NORM)
    monkeypatch.chdir(tmp_path)
    done = rmsnorm("check", *arguments.split())
    assert done.exit_code == status, done.output
    assert words in " ".join(done.output.split())


def test_lines_are_short_verbose_prints_the_rest_and_json_has_the_answer_of_identify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(NORM)
    monkeypatch.chdir(tmp_path)
    command = ("check", "own:norm", "--framework", "numpy", "--dtype", "bfloat16", "--variant", "llama")
    differs = rmsnorm(*command, "--eps", "1e-5", "--json", "a.json")
    assert (differs.exit_code, "eps is 1e-06, llama has 1e-05" in differs.output) == (1, True)
    lines = differs.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 100
    shown = rmsnorm(*command, "--eps", "1e-5", "-v").stdout
    assert shown.splitlines()[: len(lines)] == lines
    assert "parity ratio" in shown
    document = json.loads(Path("a.json").read_text())
    (backend,) = document["backends"]
    identity = backend["identity"]
    eps = {finding["name"]: finding["value"] for finding in identity["findings"]}["eps"]
    assert (identity["variant"]["rounding"], eps) == (PRESETS["llama"].rounding, 1e-6)
    assert "own:norm is close to RMSNorm" in backend["message"]
    assert {record["backend"] for record in document["records"]} == {backend["backend"]}
    assert rmsnorm(*command, "--json", "a.json").exit_code == 0
    assert json.loads(Path("a.json").read_text())["backends"][0]["identity"] is None, "it is not asked where all agrees"


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
        ("Norm", 2),
        ("Norm --init secret=64", 0),
        ("Norm --init secret=64 --init group=16 --group-size 16", 0),
        ("WithoutGradient --init secret=64 --no-gradients", 0),
        ("WithoutGradient --init secret=64", 1),
    ],
)
@pytest.mark.parametrize("command", ["check", "identify"])
def test_a_class_is_opened_in_the_same_way_by_both(command: str, arguments: str, status: int, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    (tmp_path / "own.py").write_text(CLASSES)
    name, *options = arguments.split()
    own = ["--variant", "llama", "--dtype", "float32"] if command == "check" else []
    done = rmsnorm(command, f"{tmp_path}/own.py:{name}", *options, *own)
    assert done.exit_code == status, done.output
    assert (f"rmsnorm {command}: " in done.stderr) == (status == 2)


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


# Of selftest.


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    difference = Comparison(
        "y", parity_ratio=3.5, bound=2.0, bit_identical=0.75, max_ulp=1.0, passed=False,
        detail="at (0, 0) got 1.0", variant="llama", dtype="bfloat16", case="rows",
    )  # fmt: skip
    differs = Run("differs", version="9.9", device="cpu", cases=1, records=[difference])
    differs.conclude()
    seen: list[tuple[int, int]] = []
    held = compare("numpy", variants=["t5"], dtypes=["float32"], on_progress=lambda *progress: seen.append(progress))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)], "case by case"
    return [
        Run("killed", "crashed", "its process was ended by SIGKILL"),
        Run("hung", "hung", "its process did not answer within 20 seconds"),
        Run("absent", "absent", "pip install it"), differs, held,
    ]  # fmt: skip


def test_runs_have_a_status(runs: list[Run]) -> None:
    honest, silent, refused = runs[-1], Run("silent"), compare("numpy", device="cuda")
    assert (honest.status, bool(honest.version)) == ("held", True)
    assert all(record.passed and record.case and record.variant == "t5" for record in honest.records)
    assert {"y", "inverse_rms", "dx", "dscale", "jvp"} <= {record.quantity for record in honest.records}
    silent.conclude()
    assert (silent.status, silent.message) == ("refused", "no comparison was made")
    assert refused.status == "refused"
    assert refused.message == "numpy: device is 'cuda', expected 'cpu'; choose one of these"


def test_runs_are_written_and_shown(runs: list[Run], tmp_path: Path) -> None:
    report.write_json(runs, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert {backend["backend"]: backend["status"] for backend in document["backends"]}["hung"] == "hung"
    wanted = {
        "backend", "framework_version", "device", "variant", "dtype", "case", "quantity", "parity_ratio", "bound",
        "bit_identical", "max_ulp", "passed",
    }  # fmt: skip
    assert all(wanted <= record.keys() for record in document["records"])
    assert sum(not record["passed"] for record in document["records"]) == 1
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.terminal(runs))
    text = console.export_text()
    assert "differs llama bf16 'rows' y: parity ratio 3.5, bound 2; 75.00 % identical" in text
    for words in ("killed crashed: its process was ended by SIGKILL", "absent absent: pip install it",
                  "hung hung: its process did not answer within 20 seconds"):  # fmt: skip
        assert words in text
    assert "NumPy held: all" in "\n".join(text.splitlines()[: len(runs)]), "verdicts come first"
