"""Judges the norms of other packages as docs/results.toml lists them, and writes docs/results.md.

make strangers                                       # installs the packages below build/strangers, judges, writes
python docs/results.py build/strangers torch flax    # these packages alone; what was judged before is kept
python docs/results.py build/strangers --page        # judges nothing: writes the page again

Each norm is judged in a process of its own, so that one that crashes or hangs loses its own row. What was judged
is kept in results.json of the folder. A norm is judged again if its package has another version, or if its entry is
taken out of that file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
import venv
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE, PAGE = ROOT / "docs" / "results.toml", ROOT / "docs" / "results.md"
DTYPES = ("float32", "bfloat16")
SECONDS = 900.0  # of a norm
ASKING = 300.0  # seconds of identify
HEAD = """\
# Norms of other packages, judged

This page says which RMSNorm the norms of installed packages compute, and whether they compute it exactly. Nothing here
was written by hand: `make strangers` installs each package from PyPI, judges each norm, and writes this page. The list
of norms, with their arguments, is [results.toml](results.toml).

- *variant* and *eps* are what `rmsnorm identify` found out by calls alone. Each variant is described in
  [The variants](variants.md). Of what is no RMSNorm, it says what it is.
- *check* is the verdict of `rmsnorm check`, which compares the norm with exactly that variant, with gradients: it
  *agrees*, it *differs*, or it *refused* calls. Then comes what differs. A norm that differs is not always wrong: the
  bounds of `check` are those of a statistic in float32, and a norm may be made to be faster than that.
- *dtypes* are those of x that were compared.

Everything ran on a CPU, with the default arguments of each norm where it has any.
[RMSNorms of transformers](identify.md) has every class of transformers.
"""
COLUMNS = ("package", "version", "norm", "variant", "eps", "check", "dtypes", "date")


def rows(table: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The norms of each package, by their names on the page, and what installs the package."""
    return tomllib.loads(table.read_text(encoding="utf-8"))


def judge(target: str, init: Mapping[str, Any], framework: str | None, call: str | None) -> dict[str, str]:
    """The cells of a norm, which the package says of it."""
    from rmsnorm.identify import identify
    from rmsnorm.parity import check

    identity = identify(target, init=init, framework=framework, call=call, time_limit=ASKING)
    eps = identity["eps"]
    said = identity.headline.removeprefix(f"{target} is ").replace(f"{target} ", "it ")
    cells = {
        "variant": "; ".join([said.removeprefix("RMSNorm: "), *identity.other_defects]),
        "eps": f"{eps:.6g}" if isinstance(eps, float) else str(eps or "not observable"),
        "dtypes": "", "date": date.today().isoformat(),
    }  # fmt: skip
    if identity.kind != "rmsnorm" or identity.variant is None:
        return cells | {"check": "not asked: no variant describes it"}
    if not identity.last_axes:
        return cells | {"check": "not asked: it is not along the last axis"}
    dtypes = None if target.endswith(".onnx") else DTYPES  # a file has dtypes of its own
    try:
        report = check(
            target, identity.variant.replace(**identity.of_gate), init=init, framework=framework, call=call,
            dtypes=dtypes, group_size=identity["group_size"],
        )  # fmt: skip
    except ValueError as error:
        return cells | {"check": f"not compared: {error}"}
    compared = {record.dtype for record in report.run.records}
    return cells | {"dtypes": ", ".join(sorted(compared, reverse=True)), "check": verdict(report)}  # float32 first


def verdict(report: Any) -> str:
    """Whether a norm agrees, and if not, in how many comparisons of which quantity, and what is said of it."""
    run, count = report.run, f"{len(report.run.records)} comparisons"
    edges = sorted({skip.case for skip in run.skipped if skip.edge})
    takes = f"; it takes only {run.limits}" * bool(run.limits)
    takes += f"; it refuses {', '.join(map(repr, edges))}" * bool(edges)
    if run.status == "held":
        return f"agrees in {count}{takes}"
    if run.status == "refuses":
        why = dict.fromkeys(refusal.message.partition("\n")[0] for refusal in run.refusals)
        return f"refused {len(run.refusals)} calls, and agrees in {count}{takes}: {'; '.join([*why][:2])}"
    parts = Counter(f"{record.quantity} in {record.dtype}" for record in run.failures)
    first = report.text.partition("\n")[0].replace(report.target, "it").partition(": ")[2]
    what = ", ".join(f"{number} of {part}" for part, number in parts.most_common())
    return f"{run.status}: {len(run.failures)} of {count} ({what}){takes}: {first}"


