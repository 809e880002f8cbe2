"""The results of the comparison: tables for a terminal, JSON, JUnit XML and Markdown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rmsnorm import dtypes, errors, page
from rmsnorm.accuracy.bounds import QUANTITIES
from rmsnorm.files import replacing, write_text
from rmsnorm.frameworks import FRAMEWORKS
from rmsnorm.parity.fitting import OPTIONS, together
from rmsnorm.parity.run import BackendRun, Record
from rmsnorm.screen import Fitting
from rmsnorm.version import VERSION

_LEGEND: Final = (
    "Cells: the largest distance to the golden in f16 bf16 f32 f64, in ulps of the terms that make the element; "
    "0 is bit for bit, - is not there, x is beyond the bound."
)


_PICTURES: Final = 6
_CASES: Final = 12  # names in a line


def skips(run: BackendRun, *, edges: bool = False) -> list[tuple[str, str]]:
    """What was not compared, and why: cases with the same reason together, with the dtypes where it is some of them.

    ``edges``: those that the target refused, in place of the others.
    """
    types: dict[tuple[str, str], list[str]] = {}
    for skip in run.skipped:
        if skip.edge != edges:
            continue
        types.setdefault((skip.reason, skip.case), []).append(dtypes.short(skip.dtype) if skip.dtype else "")
    compared = {record.case for record in run.records}
    alike: dict[tuple[str, str], list[str]] = {}
    for (reason, case), own in types.items():
        where = f" in {' '.join(own)}" if case in compared else ""
        alike.setdefault((reason, where), []).append(repr(case) if any(own) else case)
    return [
        (f"{', '.join(names[:_CASES])}{f' and {len(names) - _CASES} more' * (len(names) > _CASES)}{where}", reason)
        for (reason, where), names in alike.items()
    ]


def options(run: BackendRun) -> dict[str, int]:
    """How many comparisons a run has in the cases for a gate, a mask, a residual, and for several of these."""
    counts = Counter(record.case.partition(" of ")[0] for record in run.records)  # "mask of columns" has a mask
    return {name: counts[name] for name in together(OPTIONS) if counts[name]}


def terminal(runs: Sequence[BackendRun], *, failures: int = 12) -> RenderableType:
    """A line for every backend, a table for every one that ran, and the first failures."""
    parts: list[RenderableType] = [_line(run) for run in runs]
    for run in runs:
        if run.records:
            by_dtype = Group(*(_table(run, (dtype,)) for dtype in dtypes.FLOATS if _of(run, dtype)))
            parts += ["", Fitting(_table(run, dtypes.FLOATS), by_dtype), _bits(run)]
    if any(run.records for run in runs):
        parts.append(Text(_LEGEND, style="dim"))
    failed = [record for run in runs for record in run.failures]
    for record in failed[:failures]:
        parts.append(Text(f"x {_label(record)}: {numbers(record)}; {record.detail}", style="red"))
    if len(failed) > failures:
        parts.append(Text(f"x and {len(failed) - failures} more; --json FILE has them all", style="red"))
    return Group(*parts)


def write_json(runs: Sequence[BackendRun], path: Path) -> None:
    """Every record, and the status of every backend; a number that could not be measured is null."""
    document = {
        "rmsnorm": VERSION,
        "backends": [
            {"backend": run.name, "framework_version": run.version, "device": run.device, "status": run.status,
             "message": run.message, "cases": run.cases, "seconds": round(run.seconds, 3),
             "options": options(run), "skipped": [skip._asdict() for skip in run.skipped]}
            for run in runs
        ],
        "records": [
            {name: None if isinstance(value, float) and not math.isfinite(value) else value
             for name, value in asdict(record).items()}
            for run in runs for record in run.records
        ],
    }  # fmt: skip
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def write_junit(runs: Sequence[BackendRun], path: Path) -> None:
    """A suite for every backend, a test case for every record."""
    root = ElementTree.Element("testsuites", name="rmsnorm check")
    for run in runs:
        broken = run.status in ("crashed", "hung", "stopped", "refused")
        unasked = int(run.status == "absent") + len(run.skipped)
        count = len(run.records) + len(run.skipped) + int(broken or run.status == "absent")
        suite = ElementTree.SubElement(
            root, "testsuite", name=run.name, tests=str(count), failures=str(len(run.failures)),
            errors=str(int(broken)), skipped=str(unasked), time=f"{run.seconds:.3f}",
        )  # fmt: skip
        for record in run.records:
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"rmsnorm.{run.name}.{record.variant}",
                name=f"{record.case} [{dtypes.short(record.dtype)}] {record.quantity}",
            )  # fmt: skip
            if not record.passed:
                message = numbers(record) if record.bound else record.detail
                message += f"; {run.message}" if run.message else ""
                ElementTree.SubElement(case, "failure", message=message).text = record.detail
        for skip in run.skipped:
            name = f"{skip.case} [{dtypes.short(skip.dtype)}]" if skip.dtype else skip.case
            case = ElementTree.SubElement(suite, "testcase", classname=f"rmsnorm.{run.name}", name=name)
            ElementTree.SubElement(case, "skipped", message=skip.reason)
        if broken or run.status == "absent":
            case = ElementTree.SubElement(suite, "testcase", classname=f"rmsnorm.{run.name}", name="the backend itself")
            ElementTree.SubElement(case, "error" if broken else "skipped", message=f"{run.status}: {run.message}")
    for element in root.iter():
        element.attrib.update({name: errors.printable(value) for name, value in element.attrib.items()})
        element.text = element.text and errors.printable(element.text)
    ElementTree.indent(root)
    with replacing(path) as temporary:
        ElementTree.ElementTree(root).write(temporary, encoding="utf-8", xml_declaration=True)


def write_markdown(runs: Sequence[BackendRun], path: Path) -> None:
    """A line for every backend, variant, dtype and quantity: the worst of its cases."""
    lines = ["# Parity with the golden", ""]
    lines += [f"- {_line(run).plain}" for run in runs]
    lines += [f"- not compared: {what}: {reason}" for run in runs for what, reason in skips(run)]
    lines += ["", "| backend | variant | dtype | quantity | parity ratio | bound | bit-identical | max ulp | |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for run in runs:
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in run.records:
            groups.setdefault((record.variant, record.dtype, record.quantity), []).append(record)
        for (variant, dtype, quantity), records in groups.items():
            worst = _worst(records)
            lines.append(
                f"| {run.name} | {variant} | {dtypes.short(dtype)} | {quantity} | {worst.parity_ratio:.3g} | "
                f"{worst.bound:.3g} | {100 * min(r.bit_identical for r in records):.1f} % | "
                f"{max(r.max_ulp for r in records):.0f} | {'held' if worst.passed else 'differs'} |"
            )
    write_text(path, "\n".join(lines) + "\n")


def write_html(runs: Sequence[BackendRun], path: Path) -> None:
    """One page with the verdicts, the tables, and a picture of where the worst comparisons differ."""
    write_text(path, page.document("Parity with the golden", *html_parts(runs)))


def html_parts(runs: Sequence[BackendRun]) -> list[str]:
    """The parts of that page."""
    parts = [page.paragraph(_line(run).plain, "good" if run.status == "held" else "bad") for run in runs]
    for run in runs:
        failures = sorted(run.failures, key=lambda record: (record.quantity != "y", record.picture is None))
        for record in failures[:_PICTURES]:
            parts += [page.heading(_label(record)), page.paragraph(f"{numbers(record)}; {record.detail}", "bad")]
            if record.picture is not None:
                parts += _pictures(record.picture)
        if len(failures) > _PICTURES:
            parts.append(page.paragraph(f"and {len(failures) - _PICTURES} more that differ"))
    for run in runs:
        if run.records:
            table = _table(run, dtypes.FLOATS)
            rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
            parts += [page.heading(str(table.title)), page.table([str(c.header) for c in table.columns], rows)]
            parts.append(page.paragraph(_bits(run).plain, "faint"))
    parts += [page.paragraph(_LEGEND, "faint")] if any(run.records for run in runs) else []
    for run in runs:
        if run.skipped:
            parts += [page.heading("Not compared"), page.table(("what", "why"), skips(run), bad="")]
    return parts


def _pictures(picture: dict[str, Any]) -> list[str]:
    counts, (row, column) = picture["counts"], picture["corner"]
    labels = ["same bits", "1 ulp", *(f"{2 ** (i - 1)} to {2**i - 1}" for i in range(2, len(counts) - 1))]
    labels.append(f"{2 ** (len(counts) - 2)} or more")
    total, some = sum(counts), [i for i, count in enumerate(counts) if count and i]
    shown = [0, *range(some[0], some[-1] + 1)] if some else [0]
    shares = [f"{counts[i]} ({100 * counts[i] / total:.3g} %)" for i in shown]
    where = f"Where: ulps of rows from {row} and columns from {column}, around the largest difference"
    return [
        page.bars(
            f"How many of {total} elements are how many ulps off",
            [labels[i] for i in shown],
            [counts[i] for i in shown],
            shares,
        ),
        page.heat_map(where, picture["block"], (row, column)),
    ]


def _title(run: BackendRun) -> str:
    return FRAMEWORKS[run.name].title if run.name in FRAMEWORKS else run.name


def _of(run: BackendRun, dtype: str) -> bool:
    return any(record.dtype == dtype for record in run.records)


def _table(run: BackendRun, types: Sequence[str]) -> Table:
    """One number in a cell for every dtype."""
    title = _title(run)
    if run.version:
        title += f" {run.version} on {run.device}"
    if len(types) == 1:
        title += f", {dtypes.short(*types)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant", no_wrap=True)
    for quantity in QUANTITIES:
        table.add_column({"inverse_rms": "1/rho"}.get(quantity, quantity), justify="right", no_wrap=True)
    own = [record for record in run.records if record.dtype in types]
    compared = [record for record in own if math.isfinite(record.max_ulp) or not record.passed]
    for variant in dict.fromkeys(record.variant for record in compared):
        cells = []
        for quantity in QUANTITIES:
            records = [r for r in compared if (r.variant, r.quantity) == (variant, quantity)]
            cells.append(_cell(records, types))
        table.add_row(variant, *cells)
    return table


def _cell(records: Sequence[Record], types: Sequence[str]) -> Text:
    numbers = []
    for dtype in types:
        own = [record for record in records if record.dtype == dtype]
        numbers.append("x" if any(not r.passed for r in own) else _ulps(r.parity_ratio / 2 for r in own))
    return Text(" ".join(numbers) if set(numbers) != {"-"} else "-", style="red" if "x" in numbers else "")


def _ulps(distances: Iterable[float]) -> str:
    largest = max(distances, default=-1.0)
    if largest < 0:
        return "-"
    return f"{math.ceil(largest * 10) / 10:.1f}" if 0 < largest < 10 else f"{math.ceil(largest)}"


def _bits(run: BackendRun) -> Text:
    shares = []
    for dtype in dtypes.FLOATS:
        own = [r.bit_identical for r in run.records if (r.quantity, r.dtype) == ("y", dtype)]
        if own:
            shares.append(f"{dtypes.short(dtype)} {100 * sum(own) / len(own):.2f} %")
    return Text(f"y bit-identical: {', '.join(shares)}", style="dim")


def _line(run: BackendRun) -> Text:
    name = _title(run)
    passed = len(run.records) - len(run.failures)
    instead = f"; {run.message}" if run.message else ""
    words = {
        "held": (f"held: all {len(run.records)} comparisons of {run.cases} cases", "green"),
        "differs": (f"differs: {len(run.failures)} of {len(run.records)} comparisons{instead}", "red"),
        "absent": (f"absent: {run.message}", "yellow"),
        "refused": (f"refused: {run.message}", "red"),
        "crashed": (f"crashed after {run.cases} cases ({passed} comparisons held): {run.message}", "red"),
        "hung": (f"hung: {run.message}", "red"),
    }
    text, style = words.get(run.status, (run.status, ""))
    return Text(f"{name} {text} ({run.seconds:.0f} s)" if run.records else f"{name} {text}", style=style)


def _worst(records: Sequence[Record]) -> Record:
    return max(records, key=lambda r: (not r.passed, r.parity_ratio / r.bound if r.bound else math.inf))


def _label(record: Record) -> str:
    return f"{record.backend} {record.variant} {dtypes.short(record.dtype)} {record.case!r} {record.quantity}"


def numbers(record: Record) -> str:
    """The parity ratio of a comparison beside its bound, and the share of identical bits where that is bounded."""
    text = f"parity ratio {record.parity_ratio:.3g}, bound {record.bound:.3g}"
    if record.identical_bound:
        text += f"; {100 * record.bit_identical:.2f} % identical, bound {100 * record.identical_bound:.2f} %"
    return text
