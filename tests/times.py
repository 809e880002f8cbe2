"""The processor time of a test in each file, for `selection.py`: ``PYTHONPATH=tests pytest -p times --times FILE``.

Wall time depends on what else the machine does; processor time does much less. The time of a test holds its setup, its
end and the programs that it starts, and the import of a framework if it is the first that needs it.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times",
        type=Path,
        help="write the mean seconds of processor time of the tests of each file to this JSON file",
    )


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
        self.of_tests: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.of_tests[report.nodeid] += getattr(report, "processor_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Writes the file, and the files of tests that take longest to the screen."""
        files: defaultdict[str, list[float]] = defaultdict(list)
        for name, seconds in self.of_tests.items():
            files[name.partition("::")[0]].append(seconds)
        table = {name: round(sum(seconds) / len(seconds), 3) for name, seconds in sorted(files.items())}
        self.path.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")
        terminalreporter.write_line("seconds  tests  file")
        for name, seconds in sorted(files.items(), key=lambda item: -sum(item[1]))[:40]:
            terminalreporter.write_line(f"{sum(seconds):7.1f}  {len(seconds):5}  {name}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Whatever changed, each file gets as many cases of its tests as any other."""
    config._rmsnorm_change = None
    path = config.getoption("--times")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Table(path), "rmsnorm-times")
