"""The package in environments of others: makes one, runs the parity check and the fast tests, and keeps the counts.

    python tests/versions/run.py lowest        # writes tests/versions/lowest.json; it takes ten to thirty minutes
    python tests/versions/run.py --table       # the table in docs/compatibility.md, from these files

An environment is a version of Python, and a file with the version of every package beside this one. It is made in
.venv-NAME with that version of Python, which must be installed. PyTorch from PyPI brings CUDA with it on Linux: several
gigabytes, unless PIP_EXTRA_INDEX_URL names PyTorch's index of CPU builds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
TOOLS: Final = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "mpmath", "expecttest")
FAST: Final = ("tests/specification", "tests/golden", "tests/table")
FOLDERS: Final = {"torch": "tests/torch_impl", "tf": "tests/tf_impl", "flax": "tests/flax_impl"}
PACKAGES: Final = {"numpy": ("numpy",), "torch": ("torch",), "tf": ("tensorflow", "keras"), "flax": ("jax", "flax")}
TITLES: Final = {"numpy": "NumPy", "torch": "PyTorch", "tf": "TensorFlow, Keras", "flax": "JAX, Flax"}
CHECK: Final = 900.0  # seconds at most
TESTS: Final = 2400.0


class Environment(NamedTuple):
    """An environment: whose versions it has."""

    title: str  # the head of its column
    python: str
    frameworks: tuple[str, ...] = ("numpy", "torch", "tf", "flax")  # what is installed and tested
    installed: bool = True  # this package; else its folder is on PYTHONPATH, with the packages it needs


ENVIRONMENTS: Final = {
    "lowest": Environment("lowest", "3.11", ("numpy", "torch", "tf")),
    "lowest-jax": Environment("lowest of JAX", "3.11", ("numpy", "flax")),  # TensorFlow 2.18 wants an older ml_dtypes
    "colab": Environment("Colab, August 2026", "3.12"),
    "gpu": Environment("an image for GPUs", "3.12", ("numpy", "torch", "flax"), installed=False),
    "newest": Environment("newest", "3.13"),
}


def python_of(version: str) -> str:
    """A Python of this version: on the path, else one of pyenv."""
    candidates = [shutil.which(f"python{version}"), sys.executable]
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for candidate in filter(None, candidates):
        asked = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return candidate
    raise SystemExit(f"versions: there is no Python {version}; install it, as by `pyenv install {version}`")


def make(name: str) -> Path:
    """Makes the environment, and returns its folder with programs."""
    environment, folder = ENVIRONMENTS[name], ROOT / f".venv-{name}"
    binaries, ready = folder / "bin", folder / "ready"
    pins = HERE / f"{name}.txt"
    if ready.exists() and ready.stat().st_mtime > max(pins.stat().st_mtime, (ROOT / "pyproject.toml").stat().st_mtime):
        return binaries
    subprocess.run([python_of(environment.python), "-m", "venv", folder], check=True)
    extras = ",".join(key for key in environment.frameworks if key != "numpy")
    needs = ["-e", f".[{extras}]"] if environment.installed else ["-r", str(pins)]
    command = [binaries / "python", "-m", "pip", "install", "-q", "-c", pins, *needs, *TOOLS]
    subprocess.run(command, check=True, cwd=ROOT)
    ready.touch()
    return binaries


ASKING: Final = """
import json, platform, sys
from importlib.metadata import version
print(json.dumps([platform.python_version(), {name: version(name) for name in sys.argv[1:]}]))
"""


def run(name: str) -> dict[str, Any]:
    """The record of an environment: versions, and of the check and the tests how they ended, with their counts."""
    environment, binaries = ENVIRONMENTS[name], make(name)
    keys, is_installed = environment.frameworks, environment.installed
    python, work = str(binaries / "python"), binaries.parent / "results"
    work.mkdir(exist_ok=True)
    variables = {**os.environ, "PYTHONPATH": "" if is_installed else str(ROOT)}
    packages = [package for key in keys for package in PACKAGES[key]]
    version, versions = json.loads(subprocess.check_output([python, "-c", ASKING, *packages]))
    report, began = work / "check.json", time.monotonic()
    backends = [f"--backend={key}" for key in keys]
    _step([python, "-m", "rmsnorm", "selftest", *backends, "--json", str(report)], variables, CHECK)
    check: dict[str, Any] = {
        backend["backend"]: {key: backend[key] for key in ("status", "cases", "message")}
        for backend in json.loads(report.read_text(encoding="utf-8"))["backends"]
    }
    check["seconds"] = round(time.monotonic() - began)
    variables["RMSNORM_REQUIRE"] = ",".join(keys) if is_installed else "numpy,torch"
    files = {"shared": FAST} | {FOLDERS[key].rpartition("/")[2]: (FOLDERS[key],) for key in keys if key in FOLDERS}
    tests = {title: _tested(python, title, paths, work, variables) for title, paths in files.items()}
    today = date.today().isoformat()
    return {"date": today, "python": version, "versions": versions, "check": check, "tests": tests}


def _tested(python: str, title: str, files: Sequence[str], work: Path, variables: dict[str, str]) -> dict[str, Any]:
    """How many tests passed, failed and were skipped; and the names of those that failed."""
    junit, began = work / f"{title}.xml", time.monotonic()
    options = ["-q", "-n", "2", "--dist", "loadfile", "--max-worker-restart=0"]
    _step([python, "-m", "pytest", *options, f"--junitxml={junit}", *files], variables, TESTS)
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in failed),
        "seconds": round(time.monotonic() - began),
    }


def _step(command: Sequence[str], variables: dict[str, str], seconds: float) -> None:
    print("==", *command[1:], flush=True)
    try:
        subprocess.run(command, check=False, cwd=ROOT, env=variables, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"versions: this took more than {seconds:g} s: {' '.join(command)}") from None


def table() -> str:
    """The versions, and what the last run of each environment gave; in Markdown."""
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("*.json"))}
    names = [name for name in ENVIRONMENTS if name in records]
    every = [records[name] for name in names]
    rows = {"": [ENVIRONMENTS[name].title for name in names], "---": ["---"] * len(names)}
    rows["Python"] = [record["python"] for record in every]
    for key, title in TITLES.items():
        rows[title] = [_versions(record, key) for record in every]
    for title in ("shared", *(folder.rpartition("/")[2] for folder in FOLDERS.values())):
        head = f"tests/{title}" if title != "shared" else "tests of all"
        rows[head] = [_counts(record["tests"].get(title)) for record in every]
    rows["run on"] = [record["date"] for record in every]
    return "".join(f"| {head} | {' | '.join(cells)} |\n" for head, cells in rows.items())


def _versions(record: dict[str, Any], key: str) -> str:
    versions = [record["versions"][package] for package in PACKAGES[key] if package in record["versions"]]
    checked = record["check"].get(key, {"status": "not run"})
    verdict = f"held in {checked['cases']} cases" if checked["status"] == "held" else checked["status"]
    return f"{', '.join(versions)}: {verdict}" if versions else "-"


def _counts(tests: dict[str, Any] | None) -> str:
    if tests is None:
        return "-"
    failed = f", {len(tests['failed'])} failed" if tests["failed"] else ""
    return f"{tests['passed']} passed, {tests['skipped']} skipped{failed}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=list(ENVIRONMENTS), help="the environment")
    parser.add_argument("--table", action="store_true", help="print the table of all environments")
    chosen = parser.parse_args(arguments)
    if chosen.table:
        print(table(), end="")
        return 0
    if chosen.name is None:
        parser.error(f"name an environment: {', '.join(ENVIRONMENTS)}")
    record = run(chosen.name)
    (HERE / f"{chosen.name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    failed = [name for tests in record["tests"].values() for name in tests["failed"]]
    broken = [key for key, entry in record["check"].items() if key != "seconds" and entry["status"] != "held"]
    print(*(f"failed: {name}" for name in failed + broken), sep="\n")
    return bool(failed or broken)


if __name__ == "__main__":
    sys.exit(main())
