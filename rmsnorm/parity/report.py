"""The results of the comparison: text for a terminal, and JSON."""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from rich.text import Text

from rmsnorm.files import write_text
from rmsnorm.identify import mending
from rmsnorm.parity.comparison import Comparison, Run
from rmsnorm.parity.design import is_circumstance
from rmsnorm.parity.lines import difference, inexact, not_compared, numbers, places, refused, shortened, wrapped
from rmsnorm.specification import dtypes
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.specification.variants import Variant
from rmsnorm.specification.version import VERSION

_COMPARED: Final = (
    "Compared were y, 1/rho, the gradients and derivatives with the golden, the exact reference in NumPy."
)
_ELSEWHERE: Final = (
    "Where a number is not bit for bit the golden's, it is within its bound, most often one ulp, the distance to the "
    "next number."
)
_WIDTH: Final = 100  # columns
_OF_HALF: Final = (
    "rounding is",
    "result_dtype is",
    "scale_dtype is",
    "the dtype of y follows",
)  # seen in 16 bits alone
_SHOWN: Final = 5  # lines of failures of a target, and of what is wrong


@dataclass(frozen=True, repr=False)
class Report:
    """The result of ``check``. Printed, it is its ``text``.

    Attributes:
        target: the name of what was checked.
        variant: what it was compared with.
        run: every comparison; report.write_json([run], path) writes it. Its ``skipped`` has what was not compared. If
            the target differs, its ``message`` has what ``identify`` says, and its ``identity`` is the answer of
            ``identify``, or None if that raised an exception.
        label: the name of what it should be, where that is more than the variant.
    """

    target: str
    variant: Variant
    run: Run
    label: str = ""

    @property
    def passed(self) -> bool:
        return self.run.status == "held"

    @cached_property
    def text(self) -> str:
        """The verdict, how to mend it, what else is wrong, the worst differences, and what was not compared."""
        run, name = self.run, self.label or self.variant.label
        where = f"{run.name} {run.version} on {run.device}"
        count = f"{len(run.records)} comparisons of {run.cases} cases"
        if self.passed:
            lines = [f"{self.target} is {name}: all {count} held ({where})", *inexact(run)]
        elif run.status == "refuses":
            agree = f"{count} agree ({where}), {len(run.refusals)} calls are refused"
            lines = [f"{self.target} is {name} where it answers: {agree}"]
        elif run.status == "differs":
            lines = [*self._verdict(name), *self._worst(where)]
        else:
            return f"{self.target} was not compared: {run.message}"
        more = ["report.details, -v or --json FILE has everything"] * (run.status == "differs")
        return "\n".join([*lines, *refused(run), *not_compared(run), *more])

    def _worst(self, where: str) -> list[str]:
        """How many comparisons differ, and some of them."""
        run = self.run
        alike: dict[str, list[Comparison]] = {}
        for record in sorted(run.failures, key=lambda record: (record.quantity != "y", record.case.count("; "))):
            alike.setdefault(_kind(record), []).append(record)
        shown = [shortened(records[0], self.target) for records in list(alike.values())[:_SHOWN]]
        more = f"; {len(shown)} of them" if len(run.failures) > len(shown) else ""
        words = f"{len(run.failures)} of {len(run.records)} comparisons differ ({where}), in {places(run)}{more}:"
        return [wrapped(words, _WIDTH), *shown]

    def _verdict(self, name: str) -> list[str]:
        """The sentence that matters most, how to mend it, and the other sentences of ``identify``."""
        identity, said = self.run.identity, sentences(self.run, self.variant)
        fields = {} if identity is None else identity.unlike(self.variant)
        first = said[0]
        if len(fields) == len(said) - 1:  # nothing is wrong in every variant
            plain = [mending.seen(field, value) for field, value in fields.items()]
            first = (plain[0] or first) if len(fields) == 1 else said[-1]
        said = [f"  {sentence}" for sentence in said if sentence != first]
        if len(said) > _SHOWN:
            said[_SHOWN - 1 : -1] = [f"  and {len(said) - _SHOWN} more"]
        mends = "; ".join(identity.mends(self.variant) if identity else ())
        return [
            f"{self.target} is not {name}: {first.replace(f'{self.target} ', 'it ')}",
            *textwrap.wrap(f"mend: {mends}", 80, subsequent_indent="  ") * bool(mends), *said,
        ]  # fmt: skip

    @cached_property
    def details(self) -> str:
        """Every difference, all that was not compared, and the whole report of ``identify``."""
        run = self.run
        refused = [f"  {entry.case!r} {dtypes.short(entry.dtype)} refused: {entry.message}" for entry in run.refusals]
        lines = [*map(difference, run.failures), *refused, *not_compared(run, width=sys.maxsize)]
        return "\n".join([*lines, run.message if run.identity is None else run.identity.text])

    def __repr__(self) -> str:
        return self.text


