"""The processor time of every test and its subprocesses: ``PYTHONPATH=tests pytest -p times --times FILE``.

Wall time depends on what else the machine does; processor time does much less. The time of a test holds its setup and
its end, and the import of a framework if it is the first that needs it. With ``-n`` it is the sum over the workers.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, help="write the seconds of processor time of each test to this JSON file")


def _seconds() -> float:
    return sum(os.times()[:4])  # user and system, of this process and of its children that have ended


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config._rmsnorm_seconds = _seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report: Any = yield
    now = _seconds()
    report.processor_seconds = now - item.config._rmsnorm_seconds
    item.config._rmsnorm_seconds = now
    return report


class _Table:
    """In the process that started the workers: sums what their reports say."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.processor: defaultdict[str, float] = defaultdict(float)
        self.wall: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.processor[report.nodeid] += getattr(report, "processor_seconds", 0.0)
        self.wall[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        rows = {name: [round(self.processor[name], 3), round(self.wall[name], 3)] for name in self.processor}
        self.path.write_text(json.dumps(rows, indent=0))


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--times")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(path), "rmsnorm-times")


def main() -> None:
    """``python tests/times.py times.json``: the files as a table, the longest first."""
    rows: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for name, (processor, wall) in json.loads(Path(sys.argv[1]).read_text()).items():
        row = rows[name.partition("::")[0]]
        row[:] = row[0] + 1, row[1] + processor, row[2] + wall
    print("| file | tests | processor, s | wall, s |\n| --- | --- | --- | --- |")
    for name, (count, processor, wall) in sorted(rows.items(), key=lambda item: -item[1][1]):
        print(f"| {name} | {count} | {processor:.1f} | {wall:.1f} |")


if __name__ == "__main__":
    main()
