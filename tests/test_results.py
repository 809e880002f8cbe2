"""docs/results.py judges norms and keeps what it judged; docs/results.md has every norm of its list."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("results", ROOT / "docs" / "results.py")
results = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(results)
NORMS = """\
import os, signal, time
import numpy as np
print("a package may print")

def right(x, weight):
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float64)).astype(x.dtype)

def crashes(x, weight):
    os.kill(os.getpid(), signal.SIGABRT)

def hangs(x, weight):
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "norms.py").write_text(NORMS)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def row(folder, name):
    return f"{folder}/norms.py:{name}", {"framework": "numpy"}


def test_a_norm_is_identified_and_checked_in_a_process_of_its_own(folder):
    right = results.judged(sys.executable, *row(folder, "right"), folder)
    assert right["variant"] == "the variant standard with eps 1e-05 (the same as the preset transformer_engine)"
    assert right["eps"] == "1e-05"
    assert right["dtypes"] == "float32, bfloat16"
    assert re.fullmatch(r"agrees in \d+ comparisons", right["check"])


def report(status, **run):
    """A report of check, as far as verdict reads it."""
    failures = [SimpleNamespace(quantity=name, dtype="bfloat16") for name in ("y", "dscale", "dscale")]
    run = {"records": failures * 4, "failures": failures, "skipped": [], "limits": "", "refusals": [], **run}
    return SimpleNamespace(
        run=SimpleNamespace(status=status, **run), target="n:norm", text="n:norm is not t5: n:norm is\n"
    )


def test_a_verdict_says_what_differs_what_is_refused_and_the_limits():
    assert results.verdict(report("differs")) == (
        "differs: 3 of 12 comparisons (2 of dscale in bfloat16, 1 of y in bfloat16): it is"
    )
    edge = SimpleNamespace(case="no columns", edge=True)
    assert results.verdict(report("held", skipped=[edge])) == "agrees in 12 comparisons; it refuses 'no columns'"
    refusals = [SimpleNamespace(message="no float64\nmore")] * 2
    assert results.verdict(report("refuses", refusals=refusals, limits="--rank 2")) == (
        "refused 2 calls, and agrees in 12 comparisons; it takes only --rank 2: no float64"
    )


def test_a_norm_that_crashes_or_hangs_has_a_reason(folder):
    crashed = results.judged(sys.executable, *row(folder, "crashes"), folder)
    assert crashed == {"error": "its process was ended by SIGABRT"}
    hung = results.judged(sys.executable, *row(folder, "hangs"), folder, seconds=5.0)
    assert hung == {"error": "it took more than 5 seconds"}


def test_a_norm_is_judged_once_for_each_version_of_its_package(folder, monkeypatch, capsys):
    table, page = folder / "table.toml", folder / "page.md"
    lines = [f'{name} = {{ target = "{folder}/norms.py:{name}" }}' for name in ("right", "crashes")]
    table.write_text(
        "\n".join(
            [
                "[numpy.norms]",
                *lines,
                'wide = { not_judged = "of its width" }',
                "[absent.norms]",
                'norm = { target = "absent:norm" }',
            ]
        )
    )
    asked = []

    def judged(python, target, row, folder):
        asked.append(target.rpartition(":")[2])
        if asked[-1] == "crashes":
            return {"error": "its process | ended"}
        return {"variant": "a | b", "eps": "1e-05", "check": "agrees", "dtypes": "float32", "date": "2026-11-28"}

    monkeypatch.setattr(results, "judged", judged)
    monkeypatch.setattr(results, "version_of", lambda python, name: "" if name == "absent" else "2.0")
    for _ in range(2):
        results.measure(sys.executable, folder, table, page, [], installs=False)
    assert asked == ["right", "crashes"]
    text = page.read_text()
    assert "| numpy | 2.0 | `right` | a \\| b | 1e-05 | agrees | float32 | 2026-11-28 |" in text
    assert "- numpy, `crashes`: not judged, because its process \\| ended." in text
    assert "- numpy, `wide`: not judged, because of its width." in text
    assert "- absent, `norm`: not judged, because it is not installed." in text
    assert json.loads((folder / "results.json").read_text())["numpy right"]["version"] == "2.0"


def test_a_package_that_does_not_install_has_a_reason(tmp_path):
    why = results.install(sys.executable, "nothing", {"install": [f"{tmp_path}/nothing.whl"]})
    assert why.startswith("pip: ERROR: ")


def test_the_page_has_every_norm_of_the_list():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert text.startswith(results.HEAD)
    for package, entry in results.rows(ROOT / "docs" / "results.toml").items():
        for name in entry["norms"]:
            assert re.search(rf"^(\| {package} \| [^|]+ \| `{re.escape(name)}` \||- {package}, .*`{re.escape(name)}`)",
                             text, re.MULTILINE), f"{package} {name}: run make strangers"  # fmt: skip
    assert not re.search(r"/(home|tmp|work|usr)/", text)
