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
    """An environment: whose versions it has.

    Attributes:
        title: the head of its column.
        python: the version of Python.
        frameworks: what is installed and tested.
        installed: whether this package is installed; else its folder is on PYTHONPATH, with the packages it needs.
    """

    title: str
    python: str
    frameworks: tuple[str, ...] = ("numpy", "torch", "tf", "flax")
    installed: bool = True


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


def run(name: str) -> dict[str, Any]:
    """The record of an environment: versions, and of the check and the tests how they ended, with their counts."""
    environment, binaries = ENVIRONMENTS[name], make(name)
    python, work = str(binaries / "python"), binaries.parent / "results"
    work.mkdir(exist_ok=True)
    variables = {**os.environ, "PYTHONPATH": "" if environment.installed else str(ROOT)}
    packages = [package for key in environment.frameworks for package in PACKAGES[key]]
    record: dict[str, Any] = {"date": date.today().isoformat(), "python": "", "versions": {}, "check": {}, "tests": {}}
    asking = "import json, platform, sys\nfrom importlib.metadata import version, PackageNotFoundError\nfound = {}\n"
    asking += "for name in sys.argv[1:]:\n  try: found[name] = version(name)\n  except PackageNotFoundError: pass\n"
    asking += "print(json.dumps([platform.python_version(), found]))"
    record["python"], record["versions"] = json.loads(subprocess.check_output([python, "-c", asking, *packages]))
    backends = [f"--backend={key}" for key in environment.frameworks]
    report = work / "check.json"
    began = time.monotonic()
    _step([python, "-m", "rmsnorm", "selftest", *backends, "--json", str(report)], variables, CHECK)
    seconds = round(time.monotonic() - began)
    for backend in json.loads(report.read_text(encoding="utf-8"))["backends"]:
        record["check"][backend["backend"]] = {key: backend[key] for key in ("status", "cases", "message")}
    record["check"]["seconds"] = seconds
    folders = [FOLDERS[key] for key in environment.frameworks if key in FOLDERS]
    variables["RMSNORM_REQUIRE"] = ",".join(environment.frameworks) if environment.installed else "numpy,torch"
    for title, files in (("shared", FAST), *((folder.rpartition("/")[2], [folder]) for folder in folders)):
        record["tests"][title] = _tested(python, title, files, work, variables)
    return record


def _tested(python: str, title: str, files: Sequence[str], work: Path, variables: dict[str, str]) -> dict[str, Any]:
    """How many tests passed, failed and were skipped; and the names of those that failed."""
    junit, began = work / f"{title}.xml", time.monotonic()
    command = [
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "--max-worker-restart=0",
        f"--junitxml={junit}",
        *files,
    ]
    _step([python, *command], variables, TESTS)
    suite = ElementTree.parse(junit).getroot()
    cases = list(suite.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
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
    lines = [_row("", [ENVIRONMENTS[name].title for name in names])]
    lines.append("| --- " * (len(names) + 1) + "|")
    lines.append(_row("Python", [records[name]["python"] for name in names]))
    for key, packages in PACKAGES.items():
        cells = []
        for name in names:
            record = records[name]
            versions = [record["versions"][package] for package in packages if package in record["versions"]]
            cells.append(f"{', '.join(versions)}: {_verdict(record['check'].get(key))}" if versions else "-")
        lines.append(_row(TITLES[key], cells))
    for title in ("shared", *(folder.rpartition("/")[2] for folder in FOLDERS.values())):
        lines.append(_row(f"tests/{title}" if title != "shared" else "tests of all", [
            _counts(records[name]["tests"].get(title)) for name in names]))  # fmt: skip
    lines.append(_row("run on", [records[name]["date"] for name in names]))
    return "\n".join(lines) + "\n"


def _row(head: str, cells: Sequence[str]) -> str:
    return f"| {head} | {' | '.join(cells)} |"


def _verdict(checked: dict[str, Any] | None) -> str:
    if checked is None:
        return "not run"
    return f"held in {checked['cases']} cases" if checked["status"] == "held" else str(checked["status"])


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
