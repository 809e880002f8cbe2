"""HTML pages that are one file: tables and pictures, for light and dark screens of any width. No array library."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1b1b; --faint: #666; --paper: #fff; --line: #ddd; --good: #17692f;
  --bad: #b3261e; --bar: #0b62a4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --faint: #a0a0a0; --paper: #16181c; --line: #3a3d42;
  --good: #7bd88f; --bad: #ff8a80; --bar: #6bb3ee; } }
.rmsnorm { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
.rmsnorm .scroll { overflow-x: auto; }
.rmsnorm table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.rmsnorm th, .rmsnorm td { text-align: left; vertical-align: top; padding: .25em .9em .25em 0;
  border-bottom: 1px solid var(--line); color: var(--ink); background: none; }
.rmsnorm .good { color: var(--good); } .rmsnorm .bad { color: var(--bad); } .rmsnorm .faint { color: var(--faint); }
.rmsnorm svg { max-width: 100%; height: auto; } .rmsnorm svg text { fill: var(--ink); font-size: 11px; }
.rmsnorm figure { margin: 1em 0; } .rmsnorm .bars { width: 100%; max-width: 45rem; font-size: 13px; }
.rmsnorm .bars th, .rmsnorm .bars td { border: 0; padding: 0 .6em 0 0; font-weight: normal; white-space: nowrap; }
.rmsnorm .bars th { text-align: right; white-space: normal; }
.rmsnorm .bars td:nth-child(2) { width: 100%; min-width: 4em; }
.rmsnorm .bars span { display: block; height: 1.1em; background: var(--bar); }
.rmsnorm pre { overflow-x: auto; white-space: pre-wrap; }
body { margin: 0; background: var(--paper); color: var(--ink); font-family: system-ui, sans-serif; }
main { max-width: 75rem; margin: 0 auto; padding: 1rem; }
"""


def document(title: str, *parts: str) -> str:
    """The whole page."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"></head>\n'
        f"<body><main><h1>{escape(title)}</h1>\n{fragment(*parts)}</main></body></html>\n"
    )


def fragment(*parts: str) -> str:
    """The parts with their style, as a notebook shows them."""
    return f'<style>{_STYLE}</style><div class="rmsnorm">\n' + "\n".join(parts) + "\n</div>\n"


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, style: str = "") -> str:
    return f'<p class="{style}">{escape(text)}</p>'


def preformatted(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], bad: str = "x") -> str:
    """A table; cells in which ``bad`` is a word are marked."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td class="{"bad" if bad in cell.split() else ""}">{escape(cell)}</td>' for cell in row)
        + "</tr>\n"
        for row in rows
    )  # fmt: skip
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def bars(title: str, labels: Sequence[str], numbers: Sequence[float], texts: Sequence[str]) -> str:
    """A bar chart, one row for each label; the length of a bar is the number, of which the largest fills the width.

    It is a table, so that the browser, which knows the font, gives labels and texts the room that they need.
    """
    most = max([*numbers, 0]) or 1
    rows = [
        f'<tr><th scope="row">{escape(label)}</th>'
        f'<td><span style="width: {max(0.2, 100 * number / most):.1f}%"></span></td><td>{escape(text)}</td></tr>\n'
        for label, number, text in zip(labels, numbers, texts, strict=True)
    ]
    return _figure(title, f'<table class="bars"><tbody>\n{"".join(rows)}</tbody></table>')


def heat_map(title: str, block: Sequence[Sequence[float | None]], corner: tuple[int, int]) -> str:
    """Squares, darker for larger numbers, on a logarithmic scale; None is infinite, ``corner`` where the first is."""
    side, digit, lines, width = 9, 7, len(block), max([len(row) for row in block], default=0)
    left, right = (digit * len(str(first + count)) + 8 for first, count in zip(corner, (lines, width), strict=True))
    known = [math.log2(1 + n) for row in block for n in row if n is not None]
    most = max([*known, 1.0])
    rows = []
    for i, row in enumerate(block):
        rows.append(f'<text x="{left - 6}" y="{side * i + 26}" text-anchor="end">{corner[0] + i}</text>' * (i % 2 == 0))
        for j, number in enumerate(row):
            share = 1.0 if number is None else math.log2(1 + number) / most
            text = "not finite" if number is None else f"{number:.0f} ulp"
            rows.append(
                f'<rect x="{left + side * j}" y="{side * i + 18}" width="{side - 1}" height="{side - 1}" '
                f'fill="{_colour(share)}"><title>[{corner[0] + i}, {corner[1] + j}]: {text}</title></rect>'
            )
    rows += [f'<text x="{left + side * j}" y="12">{corner[1] + j}</text>' for j in range(0, width, 8)]
    wide, high = left + side * width + right, side * lines + 22
    picture = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {wide} {high}" width="{wide}">'
    return _figure(title, f"{picture}{''.join(rows)}</svg>")


def _colour(share: float) -> str:
    """From light grey, the same number, to dark red."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip((225, 225, 225), (150, 10, 10), strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _figure(title: str, picture: str) -> str:
    return f'<figure class="scroll">{picture}<figcaption class="faint">{escape(title)}</figcaption></figure>'
