"""What the owner of a function says of it beforehand: what is judged, what may differ, and what is known to differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from rmsnorm.accuracy.bounds import QUANTITIES
from rmsnorm.parity.comparison import Comparison, Run, labelled
from rmsnorm.parity.judge import failed
from rmsnorm.specification import dtypes, errors

JUDGED: Final = (*(name for name in QUANTITIES if name not in ("inverse_rms", "jvp")), "second_derivative")
# reasons that identify can confirm, and the end of its sentence; another reason is taken as it is
CONFIRMED: Final = {"16-bit sums": "is accumulated in 16 bits"}
STALE: Final = "; take the line out"  # the end of the sentence on a difference that is none any more
_LINE: Final = re.compile(r"'(?P<case>.*)' (?P<dtype>\S+) (?P<quantity>[^\s:]+)(:\s*(?P<why>.*))?")


@dataclass(frozen=True)
class Line:
    """A line of a file of known differences: patterns of a case, a dtype of x and a quantity, and why they differ."""

    place: str
    text: str
    case: str
    dtype: str
    quantity: str
    why: str

    def fits(self, record: Comparison) -> bool:
        names = ((record.case, self.case), (record.quantity, self.quantity))
        types = (record.dtype, dtypes.short(record.dtype))
        return all(fnmatchcase(*pair) for pair in names) and any(fnmatchcase(name, self.dtype) for name in types)


@dataclass(frozen=True)
class Declared:
    """What is judged (nothing named is everything), what may differ by the reason, and the known differences."""

    quantities: tuple[str, ...] = ()
    accept: Mapping[str, str] | None = None
    xfails: tuple[Line, ...] = ()

    @property
    def has_gradients(self) -> bool:
        return not self.quantities or any(name != "y" for name in self.quantities)

    def apply(self, run: Run, variant: str, defects: Callable[[], Sequence[str]]) -> None:
        """Put it into a run whose comparisons are all made. ``defects`` asks identify."""
        if self.quantities:
            run.records = [record for record in run.records if record.quantity in self.quantities]
            names = {record.quantity for record in run.records}
            for name in self.quantities:
                if name not in names:
                    run.records += labelled([failed(name, "it was compared in no case")], variant, "float32", "none")
        for name, why in (self.accept or {}).items():
            self._accept(run, name, why, defects)
        for line in self.xfails:
            of_line = [record for record in run.records if line.fits(record)]
            differ = [record for record in of_line if not record.passed]
            run.records = [
                replace(record, accepted=line.why or line.place) if record in differ else record
                for record in run.records
            ]
            if not differ:
                said = "it agrees, and was expected to differ" if of_line else "there is no such comparison"
                detail = f"{line.place} has {line.text}: {said}{STALE}"
                where = of_line[0] if of_line else failed(line.quantity, "")
                run.records += labelled([failed(line.quantity, detail)], variant, where.dtype or "float32", line.case)

    def _accept(self, run: Run, name: str, why: str, defects: Callable[[], Sequence[str]]) -> None:
        differ = [record for record in run.records if record.quantity == name and not record.passed]
        if not differ:
            run.notes.append(f"accepted: {name}: {why}: it agrees everywhere; drop this")
        elif why in CONFIRMED and not any(sentence.endswith(CONFIRMED[why]) for sentence in defects()):
            return
        elif why in CONFIRMED:
            differ = [record for record in differ if record.dtype in dtypes.HALF]
        run.records = [replace(record, accepted=why) if record in differ else record for record in run.records]


def declared(
    op: str, quantities: Sequence[str] | str | None, accept: Sequence[str] | Mapping[str, str] | str | None,
    xfails: str | Path | None,
) -> Declared:  # fmt: skip
    """Read what was passed to ``check``.

    Raises:
        ValueError: there is no such quantity or file, or a text does not have the form.

    >>> declared("check", "dx", "dscale: 16-bit sums", None).accept
    {'dscale': '16-bit sums'}
    """
    names = quantities.split(",") if isinstance(quantities, str) else list(quantities or ())
    texts = [accept] if isinstance(accept, str) else list(accept or ()) if not isinstance(accept, Mapping) else []
    pairs = dict(accept) if isinstance(accept, Mapping) else {}
    for text in texts:
        name, colon, why = (part.strip() for part in text.partition(":"))
        if not (colon and why):
            want = "a quantity and why it may differ"
            raise errors.out_of_domain(op, "accept", text, want, "write it as 'dscale: 16-bit sums'")
        pairs[name] = why
    for option, chosen in (("quantities", [name.strip() for name in names]), ("accept", list(pairs))):
        for name in chosen:
            if name not in JUDGED:
                raise errors.not_a_choice(op, option, name, JUDGED)
    return Declared(tuple(name.strip() for name in names), pairs, _lines(op, xfails))


def dtypes_named(named: Sequence[str] | str | None) -> tuple[str, ...]:
    """The dtypes of x that were asked for, None for those of models.

    >>> dtypes_named("bf16"), dtypes_named(None)
    (('bfloat16',), ('float16', 'bfloat16', 'float32'))
    """
    every = (*dtypes.HALF, "float32") if named is None else named if isinstance(named, (list, tuple)) else (named,)
    return tuple(errors.dtype_named("check", "dtype", entry) for entry in every or (None,))


def _lines(op: str, path: str | Path | None) -> tuple[Line, ...]:
    """The lines of a file as a report has them: 'many rows' bf16 dscale: 16-bit sums. # begins a comment."""
    if path is None:
        return ()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        want = "a file of known differences"
        raise errors.out_of_domain(op, "xfails", str(path), want, f"check the name ({type(error).__name__})") from None
    lines = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            want = "'CASE' DTYPE QUANTITY: why"
            place = f"line {number} of {path}"
            raise errors.out_of_domain(op, place, line, want, "copy the line of a report, as -v prints it")
        own = match.groupdict()
        label = f"{own['case']!r} {own['dtype']} {own['quantity']}"
        place, why = f"line {number} of {path}", own["why"] or ""
        lines.append(Line(place, label, own["case"], own["dtype"], own["quantity"], why))
    return tuple(lines)
