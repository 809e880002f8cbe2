"""The command line, run as a user runs it."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rmsnorm import PRESETS, __version__, screen
from rmsnorm.cli.tables import variants


def rmsnorm(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "rmsnorm.cli", *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip


def test_help_teaches():
    shown = rmsnorm("check", "--help")
    assert shown.returncode == 0
    for word in ("--backend", "--variant", "--dtype", "--device", "--json", "--junit", "--markdown", "--all", "--list"):
        assert word in shown.stdout
    assert "rmsnorm check --backend torch --variant llama --dtype bfloat16" in shown.stdout
    assert "Exit status: 0 everything agrees" in shown.stdout
    assert rmsnorm("--version").stdout.strip() == __version__


def test_a_backend_has_other_names():
    shown = rmsnorm("check", "--backend", "np", "--variant", "llama", "--dtype", "bfloat16")
    assert shown.returncode == 0, shown.stderr
    assert "NumPy held: all" in shown.stdout


def test_check_holds_and_writes_its_reports(tmp_path):
    files = {name: tmp_path / f"parity.{name}" for name in ("json", "junit", "markdown")}
    flags = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    shown = rmsnorm("check", "--backend", "numpy", "--variant", "llama", "--dtype", "bfloat16", *flags)
    assert shown.returncode == 0, shown.stderr
    assert "NumPy held: all" in shown.stdout
    assert "llama" in shown.stdout
    records = json.loads(files["json"].read_text())["records"]
    assert {(r["backend"], r["variant"], r["dtype"]) for r in records} == {("numpy", "llama", "bfloat16")}
    assert all(path.stat().st_size for path in files.values())


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--backend", "theano", "backend is 'theano', expected 'torch', 'tf', 'keras', 'jax', 'flax' or 'numpy'"),
        ("--variant", "lama", "variant is 'lama', expected 'standard', 'paper',"),
        ("--dtype", "float8", "dtype is 'float8', expected 'float16', 'bfloat16', 'float32' or 'float64'"),
        ("--device", "tpu", "device is 'tpu', expected 'cpu' or 'cuda'"),
        ("--json", "/no/such/folder/x.json", "/no/such/folder is not a folder"),
        ("--frobnicate", "1", "No such option"),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_is_valid(flag, value, words):
    shown = rmsnorm("check", flag, value)
    assert shown.returncode == 2
    assert words in " ".join(shown.stderr.split())


def test_a_device_that_a_requested_backend_lacks_exits_with_2():
    shown = rmsnorm("check", "--backend", "numpy", "--device", "cuda")
    assert shown.returncode == 2
    assert "NumPy refused: numpy: device is 'cuda', expected 'cpu'" in shown.stdout


def test_a_disagreement_exits_with_1(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import rmsnorm.numpy_impl.paper.derivation as derivation\n"
        "true = derivation.rms\n"
        "derivation.rms = lambda *args, **options: true(*args, **options) * (1 + 1e-4)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-m", "rmsnorm.cli", "check", "--backend", "numpy", "--variant", "t5", "--dtype", "float32"],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "COLUMNS": "160", "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert shown.returncode == 1, shown.stderr
    assert "x numpy t5 f32 'rows' y: parity ratio" in shown.stdout
    assert "NumPy differs:" in shown.stdout


def test_list_shows_cases_without_running_any():
    shown = rmsnorm("check", "--list", "--variant", "lasagne")
    assert shown.returncode == 0
    assert "channels" in shown.stdout
    assert "per-channel parameters" in shown.stdout
    assert "zero rows" not in shown.stdout


def test_variants_are_listed():
    """In a pipe every row is a whole line; COLUMNS is of the terminal."""
    lines = rmsnorm("variants").stdout.splitlines()
    for preset in PRESETS.values():
        (line,) = (line for line in lines if line.split()[:1] == [preset.name])
        assert line.rstrip().endswith(preset.source.replace("`", ""))


@pytest.mark.parametrize("width", [60, 80, 100, 250])
def test_a_table_fits_a_terminal(width, monkeypatch):
    """By leaving out columns, never by cutting words."""
    shown = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr("rmsnorm.cli.tables.screen.console", lambda: shown)
    variants()
    lines = shown.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    assert all(any(line.split()[:1] == [name] for line in lines) for name in PRESETS)
    assert ("or a pipe, also: source" in " ".join(" ".join(lines).split())) == (width < 250)


def test_invariances_prints_the_papers_table():
    shown = rmsnorm("invariances")
    assert shown.returncode == 0
    lines = {line.split("│")[1].strip(): line for line in shown.stdout.splitlines() if line.count("│") == 8}
    assert lines["LayerNorm"].count("holds") == 4
    assert lines["RMSNorm"].count("holds") == 3
    assert lines["WeightNorm"].count("- (") == 4
    assert "1.42857" in shown.stdout, "dL/dW is divided by delta = 0.7"


def test_a_table_in_a_pipe_is_whole_and_has_no_padding():
    """Every row is there on its own line, which is not filled with spaces to the width of the longest one."""
    file = io.StringIO()
    cells = [["a", "b" * 300], ["c" * 200, "d"], ["e", ""]]
    console = screen.console(file=file)
    console.print(screen.fitting_table(("one", "two"), cells, ("two",)))
    console.print("the end", end="")
    *lines, last = file.getvalue().split("\n")
    assert last == "the end"
    assert [line.split() for line in lines[3:6]] == [[cell for cell in row if cell] for row in cells]
    assert not [line for line in lines if line != line.rstrip()]
