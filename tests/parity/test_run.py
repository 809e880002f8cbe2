"""Each backend runs in its own process: if one fails, the others finish, and the report says what happened."""

import io
import json
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from rmsnorm.parity import report
from rmsnorm.parity.run import run, worker_command

HONEST = worker_command("numpy", variants=["standard"], dtypes=["float32"])


def _python(code):
    return [sys.executable, "-c", code]


RECORD = {
    "variant": "llama", "dtype": "bfloat16", "case": "rows", "quantity": "y", "parity_ratio": 3.5, "bound": 2.0,
    "bit_identical": 0.75, "identical_bound": 0.999, "max_ulp": 1.0, "passed": False, "detail": "at (0, 0) got 1.0",
}  # fmt: skip
HELLO = json.dumps({"hello": "9.9", "device": "cpu"})
DIFFERS = _python(f'print({HELLO!r}); print({json.dumps({"records": [RECORD]})!r}); print(\'{{"status": "done"}}\')')


@pytest.fixture(scope="module")
def runs():
    return run(
        {
            "killed": _python(f"import os, signal; print({HELLO!r}, flush=True); os.kill(os.getpid(), signal.SIGKILL)"),
            "raised": _python("raise RuntimeError('cannot load the library')"),
            "silent": _python("pass"),
            "hung": _python(f"import time; print({HELLO!r}, flush=True); time.sleep(600)"),
            "chatty": _python("print('WARNING: a framework speaks'); print(3); print('{\"status\": \"done\"}')"),
            "absent": _python('print(\'{"status": "absent", "message": "pip install it"}\')'),
            "differs": DIFFERS,
            "broken": _python(f'print({HELLO!r}); print(\'{{"records": [step 7\'); print(\'{{"status": "done"}}\')'),
            "fewer": DIFFERS,
            "numpy": HONEST,
        },
        asked={"differs": 1, "broken": 1, "fewer": 2, "numpy": 34},
        patience=20.0,
        workers=3,
    )


def test_every_end_is_reported_and_the_other_backends_finish(runs):
    statuses = {state.name: state.status for state in runs}
    assert statuses == {
        "killed": "crashed", "raised": "crashed", "silent": "crashed", "hung": "hung", "chatty": "refused",
        "absent": "absent", "differs": "differs", "broken": "crashed", "fewer": "crashed", "numpy": "held",
    }  # fmt: skip
    messages = {state.name: state.message for state in runs}
    assert messages["killed"] == "signal 9; no output"
    assert messages["raised"] == "exit status 1; RuntimeError: cannot load the library"
    assert messages["hung"] == "no output for 20 s after 0 cases"
    assert messages["chatty"] == "no comparison was made", "a backend that compares nothing has not held"
    assert messages["absent"] == "pip install it"
    assert messages["broken"] == 'a result cannot be read: {"records": [step 7'
    assert messages["fewer"] == "1 results came, expected 2"
    assert [state.name for state in runs][:4] == ["killed", "raised", "silent", "hung"], "in the order of the commands"


def test_records_carry_what_ci_needs(runs):
    honest = runs[-1]
    assert honest.cases == 34
    assert {record.quantity for record in honest.records} == {
        "y", "inverse_rms", "dx", "dscale", "dbias", "dresidual", "dgate", "jvp",
    }  # fmt: skip
    assert honest.version
    assert all(record.passed and record.case and record.variant == "standard" for record in honest.records)


def test_a_framework_that_prints_into_the_results_costs_no_result():
    loud = (
        "import os, sys; from rmsnorm.parity import backends, run; open_backend = backends.open_backend\n"
        "def open_loud(*how):\n"
        "    version, norm = open_backend(*how)\n"
        "    return version, lambda data: (os.write(1, b'step 7 '), norm(data))[1]\n"
        "backends.open_backend = open_loud; os.write(1, b'hello '); run.main()"
    )
    (state,) = run({"numpy": [*_python(loud), *HONEST[-2:]]}, asked={"numpy": 34})
    assert (state.status, state.cases) == ("held", 34)


def test_reports(runs, tmp_path):
    for name, write in (("a.json", report.write_json), ("a.xml", report.write_junit)):
        write(runs, tmp_path / name)

    document = json.loads((tmp_path / "a.json").read_text())
    assert {backend["backend"]: backend["status"] for backend in document["backends"]}["hung"] == "hung"
    wanted = {
        "backend", "framework_version", "device", "variant", "dtype", "case", "quantity", "parity_ratio", "bound",
        "bit_identical", "max_ulp", "passed",
    }  # fmt: skip
    assert all(wanted <= record.keys() for record in document["records"])
    assert sum(not record["passed"] for record in document["records"]) == 2

    suites = {suite.get("name"): suite for suite in ElementTree.parse(tmp_path / "a.xml").getroot()}
    assert suites["differs"].get("failures") == "1"
    assert suites["differs"].find("testcase/failure").text == RECORD["detail"]
    assert [suites[name].get("errors") for name in ("killed", "hung", "numpy")] == ["1", "1", "0"]
    assert suites["absent"].get("skipped") == "1"
    assert int(suites["numpy"].get("tests")) == len(suites["numpy"].findall("testcase"))


def test_the_terminal_shows_where_and_by_how_much(runs):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report.terminal(runs))
    text = console.export_text()
    assert "differs llama bf16 'rows' y: parity ratio 3.5, bound 2; 75.00 % identical, bound 99.90 %" in text
    assert "hung hung: no output for 20 s after 0 cases" in text
    assert "absent absent: pip install it" in text
    verdicts = "\n".join(text.splitlines()[: len(runs)])
    assert "NumPy held: all" in verdicts, "they come before the tables"
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(report.terminal(runs))
    text = narrow.export_text()
    assert "f32" in text, "a table for each dtype where the four numbers of a cell do not fit"
    assert max(len(line) for line in text.splitlines()) <= 80


def test_progress_is_reported_case_by_case():
    seen = []
    run({"numpy": HONEST}, asked={"numpy": 34}, on_progress=lambda state: seen.append(state.cases))
    assert seen == sorted(seen)
    assert set(range(1, 24)) <= set(seen)


def test_a_device_that_numpy_lacks_is_refused():
    (state,) = run({"numpy": worker_command("numpy", device="cuda")}, asked={})
    assert state.status == "refused"
    assert state.message == "numpy: device is 'cuda', expected 'cpu'; choose one of these"
