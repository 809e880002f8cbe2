"""The page of all runs, in Markdown: the claim, our answer, the tables, the figures. Nothing in it is by hand."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from experiments.figures import OVERVIEW, measured
from experiments.norms import has
from experiments.results import number, span
from experiments.runs import RUNS, Planned
from experiments.timing import PARTS
from experiments.verdict import LEAST
from rmsnorm.files import read_json, reading

_WANTED: Final = "what python -m experiments all writes"
_FIGURES: Final = (  # run, figure, what it is
    ("translation", "loss-steps.svg", "the paper's figure of RNNSearch: the loss over the first steps"),
    ("center", "quality.svg", "its figure of robustness: BLEU where 0.2 is added to every matrix at the beginning"),
    ("mlp-4", "quality.svg", "the MLP at a batch of 4"),
)
_HOW: Final = """\
A *verdict* is on the statement that RMSNorm's quality is not lower than LayerNorm's by more than the margin. Margins
and levels stand in the programs, and a run keeps them from its beginning. A seed is a pair: both norms begin with the
same weights and train on the same batches. The interval of the median difference comes from the order of the
differences and assumes no distribution; with five seeds it goes from the least to the largest, with 94 % confidence.
*Yes* means that the whole interval is above minus the margin, *no* that all of it is below. *At the ceiling* stands in
the place of yes where both norms have the highest quality that there is (medians): such a task cannot tell them apart.

A *time* is the least of many turns, in which all models take one step on the same batch in changing order, in one
process with one thread. *separate*: both norms as separate operations, as in the paper's programs. *framework*: both
as the framework ships them. *ours*: RMSNorm of this package, LayerNorm of the framework. A model without a norm shows
what a norm of no cost would save. PyTorch runs operation by operation; in Flax (`translation`, `retrieval`) XLA
compiles whole steps, with every norm. On a CPU PyTorch ships LayerNorm as one kernel and RMSNorm as several
operations."""
_CHANGES: Final = """\
- **Harder tasks.** Where both norms are at the ceiling, a longer training shows nothing: it takes other data.
- **Size.** All models are small. In a large model a norm is a smaller part of a
  step, and its fixed cost counts less. `--data` and the options take the paper's data and sizes.
