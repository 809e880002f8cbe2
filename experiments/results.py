"""The results of a run: metrics.csv, summary.json, figures, and a table on the screen."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.timing.machine import environment
from experiments.experiment import Experiment
from experiments.record import Record
from experiments.verdict import interval, is_not_worse
from rmsnorm.files import write_text

ROWS: Final = 200  # of metrics.csv, for a seed and a norm; the rows of evaluations come on top


def summary(experiment: Experiment, record: Record, seeds: Sequence[int], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says. Quality is that of the last step.

    ``minus_layer`` compares a norm with LayerNorm, seed by seed: see experiments.verdict.
    """
    norms = {norm: _of_norm(experiment, record, seeds, norm) for norm in record.settings["norms"]}
    for own in norms.values() if "layer" in norms else ():
        pairs = zip(own["quality"], norms["layer"]["quality"], strict=True)
        differences = [value - other for value, other in pairs]
        verdict = is_not_worse(differences, experiment.margin)
        own["minus_layer"] = {"interval": interval(differences), "is_not_worse": verdict}
    return {
        **record.settings,
        "title": experiment.title,
        "quality": experiment.quality,
        "paper": dict(experiment.paper),
        "seeds": list(seeds),
        "norms": norms,
        "facts": dict(facts),
        "environment": environment(),
    }


def _of_norm(experiment: Experiment, record: Record, seeds: Sequence[int], norm: str) -> dict[str, Any]:
    own = [row for row in record.evaluations if row["norm"] == norm]
    last = [[row[experiment.quality] for row in own if row["seed"] == seed][-1] for seed in seeds]
    reached = [
        next((row["step"] for row in own if row["seed"] == seed and row[experiment.quality] >= experiment.level), None)
        for seed in seeds
    ]
    steps = None if None in reached else median(step for step in reached if step)  # None: a seed stays below
    lower, middle, upper = quantiles(last, method="inclusive") if len(last) > 1 else last * 3
    return {
        "quality": last,
        "median": middle,
        "quartiles": [lower, upper],
        "steps_to_level": steps,
        "loss": fmean(row[0] for seed in seeds for row in _last_tenth(record.measured[seed, norm])),
        "parameters": record.parameters[norm],
    }


def _last_tenth(rows: Sequence[Any]) -> Sequence[Any]:
    return rows[-max(1, len(rows) // 10) :]


def metrics(record: Record) -> Iterator[dict[str, Any]]:
    """Rows of metrics.csv: the mean loss since the row before, the seconds of training, and measures if there are."""
    evaluations = {(row["seed"], row["norm"], row["step"]): row for row in record.evaluations}
    for (seed, norm), rows in record.measured.items():
        losses, seconds = np.array(rows).T
        total, begin = seconds.cumsum(), 0
        steps = set(range(max(1, len(rows) // ROWS), len(rows) + 1, max(1, len(rows) // ROWS)))
        steps |= {step for other, name, step in evaluations if (other, name) == (seed, norm)}
        for step in sorted(steps):
            row = {"seed": seed, "norm": norm, "step": step, "seconds": round(float(total[step - 1]), 6)}
            row["loss"] = float(f"{losses[begin:step].mean():.6g}")
            yield row | evaluations.get((seed, norm, step), {})
            begin = step


def write(folder: Path, record: Record, result: Mapping[str, Any]) -> None:
    """Write the files of a run."""
    from experiments.figures import draw

    rows = list(metrics(record))
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_text(folder / "metrics.csv", text.getvalue())
    draw(folder, rows, result)
    write_text(folder / "summary.json", json.dumps(_finite(result), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON has not: a run that diverges has them."""
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: quality with its quartiles, the difference from LayerNorm, and whether it is not worse."""
    columns = ["norm", result["quality"], "quartiles", "steps to the level", "minus layer", "not worse"]
    rows = []
    for norm, own in result["norms"].items():
        steps = own["steps_to_level"]
        row = [norm, number(own["median"]), span(own["quartiles"]), "-" if steps is None else f"{steps:,.0f}"]
        pair = own.get("minus_layer", {"interval": None, "is_not_worse": "-"})
        is_layer = norm == "layer"
        row += ["-", "-"] if is_layer else [span(pair["interval"], "+"), pair["is_not_worse"]]
        rows.append(row)
    return columns, rows


def number(value: float | None, sign: str = "") -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:{sign}.3g}"


def span(ends: Sequence[float | None] | None, sign: str = "") -> str:
    return "-" if ends is None else " to ".join(number(end, sign) for end in ends)


def show(result: Mapping[str, Any]) -> None:
    _print(*table(result))


def show_times(result: Mapping[str, Any]) -> None:
    """The time of a step over that with LayerNorm of the same kind."""
    rows = []
    for kind, norms in result["seconds"].items():
        for norm, own in norms.items():
            ratios = [f"{own[part] / norms['layer'][part]:.2f}" for part in own] if "layer" in norms else ["-"] * 3
            rows.append([kind, norm, *ratios, f"{own['step'] * 1e3:.3g}"])
    columns = ["operations", "norm", "forward, of layer", "backward", "step", "ms a step"]
    _print(columns, rows)


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