def judged(python: str, target: str, row: Mapping[str, Any], folder: Path, seconds: float = SECONDS) -> dict[str, str]:
    """The cells of a norm that a process of its own judges; ``error`` where it did not come to an end."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    question = json.dumps([target, row.get("init", {}), row.get("framework"), row.get("call")])
    command = [python, "-P", __file__, str(folder), "--judge", question]
    with (folder / "log.txt").open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=folder, timeout=seconds, stdout=log, stderr=log, env={**os.environ, **row.get("env", {})}
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"it took more than {seconds:g} seconds"}
    if answer.exists():
        return json.loads(answer.read_text(encoding="utf-8"))
    if done.returncode < 0:
        return {"error": f"its process was ended by {signal.Signals(-done.returncode).name}"}
    return {"error": f"its process ended with the exit status {done.returncode}"}


def install(python: str, name: str, package: Mapping[str, Any]) -> str:
    """Installs a package with the pinned versions of constraints.txt; the reason if that fails."""
    if "install" not in package:
        return ""
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    environment = {**os.environ, **package.get("env", {})}
    try:
        done = subprocess.run(
            [*command, *package["install"]], capture_output=True, text=True, timeout=SECONDS, env=environment
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"pip took more than {SECONDS:g} seconds"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    return f"pip: {(lines or done.stderr.splitlines() or ['it failed'])[-1].strip()}"


def version_of(python: str, name: str) -> str:
    """The version of a package in an environment; empty if it is not there."""
    asked = [python, "-P", "-c", "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"]
    done = subprocess.run([*asked, name], capture_output=True, text=True)
    return done.stdout.strip()


def cell(text: str) -> str:
    """A text in one line of a table, without the folders of this machine."""
    text = re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", text)
    return " ".join(text.split()).replace("|", "\\|")


def page(table: Mapping[str, Mapping[str, Any]], results: Mapping[str, Mapping[str, str]]) -> str:
    """The page from what was judged."""
    lines, missing = [], {}
    for package, entry in table.items():
        for name, row in entry["norms"].items():
            found = results.get(f"{package} {name}", {"error": "it was not run yet"})
            found = {"error": row["not_judged"]} if "not_judged" in row else found
            if "error" in found:
                missing.setdefault((package, found["error"]), []).append(name)
                continue
            cells = {"package": package, "norm": f"`{name}`", **found}
            lines.append(f"| {' | '.join(cell(cells[column]) for column in COLUMNS)} |")
    text = f"{HEAD}\n| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|\n" + "".join(f"{line}\n" for line in lines)
    if missing:
        text += "\n## Not judged\n\n"
    for (package, why), names in missing.items():
        text += f"- {package}, {', '.join(f'`{name}`' for name in names)}: not judged, because {cell(why)}.\n"
    return text


def measure(python: str, folder: Path, table: Path, output: Path, names: list[str], *, installs: bool) -> None:
    """Judges what was not judged yet, and writes the page after each norm."""
    packages, memory = rows(table), folder / "results.json"
    results = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}

    def keep(key: str, found: dict[str, str]) -> None:
        results[key] = found
        memory.write_text(json.dumps(results, indent=1), encoding="utf-8")
        output.write_text(page(packages, results), encoding="utf-8")
        print(f"{key}: {found.get('error') or found['variant'] + '; ' + found['check']}", flush=True)

    for package, entry in packages.items():
        if names and package not in names:
            continue
        why = install(python, package, entry) if installs else ""
        number = "" if why else version_of(python, entry.get("distribution", package))
        for name, row in entry["norms"].items():
            key = f"{package} {name}"
            if "not_judged" in row:
                continue
            if not number:
                keep(key, {"error": why or "it is not installed"})
            elif results.get(key, {}).get("version") != number:
                found = judged(python, row["target"], {**entry, **row}, folder)
                keep(key, {"version": number, **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the environment and of what was judged")
    parser.add_argument("packages", nargs="*", help="those that are judged; without names all of results.toml")
    parser.add_argument("--table", type=Path, default=TABLE, help="the norms")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    parser.add_argument("--python", help="the Python of an environment that is there, into which nothing is installed")
    parser.add_argument("--page", action="store_true", help="judge nothing, write the page")
    parser.add_argument("--judge", help=argparse.SUPPRESS)  # what judged() asks its process
    chosen = parser.parse_args()
    if chosen.judge:
        target, init, framework, call = json.loads(chosen.judge)
        sys.argv[1:] = []  # which some packages read, as tokamax does
        target = target.replace("docs/", f"{ROOT}/docs/")
        if target.endswith(".onnx"):
            sys.path.insert(0, str(ROOT / "docs"))
            from adapters import write_onnx

            write_onnx(Path(target))
        try:
            found = judge(target, init, framework, call)
        except Exception as error:  # a package may raise anything
            found = {"error": f"{type(error).__name__}: {error}"}
        (chosen.folder / "answer.json").write_text(json.dumps(found), encoding="utf-8")
        return
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.page:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        chosen.output.write_text(page(rows(chosen.table), results), encoding="utf-8")
        return
    python = chosen.python or str(folder / "venv" / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder / "venv", with_pip=True)
        kernels = ["-C", "wheel.cmake=false"]  # judging needs no kernels
        command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *kernels, "-e", str(ROOT)]
        subprocess.run([*command, "-c", str(ROOT / "constraints.txt")], check=True)
    measure(python, folder, chosen.table, chosen.output, chosen.packages, installs=not chosen.python)


if __name__ == "__main__":
    main()
