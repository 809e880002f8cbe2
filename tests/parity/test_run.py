"""Each backend runs in its own process: if one fails, the others finish, and the report says what happened."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rmsnorm.parity import report
from rmsnorm.parity.run import job_of, run
from rmsnorm.targets.processes import Worker, messages

HONEST = job_of("numpy", variants=["standard"], dtypes=["float32"])


@pytest.fixture(scope="module")
def runs():
    ends = ["killed", "raised", "silent", "exits", "hung", "chatty", "absent", "differs", "fewer", "numpy"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        return run(
            {name: {**HONEST, "end": name} for name in ends},
            asked={"exits": 2, "differs": 1, "fewer": 2, "numpy": 58}, function="worker_ends:end", patience=20.0,
            workers=3,
        )  # fmt: skip


@pytest.mark.slow
def test_every_end_is_reported_and_the_other_backends_finish(runs):
    statuses = {state.name: state.status for state in runs}
    assert statuses == {
        "killed": "crashed", "raised": "crashed", "silent": "refused", "exits": "crashed", "hung": "hung",
        "chatty": "refused", "absent": "absent", "differs": "differs", "fewer": "crashed", "numpy": "held",
    }  # fmt: skip
    messages = {state.name: state.message for state in runs}
    assert messages["killed"] == "signal 9; no output"
    assert messages["raised"] == "RuntimeError: cannot load the library"
    assert messages["silent"] == "no comparison was made", "a backend that compares nothing has not held"
    assert messages["exits"] == "exit status 0; no output"
    assert messages["hung"] == "the case 'rows' took more than 20 s"
    assert messages["chatty"] == "no comparison was made", "a backend that compares nothing has not held"
    assert messages["absent"] == "pip install it"
    assert messages["fewer"] == "1 results came, expected 2"
    assert [state.name for state in runs][:4] == ["killed", "raised", "silent", "exits"], "in the order of the jobs"


@pytest.mark.slow
def test_records_carry_what_ci_needs(runs):
    honest = runs[-1]
    assert honest.cases == 58
    assert {record.quantity for record in honest.records} == {
        "y", "inverse_rms", "dx", "dscale", "dbias", "dresidual", "dgate", "jvp",
    }  # fmt: skip
    assert honest.version
    assert all(record.passed and record.case and record.variant == "standard" for record in honest.records)


def test_output_that_cannot_be_read_is_no_result():
    code = 'print(\'hello, \'); print(\'{"hello": "9.9", "device": "cpu"}\'); print(\'{"records": [step 7\')'
    worker = Worker("broken")
    assert len(list(messages(worker, [sys.executable, "-c", code], patience=20.0))) == 1
    assert (worker.status, worker.message) == ("crashed", 'a result cannot be read: {"records": [step 7')


@pytest.mark.slow
def test_reports(runs, tmp_path):
    report.write_json(runs, tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert {backend["backend"]: backend["status"] for backend in document["backends"]}["hung"] == "hung"
    wanted = {
        "backend", "framework_version", "device", "variant", "dtype", "case", "quantity", "parity_ratio", "bound",
        "bit_identical", "max_ulp", "passed",
    }  # fmt: skip
    assert all(wanted <= record.keys() for record in document["records"])
    assert sum(not record["passed"] for record in document["records"]) == 3
    (detail,) = (record["detail"] for record in document["records"] if record["backend"] == "differs")
    assert detail == "at (0, 0) got 1.0"


@pytest.mark.slow
def test_the_terminal_shows_where_and_by_how_much(runs):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.terminal(runs))
    text = console.export_text()
    assert "differs llama bf16 'rows' y: parity ratio 3.5, bound 2; 75.00 % identical, bound 99.90 %" in text
    assert "hung hung: the case 'rows' took more than 20 s" in text
    assert "absent absent: pip install it" in text
    verdicts = "\n".join(text.splitlines()[: len(runs)])
    assert "NumPy held: all" in verdicts, "they come first"
    assert "1/rho    " not in text, "there are tables where they are asked for"
    console.print(report.terminal(runs, tables=True))
    assert "1/rho    " in console.export_text()


def test_progress_is_reported_case_by_case():
    seen = []
    run({"numpy": HONEST}, asked={"numpy": 58}, on_progress=lambda state: seen.append(state.cases))
    assert seen == sorted(seen)
    assert set(range(1, 24)) <= set(seen)


def test_a_device_that_numpy_lacks_is_refused():
    (state,) = run({"numpy": job_of("numpy", device="cuda")}, asked={})
    assert state.status == "refused"
    assert state.message == "numpy: device is 'cuda', expected 'cpu'; choose one of these"
