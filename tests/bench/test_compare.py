"""``benchmarks/compare.py``: a worker for each backend, its outcome, and what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import compare
import numpy as np
import pytest
from commands import command
from programs import printed
from rich.console import Console
from timing import files, report
from timing.backends import BACKENDS
from timing.measure import LEAST_TURNS
from timing.problem import OPS
from timing.run import BenchRun, run

from rmsnorm.cli.usage import backends
from rmsnorm.specification.frameworks import FRAMEWORKS


def _python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("raise RuntimeError('no library')", "crashed", "exit status 1; RuntimeError: no library"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed", "signal 9; no output"),
        ("print('chatter'); print(3); print('{\"status\": \"done\"}')", "done", ""),
        ('print(\'{"status": "absent", "message": "pip install it"}\')', "absent", "pip install it"),
        ("import time; time.sleep(600)", "hung", "no output for 2 s after 0 cells"),
    ],
)
def test_the_outcome_of_a_worker_is_reported(code, status, message):
    state = run("numpy", _python(code), asked=0, patience=2.0)
    assert (state.status, state.message) == (status, message)


def test_results_that_are_lost_are_no_run_of_fewer():
    code = 'print(\'{"records": []}\'); print(\'{"status": "done"}\')'
    assert [run("numpy", _python(code), asked=asked).status for asked in (1, 2)] == ["done", "crashed"]


_bench = partial(command, compare.app)


MODES = {
    "numpy": ("",),
    "torch": ("", " compiled"),
    "tf": ("", " graph", " jit"),
    "flax": ("", " jit"),
    "keras-torch": ("", " compiled"),
    "keras-jax": ("", " jit"),
}
SHORTER = {"torch": "fwd+bwd", "keras-torch": "fwd", "keras-jax": "fwd"}  # compiling takes long; the rest is shared


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_times_a_small_shape(backend, tmp_path):
    layers = (FRAMEWORKS[backend].layers,) if backend in FRAMEWORKS else ()
    missing = [package for package in (*BACKENDS[backend].packages, *layers) if find_spec(package) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed; pip install '.[{BACKENDS[backend].extra}]'")
    ops = [SHORTER[backend]] if backend in SHORTER else list(OPS)
    layers = [kind + mode for kind in ("ours", "built-in", "LayerNorm") for mode in MODES[backend]]
    target = tmp_path / "bench.json"
    done = _bench(
        "--backend", backend, "--shape", "3x40", "--dtype", "bfloat16", "--seconds", "0", "--threads", "1",
        "--json", target, *(f"--op={op}" for op in ops), TORCHINDUCTOR_FORCE_DISABLE_CACHES="0",
            TORCHDYNAMO_DISABLE=str(int(backend == "keras-torch")),  # as with PyTorch's own layers, and compiled there
            JAX_NUMPY_DTYPE_PROMOTION="standard",  # Flax's own layers do not run under the strict one of the tests
    )  # fmt: skip
    assert done.exit_code == 0, done.stdout + done.stderr
    document = json.loads(target.read_text())
    assert [(run["status"], run["cores"]) for run in document["backends"]] == [("done", 1)]
    records = document["records"]
    for op in ops:
        by_name = {record["candidate"]: record for record in records if record["op"] == op}
        assert list(by_name) == [*layers, "copy", "copy into"]
        for record in by_name.values():
            if record["candidate"].endswith("compiled") and record["status"] == "failed":
                continue  # no C++ compiler on this machine
            assert record["status"] == "timed", record
            assert record["timing"]["turns"] >= LEAST_TURNS
        for name in ("ours", "built-in"):
            assert tuple(by_name[name]["bits"]) == OPS[op]
            assert by_name[name]["bits"]["y"] > 0.9, "one rounding of float32 arithmetic: few differ"
        for name in (name for name in layers[: len(MODES[backend])] if by_name[name]["status"] == "timed"):
            assert by_name[name]["speedup"] > 0
            assert by_name[name]["layer_norm_speedup"] > 0
            assert by_name[name]["over_copy"] > 0
    assert {record["backend"] for record in records} == {backend}
    if backend in ("torch", "flax"):
        assert by_name["ours"]["saved_bytes"] >= 3 * 40 * 2, "x at least"
        assert by_name["built-in"]["saved_bytes"] >= 3 * 40 * 2


@pytest.mark.slow
def test_without_compilation_the_eager_layers_are_timed(tmp_path):
    pytest.importorskip("torch")
    small = ("--op", "fwd", "--shape", "3x40", "--dtype", "float32", "--seconds", "0", "--json", tmp_path / "b.json")
    done = _bench("--backend", "torch", "--no-compile", *small)
    assert done.exit_code == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "b.json").read_text())["records"]
    assert [record["candidate"] for record in records] == ["ours", "built-in", "LayerNorm", "copy", "copy into"]


def test_layers_of_other_packages_are_timed_where_they_are_installed(tmp_path):
    """On a GPU. One whose import fails is a candidate that failed, and the picture has a colour for each."""
    pytest.importorskip("torch")
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "quack.py").write_text("def rmsnorm(x, weight, eps): return x * weight + eps\n")
    code = (
        "import torch\nfrom timing.backends.torch import _PEERS, _peers\n"
        "from timing.plot import _COLOURS\n"
        "layers = _peers(4, {'dtype': torch.float64})\nassert list(layers) == list(_PEERS) == ['Liger', 'quack']\n"
        "assert not _PEERS.keys() - _COLOURS.keys()\nx = torch.ones(2, 4, dtype=torch.float64)\n"
        "assert torch.equal(layers['quack'][0](x), x + 1e-6)\ntry: layers['Liger'][0](x)\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert printed("-c", code, path=tmp_path) == "No module named 'liger_kernel.ops'\n"


@pytest.mark.slow
def test_without_the_package_of_its_layers_the_function_of_jax_is_timed(tmp_path):
    if find_spec("jax") is None:
        pytest.skip("jax is not installed; pip install '.[flax]'")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['flax'] = None\n")  # as if not installed
    target = tmp_path / "bench.json"
    asked = ("--backend", "flax", "--shape", "3x40", "--dtype", "float32", "--seconds", "0", "--threads", "1")
    done = _bench(*asked, "--json", target, path=tmp_path)
    assert done.exit_code == 0, done.stdout + done.stderr
    document = json.loads(target.read_text())
    assert "the function, as flax is not installed" in json.dumps(document["backends"])
    names = ["ours", "ours jit", "copy", "copy into"]
    assert [(record["candidate"], record["status"]) for record in document["records"]] == [
        (name, "timed") for _ in OPS for name in names
    ]


RECORD = {
    "op": "fwd", "shape": [32, 768], "dtype": "bfloat16", "variant": "torch", "candidate": "ours", "ours": True,
    "status": "timed", "detail": "", "bits": {"y": 0.99999}, "max_ulp": {"y": 1.0}, "first_call": 0.5,
    "timing": {"median": 2e-5, "p20": 1e-5, "p80": 4e-5, "turns": 5, "calls": 50}, "peak_bytes": None,
    "saved_bytes": None, "moved_bytes": 98304, "speedup": 1234.5, "layer_norm_speedup": 1.5, "over_copy": 2.25,
    "over_copy_into": 0.5, "gb_per_s": 4.9152, "others": 0.02,
}  # fmt: skip
WRONG = {
    **RECORD,
    "status": "wrong",
    "detail": "y has parity ratio 9",
    "timing": None,
    "gb_per_s": None,
    "others": None,
}


def _runs():
    slower = {**RECORD, "others": 1.25, "timing": {**RECORD["timing"], "median": 4e-5}, "gb_per_s": 2.4576}
    sizes = [{**record, "shape": [64, 768], "moved_bytes": 196608} for record in (RECORD, slower)]
    named = [{**record, "candidate": name, "ours": False}
             for record, name in ((slower, "built-in jit"), (sizes[1], "built-in jit"), (RECORD, "copy"),
                                  (RECORD, "copy into"))]  # fmt: skip
    return [
        BenchRun(
            "torch", "done", version="9.9", device="a machine", cells=2, records=[RECORD, sizes[0], *named, WRONG]
        ),
        BenchRun("tf", "absent", "pip install it"),
    ]


def test_the_table_says_what_was_measured():
    console = Console(width=report.WIDTH, file=io.StringIO())
    printer = report.Printer(console)
    printer(_runs()[:1])
    printer(_runs()[:1])  # a message without records prints nothing
    printer.end(_runs())
    shown = " ".join(console.file.getvalue().split())
    assert shown.count("PyTorch 9.9 on a machine") == 1
    assert "fwd 32x768 bf16 ours 0.0200 1234 1.50 2.25 99.9 1 0.500" in shown
    assert "ours wrong, fwd 32x768 bf16: y has parity ratio 9" in shown
    assert "TensorFlow absent: pip install it" in shown
    assert "other processes used up to 1.2 cores; measure again on a quiet machine: fwd 32x768 bf16" in shown


def test_json_has_every_record_and_the_machine(tmp_path):
    files.write_json(_runs(), {"seconds": 2.0}, tmp_path / "bench.json")
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["settings"] == {"seconds": 2.0}
    assert document["records"][0] == {"backend": "torch", **RECORD}
    assert [entry["status"] for entry in document["backends"]] == ["done", "absent"]
    environment = document["environment"]
    assert environment["versions"]["numpy"] == np.__version__
    assert environment["cores"] == os.cpu_count()
    assert {"date", "python", "system", "processor"} <= set(environment)


def test_the_summary_has_a_line_for_every_record(tmp_path):
    files.write_json(_runs(), {"seconds": 2.0}, tmp_path / "bench.json")
    files.write_summary(_runs(), {"seconds": 2.0}, tmp_path / "bench.jsonl")
    document = json.loads((tmp_path / "bench.json").read_text())
    head, *lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    date = document["environment"].pop("date")
    assert head["environment"].pop("date") >= date
    assert head == {name: value for name, value in document.items() if name != "records"}
    assert len(lines) == len(document["records"])
    first = {"backend": "torch", **RECORD, "bits": {"y": 0.99999}, "speedup": 1234.0, "gb_per_s": 4.915}
    first["timing"] = {name: value for name, value in RECORD["timing"].items() if name != "calls"}
    assert lines[0] == {name: value for name, value in first.items() if value not in (None, "")}
    assert {"timing", "gb_per_s", "others"}.isdisjoint(lines[-1]), "wrong, and not timed"
    assert (lines[-1]["status"], lines[-1]["detail"]) == ("wrong", "y has parity ratio 9")


def test_the_committed_results_are_summaries():
    results = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("[cg]pu-*.json*"))
    assert results
    for path in results:
        runs: list[list[dict[str, Any]]] = []
        for line in map(json.loads, path.read_text().splitlines()):
            if "environment" in line:  # the first line of a run; a file may have several
                runs.append([])
            runs[-1].append(line)
        for head, *records in runs:
            assert {"rmsnorm", "environment", "settings", "backends"} == set(head)
            assert all(record["status"] == "timed" and record["timing"]["median"] > 0 for record in records), path
            assert {record["backend"] for record in records} == {backend["name"] for backend in head["backends"]}


def test_the_plot_is_svg_with_a_line_for_each_candidate(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed; pip install matplotlib")
    from timing.plot import write_plot

    write_plot(_runs(), tmp_path / "bench.svg")
    root = ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for words in (
        "PyTorch, fwd, bf16",
        "ours",
        "built-in jit",
        "the limit",
        "shape of x",
        "32x768",
        "GB/s (higher is better)",
    ):
        assert text.count(words) == 1, text
    assert "copy" not in text, "a copy to new memory is no limit"
    assert any(words.startswith("a machine, ") and "PyTorch 9.9" in words for words in text), text
    with pytest.raises(ValueError, match="nothing was timed"):
        write_plot([BenchRun("torch", "done", records=[WRONG])], tmp_path / "none.svg")


def test_ours_that_is_wrong_exits_with_1(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import rmsnorm.numpy_impl.fast as fast\n"
        "true = fast.rms_norm\n"
        "fast.rms_norm = lambda *args, **options: true(*args, **options) * (1 + 1e-2)\n"
    )
    done = _bench("--backend", "numpy", "--op", "fwd", "--shape", "4x64", "--dtype", "float32", "--seconds", "0",
                  path=tmp_path)  # fmt: skip
    assert done.exit_code == 1, done.stderr
    assert "ours wrong, fwd 4x64 f32: y" in done.stdout


@pytest.mark.slow
def test_a_backend_that_is_asked_for_and_absent_exits_with_2_and_else_is_skipped(tmp_path):
    for package in ("torch", "tensorflow", "keras", "jax", "flax"):
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package}', name='{package}')\n")
    small = ("--op", "fwd", "--shape", "2x8", "--dtype", "float32", "--seconds", "0")
    asked = _bench("--backend", "flax", *small, path=tmp_path)
    assert asked.exit_code == 2
    assert "pip install '.[flax]'" in asked.stdout
    skipped = _bench(*small, path=tmp_path)
    assert skipped.exit_code == 0, skipped.stdout + skipped.stderr
    assert "NumPy done: 1 cells" in skipped.stdout
    assert all(f"pip install '.[{extra}]'" in skipped.stdout for extra in ("torch", "tf", "flax"))


def test_a_plot_without_matplotlib_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    done = _bench("--backend", "numpy", "--plot", tmp_path / "x.svg", COLUMNS="300")
    assert done.exit_code == 2
    assert "matplotlib is not installed, expected for --plot; pip install matplotlib" in done.stderr


def test_a_backend_has_the_names_of_the_frameworks():
    """An alias is its backend, and two names of one backend are one run."""
    small = ("--op", "fwd", "--shape", "2x8", "--dtype", "float32", "--seconds", "0")
    done = _bench("--backend", "np", "--backend", "numpy", *small)
    assert done.exit_code == 0, done.stdout + done.stderr
    assert done.stdout.count("NumPy done: 1 cells") == 1
    for row in FRAMEWORKS.values():
        for alias in row.aliases:
            assert backends([alias, row.key], "compare.py") == (row.key,)
    assert backends(None, "compare.py") == tuple(FRAMEWORKS)


posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def started(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, compare.__file__, *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.slow
@posix
def test_ctrl_c_keeps_what_is_finished(tmp_path):
    """And says every cell where there is no terminal."""
    process = started(tmp_path, "--backend", "numpy", "--shape", "8x8", "--seconds", "2", "--json", "b.json")
    line = process.stderr.readline()
    assert line == "numpy 1/4\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "8x8" in out
    document = json.loads((tmp_path / "b.json").read_text())
    assert document["records"]
    assert document["backends"][0]["status"] == "stopped"


@pytest.mark.slow
@posix
def test_every_cell_is_printed_and_in_the_files_at_once(tmp_path):
    """Also where the machine is taken away before the end; only a file that is a pipe must wait for the whole."""
    files = "--json", "b.json", "--summary", "b.jsonl"
    process = started(tmp_path, "--backend", "numpy", "--shape", "8x8", "--seconds", "5", *files)
    assert process.stderr.readline() == "numpy 1/4\n"
    process.kill()
    title, columns, cell, *rows = process.communicate(timeout=30)[0].splitlines()
    assert title.startswith("NumPy ")
    assert columns.split()[0] == "ms"
    assert cell == "fwd 8x8 f32"
    assert [row[:12].strip() for row in rows] == ["ours", "built-in", "LayerNorm", "copy", "copy into"]
    document = json.loads((tmp_path / "b.json").read_text())
    assert [run["status"] for run in document["backends"]] == ["running"]
    assert len(document["records"]) == 5
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 6
    piped = started(tmp_path, "--backend", "numpy", "--shape", "2x8", "--seconds", "0", "--json", "/dev/stderr")
    assert json.loads(piped.communicate(timeout=60)[1].partition("numpy 4/4\n")[2])["records"]
