"""``rmsnorm variants``: the table of variants."""

from __future__ import annotations

from collections.abc import Iterator
from json import dumps, loads
from textwrap import fill
from typing import Annotated, Final

import typer

from rmsnorm import PRESETS, Variant
from rmsnorm.cli.usage import choices, unusable
from rmsnorm.specification.families import families, family_named


def variants(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A variant, or a family of models such as qwen3.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/variants.md.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print every field as JSON.")] = False,
) -> None:
    """List the variants of RMSNorm: what each name means. With NAME, one of them in full."""
    family = None if name is None or name.lower() in PRESETS else family_named(name)
    wanted = [name] if family is None else [norm.variant for norm in families()[family]]
    known = [entry for entry in wanted if entry is not None]
    chosen = choices("variant", known or None, tuple(PRESETS), "rmsnorm variants")
    presets = [PRESETS[entry] for entry in chosen]
    if json and markdown:
        raise unusable("rmsnorm variants: --json and --markdown are given, expected one of them; drop the other")
    if json:
        rows = [loads(preset.json) | {"families": _families(preset)} for preset in presets]
        typer.echo(dumps(rows[0] if name and len(rows) == 1 else rows, indent=1))
    elif markdown:
        cells = [_describe(preset) for preset in presets]
        typer.echo("\n".join(f"| {' | '.join(row)} |" for row in (_COLUMNS, ("---",) * len(_COLUMNS), *cells)))
    elif name is None:
        typer.echo("\n".join([wrapped(_LEGEND), "", *(line for preset in presets for line in _brief(preset))]))
    else:
        lines = [] if family is None else [*_of_a_family(family), ""]
        typer.echo("\n".join(lines + [line for preset in presets for line in _in_full(preset)]))


_SHOWN: Final = 24  # families of a variant; --json has all
_WIDTH: Final = 80  # columns, in a pipe, too: no line is longer, and nothing is left out


_LEGEND: Final = (
    "y = h / rho * (offset + gain) + bias, where h is x + residual, or x; rho is the root of the mean square of h and "
    "eps; T is the dtype of x and G that of the gain. Unless a line says more, the offset is 0, there is no bias, and "
    "partial counts ceil(n p) elements. `rmsnorm variants NAME` says all of one."
)


def wrapped(text: str, label: str = "", indent: int = 0) -> str:
    """Lines of the text, with a label before the first one."""
    return fill(text, _WIDTH, initial_indent=label.ljust(indent), subsequent_indent=" " * indent,
                break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _brief(variant: Variant) -> list[str]:
    row = dict(zip(_COLUMNS, (cell.replace("`", "") for cell in _describe(variant)), strict=True))
    eps = row["eps, place"].replace(",", "")
    parts = [eps if variant.eps is None else f"eps {eps}", f"rounded {row['rounded']}", f"y in {row['dtype of y']}",
             f"gain {row[_GAIN]}"]  # fmt: skip
    usual = {"offset": "0", "bias": "no", "partial": "ceil"}
    parts += [f"{key} {row[key]}" for key, value in usual.items() if row[key] != value]
    whole = "; ".join(part.replace(" ", "\0") for part in parts)  # a line is broken between them
    indent = max(map(len, PRESETS)) + 2
    return [wrapped(whole, row["variant"], indent).replace("\0", " "), wrapped(row["source"], "", indent)]


def _in_full(variant: Variant) -> list[str]:
    eps = "eps" if variant.eps != 0 else "0"
    rho = {"inside": f"sqrt(q + {eps})", "outside": f"sqrt(q) + {eps}", "clamp": f"max(sqrt(q), {eps} / sqrt(n))"}
    gain = f"({variant.scale_offset:g} + g)" if variant.scale_offset else "g"
    row = _describe(variant)
    whole = "the machine epsilon of the arithmetic: 2^-23, in float64 2^-52" if variant.eps is None else row[1]
    facts = {
        "equation": f"q = mean(h_i^2), rho = {rho[variant.eps_position]}, y = h / rho * {gain}"
        + (" + b" if variant.bias else "")
        + "; h is x + residual, or x",
        "eps": whole.partition(",")[0] if variant.eps is not None else whole,
        "place of eps": {"inside": "inside of the root", "outside": "outside of the root, added to it",
                         "clamp": "the least that the root may be, as eps / sqrt(k)"}[variant.eps_position],
        "rounded": {"after_scale": "once, at the end", "before_scale": "h / rho before the gain, and y",
                    "input_dtype": "the original rounds each operation to the dtype of x; this package once"}[
                        variant.rounding],
        "dtype of y": {"x": "that of x", "scale": "that of the gain", "promote": "of x and the gain, promoted",
                       "promote_first": "of x and the gain, promoted, to which h / rho is rounded, too",
                       "half_scale": "that of the gain if it has 16 bits, else at least float32"}[variant.result_dtype],
        "gain": f"the factor is {gain}; checkpoints call the parameter g {variant.scale_name}"
        + ("; it is cast to the dtype of x first" if variant.scale_dtype == "x" else ""),
        "bias": "yes" if variant.bias else "no",
        "partial": f"with partial=p the first {variant.partial_rounding}(n p) elements count; by default all",
        "gate": f"where a call has one: f is {variant.gate_function}, {variant.gate_position} the norm",
        "residual": {"before": "x + residual is rounded to T before it is normalised",
                     "after": "x + residual is normalised, and rounded to T where it is returned"}[
                         variant.residual_rounding],
        "source": row[-1].replace("`", ""),
        "families": _some(_families(variant)) or "none of those that were asked",
    }  # fmt: skip
    return [variant.name, *(wrapped(text, f"  {label}", 16) for label, text in facts.items())]


def _families(variant: Variant) -> list[str]:
    """The families whose norm computes that, under this name or another one of the same numbers."""
    from rmsnorm.identify.names import aliases

    same = {variant.name, *aliases(variant.name)}
    return sorted(name for name, norms in families().items() if same & {norm.variant for norm in norms})


def _some(names: list[str]) -> str:
    return ", ".join([*names[:_SHOWN], *([f"and {len(names) - _SHOWN} others"] if len(names) > _SHOWN else [])])


def _of_a_family(name: str) -> Iterator[str]:
    yield f"{name} is a family of models. Its norms in transformers:"
    for norm in families()[name]:
        origin = f"by default, {norm.field} of config.json" if norm.field else "in the code, whatever config.json says"
        yield wrapped(norm.sentence(origin), "- ", 2)


_GAIN: Final = "gain's name"
_COLUMNS: Final = ("variant", "eps, place", "rounded", "offset", "bias", "partial", "dtype of y", _GAIN, "source")


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
