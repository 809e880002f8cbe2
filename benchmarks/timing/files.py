"""What the benchmark measured, in files: all of it as JSON, or a summary with one line for each record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rmsnorm.files import write_text
from rmsnorm.specification.version import VERSION
from timing.machine import environment
from timing.run import BenchRun

_NOT_WRITTEN: Final = ("records", "asked", "results")  # of a run


def write_json(runs: Sequence[BenchRun], settings: Mapping[str, Any], path: Path) -> None:
    """Write every record, the outcome of every backend, the settings and the machine."""
    write_text(path, json.dumps(_document(runs, settings), indent=1, allow_nan=False) + "\n")


def write_summary(runs: Sequence[BenchRun], settings: Mapping[str, Any], path: Path) -> None:
    """Write the same as JSON Lines: first the machine, the settings and the backends, then one line for each record."""
    write_text(path, summary(_document(runs, settings)))


def summary(document: Mapping[str, Any]) -> str:
    """The JSON Lines of a document that ``write_json`` wrote.

    Numbers have four digits. Shares of right bits are cut after six, so that only 1 means all of them. What is null,
    false or empty in a record is left out, and so is the number of calls in a turn.

    >>> print(summary({"rmsnorm": "0.1.0", "records": [{"speedup": 1.23456, "bits": {"y": 0.9999999}, "detail": ""}]}))
    {"rmsnorm": "0.1.0"}
    {"speedup": 1.235, "bits": {"y": 0.999999}}
    <BLANKLINE>
    """
    head = {name: value for name, value in document.items() if name != "records"}
    lines = [head, *map(_shortened, document["records"])]
    return "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)


def _document(runs: Sequence[BenchRun], settings: Mapping[str, Any]) -> dict[str, Any]:
    backends = [{name: value for name, value in asdict(run).items() if name not in _NOT_WRITTEN} for run in runs]
    return {
        "rmsnorm": VERSION,
        "environment": environment(),
        "settings": dict(settings),
        "backends": backends,
        "records": [{"backend": run.name, **record} for run in runs for record in run.records],
    }


def _shortened(value: Any, name: str = "") -> Any:
    """A record, or a value in its entry of that name, with fewer digits and entries."""
    if isinstance(value, Mapping):
        kept = {key: entry for key, entry in value.items() if entry not in (None, "", {}) and entry is not False}
        return {key: _shortened(entry, name or key) for key, entry in kept.items() if key != "calls"}
    if not isinstance(value, float):
        return value
    return math.floor(value * 1e6) / 1e6 if name == "bits" else float(f"{value:.4g}")
