"""Do the tests notice a fault? ``make mutants`` puts one small fault at a time into a copy of the package.

A mutant is one change of one line: a comparison the other way, a number one larger, a plus for a minus, a ``not`` more,
a statement left out. Which lines are changed depends on the seed alone. The mutants are spread over the parts by the
size of their code. For each one the tests of its part run, and stop at the first failure: then the mutant is *killed*.
One that no test notices *survived*, and somebody has to look at it. Some change nothing that can be seen: a faster way
left out, say.

    python tests/mutation.py --count 100 --seed 1 --json mutants.json [--all] [--only survived.json] [--minutes 45]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from changes import ALLOWED, TESTS, part_of

ROOT = Path(__file__).parents[1]
SKIPPED = ("rmsnorm/gpu/",)  # interpreted kernels: their tests take minutes
_OTHER_WAY = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_OTHER_OPERATION = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*"}


def tests_of(path: str) -> list[str]:
    return TESTS[part_of(path)]


def _changed(line: str, start: int, end: int, text: str) -> str:
    """The line with its bytes from start to end replaced: the columns of ``ast`` count bytes."""
    raw = line.encode()
    return (raw[:start] + text.encode() + raw[end:]).decode()


def mutations(source: str) -> Iterator[tuple[int, str, str]]:
    """The line's number, what is done to it, and the new line. Only what stands on one line is changed."""
    tree, lines = ast.parse(source), source.splitlines()
    names = {id(node) for top in ast.walk(tree) if isinstance(top, ast.JoinedStr) for node in ast.walk(top)}
    for top in ast.walk(tree):  # annotations and the text of messages are not computed with
        for field in ("annotation", "returns"):
            if part := getattr(top, field, None):
                names |= {id(node) for node in ast.walk(part)}
        if isinstance(top, ast.Raise):
            names |= {id(node) for node in ast.walk(top)}
    for node in ast.walk(tree):
        number = getattr(node, "lineno", 0)
        if id(node) in names or not number:
            continue
        if node.lineno != node.end_lineno and not isinstance(node, ast.If):  # of which only the condition is changed
            continue
        line = lines[number - 1]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left.end_col_offset, node.comparators[0].col_offset
            before = line.encode()[left:right].decode()
            brackets = before.replace(before.strip("() "), " {} ")
            yield number, "comparison", _changed(line, left, right, brackets.format(_OTHER_WAY[type(node.ops[0])]))
        elif isinstance(node, ast.BinOp) and type(node.op) in _OTHER_OPERATION:
            left, right = node.left.end_col_offset, node.right.col_offset
            before = line.encode()[left:right].decode()
            if len(before.strip("() ")) == 1:
                other = before.replace(before.strip("() "), _OTHER_OPERATION[type(node.op)])
                yield number, "operation", _changed(line, left, right, other)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield number, "number", _changed(line, node.col_offset, node.end_col_offset, repr(node.value + 1))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield number, "truth", _changed(line, node.col_offset, node.end_col_offset, repr(not node.value))
        elif isinstance(node, (ast.If, ast.IfExp)) and node.test.lineno == node.test.end_lineno == number:
            test = line.encode()[node.test.col_offset : node.test.end_col_offset].decode()
            new = _changed(line, node.test.col_offset, node.test.end_col_offset, f"(not ({test}))")
            yield number, "condition", new
        elif isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign)) and not _is_text(node):
            dropped = "pass" if not isinstance(node, ast.Assign) else None
            if dropped:
                yield number, "statement", _changed(line, node.col_offset, node.end_col_offset, dropped)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def choose(count: int, seed: int) -> list[dict[str, Any]]:
    """The mutants: at least two of each part, the rest where most of the code is."""
    every: dict[str, list[dict[str, Any]]] = {name: [] for name in ALLOWED}
    for path in sorted((ROOT / "rmsnorm").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(SKIPPED):
            continue
        source = path.read_text(encoding="utf-8")
        for number, kind, line in mutations(source):
            changed = source.splitlines()
            if changed[number - 1] == line:
                continue
            changed[number - 1] = line
            try:
                ast.parse("\n".join(changed))
            except SyntaxError:
                continue
            every[part_of(name)].append({"file": name, "line": number, "kind": kind, "new": line})
    draw = random.Random(seed)
    total = sum(map(len, every.values()))
    chosen = []
    for mutants in every.values():
        wanted = max(2, round(count * len(mutants) / total))
        chosen += draw.sample(mutants, min(wanted, len(mutants)))
    draw.shuffle(chosen)
    return chosen[:count]


def _run(folder: Path, mutant: dict[str, Any], every: bool, limit: float) -> dict[str, Any]:
    """Puts the fault in, runs the part's tests, takes the fault out again."""
    path = folder / mutant["file"]
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    old, lines[mutant["line"] - 1] = lines[mutant["line"] - 1], mutant["new"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider"]
    command += [*(["--all"] if every else ["--changed", mutant["file"]]), *tests_of(mutant["file"]), mutant["file"]]
    start = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "RMSNORM_TEST_BYTECODE": "0"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        verdict = {0: "survived", 1: "killed", 2: "killed", 5: "no test"}.get(process.returncode, "killed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, verdict = process.communicate()[0], "out of time"
    finally:
        path.write_text(source, encoding="utf-8")
    failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return {**mutant, "old": old, "verdict": verdict, "seconds": round(time.monotonic() - start, 1), "by": failed[:160]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="which mutants")
    parser.add_argument("--minutes", type=float, default=45.0, help="stop after so many minutes")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="with the slow tests, as make test-all runs them")
    parser.add_argument("--only", type=Path, help="of a result of this program, those that were not killed")
    parser.add_argument("--json", type=Path, default=Path("mutants.json"))
    arguments = parser.parse_args()
    if arguments.only:
        mutants = [row for row in json.loads(arguments.only.read_text())["mutants"] if row["verdict"] != "killed"]
    else:
        mutants = choose(arguments.count, arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    folders: Queue[Path] = Queue()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.workers):
            folder = Path(temporary) / str(number)
            ignored = shutil.ignore_patterns(".venv*", ".git", "runs", "site", "build", "dist")
            shutil.copytree(ROOT, folder, ignore=ignored, symlinks=True)
            folders.put(folder)

        def work(mutant: dict[str, Any]) -> dict[str, Any]:
            if time.monotonic() > end:
                return {**mutant, "verdict": "not run"}
            folder = folders.get()
            try:
                return _run(folder, mutant, arguments.all, arguments.limit)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(arguments.workers) as pool:
            for number, result in enumerate(pool.map(work, mutants), 1):
                results.append(result)
                print(
                    f"{number}/{len(mutants)} {result['verdict']:12} {result['file']}:{result['line']} {result['kind']}"
                )
                report = {"seed": arguments.seed, "all": arguments.all, "mutants": results}
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for verdict in ("killed", "survived", "out of time", "no test", "not run"):
        print(f"{verdict}: {sum(row['verdict'] == verdict for row in results)}")


if __name__ == "__main__":
    main()
