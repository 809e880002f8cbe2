"""The comparison of a backend with the golden: its records, its reports, and backends that have none."""

import io
import json

import pytest
from rich.console import Console

from rmsnorm.parity import report
from rmsnorm.parity.comparison import Comparison, Run
from rmsnorm.parity.selftest import compare

DIFFERENCE = Comparison(
    "y", parity_ratio=3.5, bound=2.0, bit_identical=0.75, max_ulp=1.0, passed=False,
    detail="at (0, 0) got 1.0", variant="llama", dtype="bfloat16", case="rows",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs():
    differs = Run("differs", version="9.9", device="cpu", cases=1, records=[DIFFERENCE])
    differs.conclude()
    return [
        Run("killed", "crashed", "its process was ended by SIGKILL"),
        Run("hung", "hung", "its process did not answer within 20 seconds"),
        Run("absent", "absent", "pip install it"),
        differs,
        compare("numpy", variants=["standard"], dtypes=["float32"]),
    ]


def test_records_carry_what_ci_needs(runs):
    honest = runs[-1]
    assert (honest.status, honest.cases) == ("held", 58)
    assert {record.quantity for record in honest.records} == {
        "y", "inverse_rms", "dx", "dscale", "dbias", "dresidual", "dgate", "jvp",
    }  # fmt: skip
    assert honest.version
    assert all(record.passed and record.case and record.variant == "standard" for record in honest.records)


def test_a_run_of_nothing_has_not_held():
    run = Run("silent")
    run.conclude()
    assert (run.status, run.message) == ("refused", "no comparison was made")


def test_reports(runs, tmp_path):
    report.write_json(runs, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert {backend["backend"]: backend["status"] for backend in document["backends"]}["hung"] == "hung"
    wanted = {
        "backend", "framework_version", "device", "variant", "dtype", "case", "quantity", "parity_ratio", "bound",
        "bit_identical", "max_ulp", "passed",
    }  # fmt: skip
    assert all(wanted <= record.keys() for record in document["records"])
    assert sum(not record["passed"] for record in document["records"]) == 1


def test_the_terminal_shows_where_and_by_how_much(runs):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.terminal(runs))
    text = console.export_text()
    assert "differs llama bf16 'rows' y: parity ratio 3.5, bound 2; 75.00 % identical" in text
    assert "killed crashed: its process was ended by SIGKILL" in text
    assert "hung hung: its process did not answer within 20 seconds" in text
    assert "absent absent: pip install it" in text
    verdicts = "\n".join(text.splitlines()[: len(runs)])
    assert "NumPy held: all" in verdicts, "they come first"


def test_progress_is_reported_case_by_case():
    seen = []
    compare("numpy", variants=["t5"], dtypes=["float32"], on_progress=lambda *progress: seen.append(progress))
    assert len(seen) > 1
    assert seen == [(done, len(seen)) for done in range(1, len(seen) + 1)]


def test_a_device_that_numpy_lacks_is_refused():
    run = compare("numpy", device="cuda")
    assert run.status == "refused"
    assert run.message == "numpy: device is 'cuda', expected 'cpu'; choose one of these"