- **A GPU.** Nothing here was measured on one; the paper's times were.
- **More seeds.** Five decide only what every seed agrees on. `--seeds 1,2,3,4,5,6,7,8` continues a run; with eight the
  interval leaves out one seed at each end."""
_REMOVED: Final = "2026-11-26"
_GONE: Final = """\
The quality was trained with *ours*: this package as it was on that day, whose engine for CPUs (numba) was removed on
2026-11-26. Nothing was trained or timed since, and this page has no time of *ours*."""
_CEILINGS: Final = {"BLEU": 100.0, "recall": 100.0, "accuracy": 1.0}
_CEILING: Final = "at the ceiling"


def page(folder: Path, beside: Path) -> str:
    """The page of the runs in a folder, whole: what stands in a file of its name is lost. Draws ``overview.svg``.

    Links to figures begin at the folder ``beside``.

    Raises:
        FileNotFoundError: a run is missing.
        ValueError: a result is damaged.
    """
    from experiments.figures import draw_overview

    results = {run.name: _read(folder / run.name / "summary.json") for run in RUNS}
    times = {run.name: _read(folder / run.name / "times.json") for run in RUNS if run.turns}
    with reading("report", folder, _WANTED):
        draw_overview(folder / OVERVIEW, results, times)
        parts = [*_answer(results, times), f"![overview]({_link(folder / OVERVIEW, beside)})"]
        parts += ["## Quality", "\n".join(_qualities(results)), "\n".join(_reached(results)), _batch(results)]
        parts += ["## Time of a step", "\n".join(_times(times)), _parts_of_time(times)]
        parts += ["## The paper's figures"]
        parts += [f"![{text}]({_link(folder / name / file, beside)})\n*{text}.*" for name, file, text in _FIGURES]
        parts += ["## How it was measured", _HOW, "\n".join(_sizes(results)), *_machines(results, times)]
        parts += ["## What would change it", _CHANGES]
    return "\n\n".join(parts) + "\n"


def _read(path: Path) -> Any:
    return read_json("report", path, _WANTED)


def _link(path: Path, beside: Path) -> str:
    return Path(os.path.relpath(path, beside)).as_posix()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cells)} |"


def _verdict(result: Mapping[str, Any], norm: str = "rms") -> str:
    """Whether it is not worse: yes, no, not decided, or at the ceiling, where yes says nothing."""
    own, text = result["norms"], str(result["norms"][norm]["minus_layer"]["is_not_worse"])
    least = min(own[name]["median"] for name in (norm, "layer"))
    return _CEILING if text == "yes" and math.isclose(least, _CEILINGS[result["quality"]]) else text


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ratios(times: Mapping[str, Any], kind: str, norm: str = "rms", part: str = "step") -> dict[str, float]:
    """Of the time with LayerNorm of the same kind."""
    result = {}
    for name, own in times.items():
        norms = own["seconds"][kind]
        if norm in norms:
            result[name] = norms[norm][part] / norms["layer"][part]
    return result


def _percent(ratio: float) -> str:
    return f"{100 * abs(1 - ratio):.0f} % {'less' if ratio < 1 else 'more'}"


def _answer(results: Mapping[str, Any], times: Mapping[str, Any]) -> Iterator[str]:
    yield "# Is RMSNorm as good as LayerNorm, in less time?"
    yield "`python -m experiments report` writes this page from the results beside it."
    yield (
        "**The claim.** RMSNorm has the quality of LayerNorm and takes 7 % to 64 % less time "
        "(Zhang & Sennrich 2019, [arXiv 1910.07467](https://arxiv.org/abs/1910.07467))."
    )
    groups = {text: [name for name, own in results.items() if _verdict(own) == text] for text in _VERDICTS}
    said = "; ".join(f"{text} in {len(names)} ({_names(names)})" for text, names in groups.items() if names)
    solved = [name for name, own in results.items() if _verdict(own) == _CEILING]
    yield (
        "**Our answer on quality.** RMSNorm is not worse than LayerNorm by more than the margin: of "
        f"{len(results) - len(solved)} runs that can decide, {said}."
    )
    below = [name for name in groups["not decided"] if results[name]["norms"]["rms"]["minus_layer"]["interval"][1] < 0]
    if below:
        yield f"Of those that are not decided, RMSNorm is below LayerNorm in every seed of {_names(below)}."
    if solved:
        equal = ", ".join(f"`{name}` {_equal(results[name])}" for name in solved)
        yield (
            f"The other {len(solved)} of {len(results)} runs decide nothing: both norms are at the ceiling of a "
            f"generated task ({equal}), so that RMSNorm is not worse there is no evidence."
        )
    sentences = []
    for kind in measured(times):
        ratios = _ratios(times, kind)
        least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        ends = f"{_percent(ratios[least])} (`{least}`) to {_percent(ratios[most])} (`{most}`)"
        faster = sum(ratio < 1 for ratio in ratios.values())
        sentences.append(
            f"{_KINDS[kind]}, a step takes from {ends} time than with LayerNorm: less in {faster} of {len(ratios)}"
        )
    yield "**Our answer on time.** " + ". ".join(sentences) + "."


def _equal(result: Mapping[str, Any]) -> str:
    layer, rms = (number(result["norms"][norm]["median"]) for norm in ("layer", "rms"))
    return f"{layer} = {rms} {result['quality']}"


_VERDICTS: Final = ("yes", "not decided", "no")
_KINDS: Final = {
    "separate": "As separate operations, as in the paper's programs",
    "framework": "As the frameworks ship both norms",
    "ours": "With our RMSNorm and the framework's LayerNorm",
}
_NORMS: Final = {"none": "no norm", "rms": "RMSNorm", "prms": "pRMSNorm"}


def _qualities(results: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, result in results.items():
        own, statement = result["norms"], result["statement"]
        medians = [number(own[norm]["median"]) if norm in own else "-" for norm in ("none", "layer", "rms", "prms")]
        partial = _verdict(result, "prms") if "prms" in own else "-"
        difference = span(own["rms"]["minus_layer"]["interval"], "+")
        level = "reached" if max(norm["median"] for norm in own.values()) >= statement["level"] else "**missed**"
        rows.append(
            [name, f"{result['quality']}, {number(statement['level'])} {level}", *medians, number(statement["margin"]),
             difference, f"**{_verdict(result)}**", partial]
        )  # fmt: skip
    columns = ["run", "measure, level", "no norm", "LayerNorm", "RMSNorm", "pRMSNorm", "margin",
               "RMSNorm minus LayerNorm", "not worse?", "pRMSNorm?"]  # fmt: skip
    yield from _table(columns, rows)
    yield ""
    yield (
        f"Medians of {LEAST} seeds after the last step; the difference is the interval of its median. The statistic of "
        "pRMSNorm has the first 6.25 % of the elements of a norm, `prms-25` the first 25 %."
    )


def _reached(results: Mapping[str, Any]) -> Iterator[str]:
    """All norms: quartiles and how soon the level is reached."""
    rows = []
    for name, result in results.items():
        for norm, own in result["norms"].items():
            steps = own["steps_to_level"]
            pair = "-" if norm == "layer" else span(own["minus_layer"]["interval"], "+")
            shown = "not by every seed" if steps is None else f"{steps:,.0f}"
            rows.append([name, norm, span(own["quartiles"]), pair, shown, f"{result['options']['steps']:,}"])
    yield "Quartiles of every norm, its difference from LayerNorm, and the first evaluation at the level (median):"
    yield ""
    yield from _table(["run", "norm", "quartiles", "minus LayerNorm", "steps to the level", "of"], rows)


def _batch(results: Mapping[str, Any]) -> str:
    """What batch norm does at both batch sizes of the MLP."""
    shown = []
    for name in ("mlp-60", "mlp-4"):
        own = results[name]["norms"]
        difference = span(own["batch"]["minus_layer"]["interval"], "+")
        medians = [number(own[norm]["median"]) for norm in ("batch", "layer")]
        loss = own["batch"]["loss"] / own["layer"]["loss"]
        size = results[name]["options"]["batch_size"]
        shown.append(
            f"With {size} images in a batch its accuracy is {medians[0]}, LayerNorm's {medians[1]} (difference "
            f"{difference}), and its training loss at the end is {loss:.2g} times LayerNorm's"
        )
    return (
        f"Batch norm and the size of a batch, in the MLP. {'. '.join(shown)}. It trains with the statistics of a "
        "batch; the accuracy is measured with their running means."
    )


def _times(times: Mapping[str, Any]) -> Iterator[str]:
    rows, kinds = [], measured(times)
    timed = [(norm, kind) for norm in _NORMS for kind in kinds if has(kind, norm)]
    for name, own in times.items():
        paper = own.get("paper", {}).get("rms")
        cells = []
        for norm, kind in timed:
            ratio = _ratios({name: own}, kind, norm).get(name)
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        rows.append([name, *cells, "-" if paper is None else f"{1 + paper / 100:.2f}"])
    columns = [f"{_NORMS[norm]}, {kind}" for norm, kind in timed]
    yield from _table(["of LayerNorm's time", *columns, "RMSNorm in the paper"], rows)


def _parts_of_time(times: Mapping[str, Any]) -> str:
    shown = []
    for part in PARTS[:2]:
        ratios = {kind: _ratios(times, kind, part=part) for kind in measured(times)}
        texts = (f"{kind} " + ", ".join(f"{ratio:.2f}" for ratio in own.values()) for kind, own in ratios.items())
        shown.append(f"{part}: {'; '.join(texts)}")
    return f"RMSNorm's ratios in the order of the rows, {'. '.join(shown)}."


def _sizes(results: Mapping[str, Any]) -> Iterator[str]:
    planned: dict[str, Planned] = {run.name: run for run in RUNS}
    for name, result in results.items():
        facts = ", ".join(f"{fact} {value}" for fact, value in result["facts"].items())
        options = "".join(f" --{option.replace('_', '-')} {value}" for option, value in planned[name].options.items())
        yield f"- `{name}`, `python -m experiments {planned[name].experiment}{options}`: {result['title']}; {facts}."


def _machines(results: Mapping[str, Any], times: Mapping[str, Any]) -> Iterator[str]:
    first = next(iter(times.values()))["environment"]
    dates = {own["environment"]["date"][:10] for own in (*results.values(), *times.values())}
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    yield f"{first['processor']}, {first['cores']} cores, {' and '.join(sorted(dates))}, {versions}."
    if max(dates) < _REMOVED:
        yield _GONE
