"""The results of a run: metrics.csv, summary.json, figures, and a table on the screen."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final

import numpy as np

from experiments.experiment import Experiment
from experiments.record import Record
from rmsnorm import screen
from rmsnorm.bench.files import environment
from rmsnorm.files import write_text

ROWS: Final = 200  # of metrics.csv, for a seed and a norm; the rows of evaluations come on top


def summary(experiment: Experiment, record: Record, seeds: Sequence[int], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What summary.json says. Times are medians over the steps of all seeds; quality is that of the last step."""
    norms = {norm: _of_norm(experiment, record, seeds, norm) for norm in record.settings["norms"]}
    return {
        **record.settings,
        "title": experiment.title,
        "quality": experiment.quality,
        "paper": dict(experiment.paper),
        "seeds": list(seeds),
        "norms": norms,
        "peak_memory": record.peak_memory,  # bytes, of the process with the models of all norms
        "facts": dict(facts),
        "environment": environment(),
    }


def _of_norm(experiment: Experiment, record: Record, seeds: Sequence[int], norm: str) -> dict[str, Any]:
    own = [row for row in record.evaluations if row["norm"] == norm]
    last = [[row[experiment.quality] for row in own if row["seed"] == seed][-1] for seed in seeds]
    seconds = [row[1] for seed in seeds for row in record.measured[seed, norm]]
    return {
        "quality": last,
        "mean": fmean(last),
        "sd": stdev(last) if len(last) > 1 else None,
        "loss": fmean(record.measured[seed, norm][-1][0] for seed in seeds),
        "seconds_per_step": median(seconds),
        "parameters": record.parameters[norm],
    }


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
    """Columns and rows: quality, time of a step, its ratios to those of no norm and of LayerNorm, and the paper's."""
    columns = ["norm", result["quality"], "ms a step", "of none", "of layer", "of layer in the paper", "parameters"]
    rows = []
    for norm, own in result["norms"].items():
        quality = _number(own["mean"]) + ("" if own["sd"] is None else f" ± {_number(own['sd'])}")
        ratios = [_ratio(own, result["norms"].get(other)) for other in ("none", "layer")]
        paper = result["paper"].get(norm)
        shown = "-" if paper is None else f"{1 + paper / 100:.2f}"
        rows.append([norm, quality, f"{own['seconds_per_step'] * 1e3:.3g}", *ratios, shown, f"{own['parameters']:,}"])
    return columns, rows


def _number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _ratio(own: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    return "-" if other is None else f"{own['seconds_per_step'] / other['seconds_per_step']:.2f}"


def show(result: Mapping[str, Any]) -> None:
    screen.console().print(screen.fitting_table(*table(result), ["parameters"]))
