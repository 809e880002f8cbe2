"""``rmsnorm variants`` and ``rmsnorm invariances``: the tables of variants and of invariances."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.table import Table

from rmsnorm import PRESETS, Variant, screen
from rmsnorm.cli.usage import DIFFERS


def variants(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of the README.")] = False,
) -> None:
    """List the variants of RMSNorm: what each name means."""
    rows = [_describe(preset) for preset in PRESETS.values()]
    if markdown:
        typer.echo("\n".join(f"| {' | '.join(row)} |" for row in (_COLUMNS, ("---",) * len(_COLUMNS), *rows)))
        return
    plain = [[cell.replace("`", "") for cell in row] for row in rows]
    dispensable = ("source", "gain's name", "partial", "bias", "offset", "dtype of y", "rounded")
    screen.console().print(screen.fitting_table(_COLUMNS, plain, dispensable))


_COLUMNS: Final = (
    "variant",
    "eps, place",
    "rounded",
    "offset",
    "bias",
    "partial",
    "dtype of y",
    "gain's name",
    "source",
)


def _describe(variant: Variant) -> tuple[str, ...]:
    rounded = {"after_scale": "once, at the end", "before_scale": "before the gain", "input_dtype": "all in T"}
    result = {"x": "T", "scale": "G", "promote": "promote(T, G)", "half_scale": "G if 16-bit, else float32",
              "promote_first": "promote(T, G), x / rho too"}  # fmt: skip
    return (
        f"`{variant.name}`",
        f"{'machine eps' if variant.eps is None else f'{variant.eps:g}'.replace('e-0', 'e-')}, {variant.eps_position}",
        rounded[variant.rounding],
        f"{variant.scale_offset:g}",
        "yes" if variant.bias else "no",
        variant.partial_rounding,
        result[variant.result_dtype],
        f"`{variant.scale_name}`",
        variant.source,
    )


def invariances() -> None:
    """Run the paper's table of invariances: five norms, six transformations, and what the gradients keep.

    A cell says "holds" if the output does not change by more than the rounding of float64. Otherwise it has the size of
    the change relative to the output, as this command measured it: a counter-example.
    """
    from rmsnorm.numpy_impl.paper.invariances import gradient_facts, table

    cells = table()
    sheet = Table(title="Unchanged under", title_justify="left")
    properties = list(dict.fromkeys(cell.property for cell in cells))
    sheet.add_column("norm", no_wrap=True)
    for name in properties:
        sheet.add_column(name, justify="center")
    for norm in dict.fromkeys(cell.norm for cell in cells):
        row = {cell.property: cell for cell in cells if cell.norm == norm}
        sheet.add_row(norm, *(_outcome(row[name].holds, row[name].change, row[name].expected) for name in properties))
    facts = Table(title="Gradients under", title_justify="left")
    for name in ("norm", "gradient", "transformation", "times", "off by", "bound"):
        facts.add_column(name)
    all_facts = gradient_facts()
    for fact in all_facts:
        times = (
            f"{fact.factor:.6g}" if fact.holds else f"[red]{fact.factor:.6g}, the paper says {fact.expected:.6g}[/red]"
        )
        facts.add_row(fact.norm, fact.gradient, fact.property, times, f"{fact.change:.1e}", f"{fact.bound:.1e}")
    screen.console().print(sheet, facts)
    if any(cell.holds != cell.expected for cell in cells) or not all(fact.holds for fact in all_facts):
        raise typer.Exit(DIFFERS)


def _outcome(holds: bool, change: float, expected: bool) -> str:
    text = "holds" if holds else f"- ({change:.2g})"
    return text if holds == expected else f"[red]{text}, the paper says otherwise[/red]"
