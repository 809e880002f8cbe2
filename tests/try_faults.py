"""Tries the faults of tests/faults.py: which test notices each. `make faults` tries all, `--only torch:` some.

A fault wraps a public function, layer or command in every process of a test run; no file is changed. The program first
runs the tests with every wrapper and no fault. A test that fails then, and passes without wrappers, notices that there
are some, and is left out. Then each fault is installed alone, and pytest runs with ``-x``: first the files that should
notice it, then all, for three minutes of a processor together. A fault is killed if a test fails that passes without
it. If pytest ends in another way (interrupted, nothing collected, a crash), that is an error and no kill.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import math
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from fault_changes import Call
from faults import FAULTS, SURFACES, Fault

ROOT = Path(__file__).parents[1]


def wrapped(function: Callable[..., Any], change: Callable[[Call], Any]) -> Callable[..., Any]:
    """The function as the fault has it. Arguments that are no arrays are for the tests of messages, and stay."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def faulty(*args: Any, **options: Any) -> Any:
        call = Call(function, names, args, options)
        if "x" in names and not hasattr(call["x"], "dtype"):
            return call()
        return change(call)

    return faulty


def put(module: ModuleType, attribute: str, change: Callable[[Call], Any]) -> None:
    """Puts a fault into a module that was just imported."""
    *owners, name = attribute.split(".")
    owner = functools.reduce(getattr, owners, module)
    old = inspect.getattr_static(owner, name)
    if isinstance(old, property):
        new: Any = property(wrapped(old.fget, change), old.fset)  # type: ignore[arg-type]
    elif isinstance(old, functools.cached_property):
        new = property(wrapped(old.func, change))
    else:
        new = wrapped(getattr(owner, name), change)
    setattr(owner, name, new)


class Finder(importlib.abc.MetaPathFinder):
    """Imports the modules of the surfaces, and puts the faults into them before anybody sees them."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults: dict[str, list[Fault]] = {}
        for fault in faults:
            self.faults.setdefault(SURFACES[fault.surface].module, []).append(fault)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        faults = self.faults.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if faults else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_put(module: ModuleType) -> None:
            execute(module)
            for fault in faults or ():
                put(module, fault.attribute, fault.change)

        spec.loader.exec_module = execute_and_put  # type: ignore[method-assign]
        return spec


def install(title: str, seconds: int) -> None:
    """In this process, at the start of Python: the fault of that title, or every wrapper without a fault.

    The system ends a process that has used so many seconds of its processor.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    faults = [fault for fault in FAULTS if fault.title == title]
    if title == "none":
        surfaces = {(fault.surface, fault.attribute): fault for fault in FAULTS}
        faults = [fault._replace(change=lambda call: call()) for fault in surfaces.values()]
    finder = Finder(faults)

    def stay_first(event: str, _: Any) -> None:
        """pytest puts a finder before the others, as this package has a plugin of it."""
        if event == "import" and sys.meta_path[0] is not finder:
            sys.meta_path[:] = [finder, *(other for other in sys.meta_path if other is not finder)]

    sys.addaudithook(stay_first)


def run(title: str | None, paths: Iterable[str], seconds: float, *options: str) -> tuple[str, list[str]]:
    """The verdict of a run of pytest with a fault (None for no wrapper at all), and the tests that failed."""
    with tempfile.TemporaryDirectory() as folder:
        if title is not None:
            code = f"import try_faults\n\ntry_faults.install({title!r}, {math.ceil(seconds)})\n"
            Path(folder, "sitecustomize.py").write_text(code, encoding="utf-8")
        paths_of_python = os.pathsep.join([folder, str(ROOT / "tests"), str(ROOT)])
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
        process = subprocess.Popen(
            [*command, *paths, *options], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths_of_python}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=10 * seconds)  # of a machine that has other work, too
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "out of time", []
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    is_collected = not any(line.startswith("ERROR") and "::" not in line for line in failed)
    if process.returncode not in (0, 1) or not is_collected:
        return "error", [f"pytest ended with {process.returncode}: {failed[0] if failed else output[-200:]}"]
    return ("killed" if failed else "survived"), [line.partition(" ")[2][:200] for line in failed]


def judge(fault: Fault, seconds: float, left_out: Iterable[str] = ()) -> dict[str, Any]:
    """Who notices a fault: first the files that should, then all; no test that fails without the fault, too."""
    start, red, by = time.monotonic(), list[str](), [""]
    for paths, share in ((shlex.split(SURFACES[fault.surface].tests), 2 / 3), ([], 1 / 3)):
        while True:
            others = [f"--deselect={test}" for test in (*left_out, *red)]
            verdict, by = run(fault.title, paths, share * seconds, "-x", *others)
            if verdict != "killed" or run("none", names(by), seconds)[0] == "survived":
                break
            red += names(by)
        if verdict != "survived":
            break
    row = {"fault": fault.title, "verdict": verdict, "seconds": round(time.monotonic() - start), "by": (by or [""])[0]}
    return row | ({"red": red} if red else {})


def names(failed: Iterable[str]) -> list[str]:
    """The tests, without what they say."""
    return [line.partition(" - ")[0] for line in failed]


def noticing_wrappers() -> list[str]:
    """The tests that fail beside wrappers without a fault, and pass without wrappers. All others must pass."""
    verdict, failed = run("none", [], 14400)
    if verdict == "killed":
        verdict, failed = run(None, names(failed), 14400)[0], names(failed)
    if verdict != "survived":
        sys.exit(f"without a fault the tests must pass, but: {verdict} {failed}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the faults whose names begin so, such as 'torch layer:'")
    parser.add_argument("--seconds", type=float, default=180, help="of a processor, for one fault")
    parser.add_argument("--jobs", type=int, default=2, help="how many faults are tried at once")
    parser.add_argument("--json", type=Path, help="where the verdicts go; those of other faults in it stay")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.title.startswith(arguments.only)]
    if not faults:
        parser.error(f"no fault begins with {arguments.only!r}; the first one is {FAULTS[0].title!r}")
    print("first every test without a fault", flush=True)
    left_out = noticing_wrappers()
    print("left out, as they notice wrappers:", *left_out or ["none"], flush=True)
    known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json and arguments.json.exists() else []
    rows = {row["fault"]: row for row in known}
    judged = functools.partial(judge, seconds=arguments.seconds, left_out=left_out)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for number, row in enumerate(pool.map(judged, faults), 1):
            rows[row["fault"]] = row
            print(
                f"{number}/{len(faults)} {row['verdict']}, {row['seconds']} s: {row['fault']}  {row['by']}", flush=True
            )
            if arguments.json:
                ordered = [rows[fault.title] for fault in FAULTS if fault.title in rows]
                arguments.json.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    alive = [row["fault"] for row in rows.values() if row["verdict"] != "killed"]
    print(f"{len(rows) - len(alive)} of {len(rows)} killed", *alive, sep="\n  ")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()