def sentences(run: Run, variant: Variant) -> list[str]:
    """What a target is instead: what no variant has, then what the variant has otherwise, then its name.

    Where identify finds nothing, the cases are named, as what is wrong shows in them alone.
    """
    identity = run.identity
    if identity is None:
        return [run.message]
    differences = identity.differences(variant) if identity.variant else ()
    every = [*identity.other_defects, *differences]
    asked = {record.dtype for record in run.records}
    wrong = [sentence for sentence in every if _is_of(sentence, asked)]
    headline = identity.headline
    if (identity.recognised or len(wrong) < len(every)) and identity.last_axes and not wrong:
        groups = f", in groups of {identity['group_size']}" if identity["group_size"] else ""
        headline = f"it agrees on the rows that identify tries{groups}, and not in {places(run)}"
    return [*wrong, headline]


def _is_of(sentence: str, asked: Collection[str]) -> bool:
    """Whether a sentence of ``identify`` may be of these dtypes of x: it asks 16 bits whatever was asked."""
    halves = {dtype for dtype in dtypes.HALF if dtype in asked}
    others = [f"for {dtype} x" for dtype in dtypes.HALF if dtype not in halves]
    return not any(words in sentence for words in others) and bool(halves or not sentence.startswith(_OF_HALF))


def _kind(record: Comparison) -> str:
    """Equal for failures that one line of the text stands for: of one case, of circumstances, or in equal words."""
    words = re.sub(r"\w*\[[^]]*\]|\([^)]*\)|\b(float|bfloat)\d+\b", "", record.detail)
    case = "a circumstance" if is_circumstance(record.case) else record.case
    return f"{case} {record.quantity}" if record.bound else words


def terminal(runs: Sequence[Run], *, failures: int = 12) -> Text:
    """A line for every backend, what was compared and where y is bit for bit the golden's, and the first failures."""
    lines = [_line(run) for run in runs]
    if compared := [run for run in runs if run.records]:
        lines += [Text(_COMPARED), *map(_bits, compared), Text(_ELSEWHERE, style="dim")]
    failed = [(run, record) for run in runs for record in run.failures]
    for run, record in failed[:failures]:
        label = f"{run.name} {record.variant} {dtypes.short(record.dtype)} {record.case!r} {record.quantity}"
        lines.append(Text(f"x {label}: {numbers(record)}; {record.detail}", style="red"))
    if len(failed) > failures:
        lines.append(Text(f"x and {len(failed) - failures} more; --json FILE has them all", style="red"))
    return Text("\n").join(lines)


def write_json(runs: Sequence[Run], path: Path) -> None:
    """Every comparison, the status of every backend, and what ``identify`` says; a number without a value is null."""
    document = {
        "rmsnorm": VERSION,
        "backends": [
            {"backend": run.name, "framework_version": run.version, "device": run.device, "status": run.status,
             "message": run.message, "cases": run.cases, "seconds": round(run.seconds, 3),
             "skipped": [skip._asdict() for skip in run.skipped],
             "identity": None if run.identity is None else run.identity.json}
            for run in runs
        ],
        "records": [
            {"backend": run.name, "framework_version": run.version, "device": run.device,
             **{name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in asdict(record).items()}}
            for run in runs for record in run.records
        ],
    }  # fmt: skip
    write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _title(run: Run) -> str:
    return FRAMEWORKS[run.name].title if run.name in FRAMEWORKS else run.name


def _bits(run: Run) -> Text:
    shares = []
    for dtype in dtypes.FLOATS:
        own = [r.bit_identical for r in run.records if (r.quantity, r.dtype) == ("y", dtype)]
        if own:
            shares.append(f"{dtypes.short(dtype)} {100 * sum(own) / len(own):.2f} %")
    return Text(f"y bit for bit the golden's: {_title(run)} {', '.join(shares)}", style="dim")


def _line(run: Run) -> Text:
    name = _title(run)
    instead = f"; {run.message}" if run.message else ""
    words = {
        "held": (f"held: all {len(run.records)} comparisons of {run.cases} cases", "green"),
        "differs": (f"differs: {len(run.failures)} of {len(run.records)} comparisons{instead}", "red"),
        "refuses": (f"refuses {len(run.refusals)} calls; {len(run.records)} comparisons held", "red"),
        "absent": (f"absent: {run.message}", "yellow"),
        "refused": (f"refused: {run.message}", "red"),
        "crashed": (f"crashed: {run.message}", "red"),
        "hung": (f"hung: {run.message}", "red"),
    }
    text, style = words.get(run.status, (run.status, ""))
    return Text(f"{name} {text} ({run.seconds:.0f} s)" if run.records else f"{name} {text}", style=style)
