"""The program of ``make mutants``: what it changes, and that a part's tests are told apart by whether they notice."""

from __future__ import annotations

import shutil
from pathlib import Path

import mutation
import pytest

SOURCE = '''"""Text."""
def f(x: tuple[int, ...] = (), n=3):
    if x is not None and (n < 2):
        raise ValueError("less than 1" + str(1))
    f.calls.append(n - 1)
    return True
'''
WANTED = {
    (2, "number", "def f(x: tuple[int, ...] = (), n=4):"),
    (3, "comparison", "    if x is None and (n < 2):"),
    (3, "comparison", "    if x is not None and (n >= 2):"),
    (3, "condition", "    if (not (x is not None and (n < 2))):"),
    (3, "number", "    if x is not None and (n < 3):"),
    (5, "statement", "    pass"),
    (5, "operation", "    f.calls.append(n + 1)"),
    (5, "number", "    f.calls.append(n - 2)"),
    (6, "truth", "    return False"),
}


def test_every_change_is_of_one_line_and_none_of_a_text_a_type_or_a_message():
    changes = {(number, kind, " ".join(line.split())) for number, kind, line in mutation.mutations(SOURCE)}
    assert changes == {(number, kind, " ".join(line.split())) for number, kind, line in WANTED}


@pytest.mark.parametrize(("new", "verdict"), [("HALF = 2", "killed"), ("HALF = 1  # the same", "survived")])
def test_a_fault_is_put_in_judged_and_taken_out(new, verdict, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "half.py").write_text("HALF = 1\n")
    (tmp_path / "test_half.py").write_text("from package.half import HALF\n\ndef test_half():\n    assert HALF == 1\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--changed')\n")
    monkeypatch.setattr(mutation, "tests_of", lambda path: ["test_half.py"])
    result = mutation._run(tmp_path, {"file": "package/half.py", "line": 1, "new": new}, every=False, limit=60.0)
    assert (result["verdict"], result["old"]) == (verdict, "HALF = 1")
    assert Path(tmp_path / "package" / "half.py").read_text() == "HALF = 1\n"
    shutil.rmtree(tmp_path)
