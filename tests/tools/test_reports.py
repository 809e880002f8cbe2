"""What reports say: the text and the JSON of `check` and of `selftest`."""

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
from test_commands import FILES

from rmsnorm import PRESETS, Variant
from rmsnorm.parity import check, report
from rmsnorm.parity.comparison import Comparison, Run
from rmsnorm.parity.selftest import compare
from rmsnorm.targets import open_target

pytestmark = pytest.mark.usefixtures("few_circumstances")
OPTIONS: dict[str, Any] = {"framework": "numpy", "dtypes": "float32"}
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


def test_lines_are_short_verbose_prints_the_rest_and_json_has_the_answer_of_identify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(FILES["own.py"])
    monkeypatch.chdir(tmp_path)
    command = ("check", "own:norm", "--framework", "numpy", "--dtype", "bfloat16", "--variant", "llama")
    lines = rmsnorm(*command, "--eps", "1e-5", "--json", "a.json").stdout.splitlines()
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


def test_what_a_terminal_obeys_and_what_is_no_text_is_escaped(tmp_path: Path) -> None:
    name, file = os.fsdecode(os.fsencode(tmp_path) + b"/own\xff.py"), tmp_path / "a.json"
    Path(name).write_text("def norm(x):\n    raise ValueError('\\x1b[31mred \\x00 \\ud800')\n")
    command = [sys.executable, "-m", "rmsnorm", "check", f"{name}:norm", "--framework", "numpy", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300)
    assert done.returncode == 1, done.stderr
    for text in (done.stdout, file.read_text("utf-8")):
        assert "\x1b" not in text
        assert "[31mred" in text


# Of selftest.


DIFFERENCE = Comparison(
    "y", parity_ratio=3.5, bound=2.0, bit_identical=0.75, max_ulp=1.0, passed=False,
    detail="at (0, 0) got 1.0", variant="llama", dtype="bfloat16", case="rows",
)  # fmt: skip


def test_runs_have_a_status() -> None:
    seen: list[tuple[int, int]] = []
    honest = compare("numpy", variants=["t5"], dtypes=["float32"], on_progress=lambda *progress: seen.append(progress))
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)], "case by case"
    silent, refused = Run("silent"), compare("numpy", device="cuda")
    assert (honest.status, bool(honest.version)) == ("held", True)
    assert all(record.passed and record.case and record.variant == "t5" for record in honest.records)
    assert {"y", "inverse_rms", "dx", "dscale", "jvp"} <= {record.quantity for record in honest.records}
    silent.conclude()
    assert (silent.status, silent.message) == ("refused", "no comparison was made")
    words = "numpy: device is 'cuda', expected 'cpu'; choose one of these"
    assert (refused.status, refused.message) == ("refused", words)


def test_runs_are_written_and_shown(tmp_path: Path) -> None:
    differs = Run("differs", version="9.9", device="cpu", cases=1, records=[DIFFERENCE])
    differs.conclude()
    runs = [
        Run("killed", "crashed", "its process was ended by SIGKILL"),
        Run("absent", "absent", "pip install it"),
        differs,
    ]
    report.write_json(runs, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    statuses = {backend["backend"]: backend["status"] for backend in document["backends"]}
    assert statuses == {"killed": "crashed", "absent": "absent", "differs": "differs"}
    (record,) = document["records"]
    wanted = ["variant", "dtype", "case", "quantity", "parity_ratio", "bound", "bit_identical", "max_ulp", "passed"]
    assert {name: record[name] for name in wanted} == {name: getattr(DIFFERENCE, name) for name in wanted}
    assert (record["backend"], record["framework_version"], record["device"]) == ("differs", "9.9", "cpu")
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.terminal(runs))
    text = console.export_text()
    for words in ("differs llama bf16 'rows' y: parity ratio 3.5, bound 2; 75.00 % identical",
                  "killed crashed: its process was ended by SIGKILL", "absent absent: pip install it"):  # fmt: skip
        assert words in text
    assert "differs differs: " in "\n".join(text.splitlines()[: len(runs)]), "verdicts come first"
