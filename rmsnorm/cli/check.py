"""``rmsnorm check``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from rmsnorm.cli.asking import asking, lost
from rmsnorm.cli.callables import TARGET_HELP, Call, Compiled, Device, Framework, Gradients, GroupSize, Init, opening
from rmsnorm.cli.usage import Json, Verbose, end_of_check, unusable
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import get_variant

_COMMAND: Final = "rmsnorm check"
_limit = partial(typer.Option, rich_help_panel="Limits of what it takes: cases get other shapes to fit")
_more = partial(typer.Option, rich_help_panel="What must hold, too")
_less = partial(typer.Option, rich_help_panel="What need not hold")
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm check my_norm:norm --variant llama\n\n"
    "    rmsnorm check my_norm.py:norm --variant llama --eps 1e-5 --dtype bfloat16\n\n"
    "    rmsnorm check my_norm.py:Norm --init dim=64\n\n"
    "    rmsnorm check model.onnx --json parity.json\n\n"
    "    rmsnorm check my_norm.py:norm --quantity y,dx\n\n"
    "    rmsnorm check my_kernels.py:fused --quantisation vllm.static\n\n"
    "Exit status: 0 everything agrees, 1 the target differs, crashed or hung, 2 wrong usage, or no "
    "comparison was made."
)


def check(
    target: Annotated[str | None, typer.Argument(help=f"{TARGET_HELP}.", show_default=False)] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="What it should be, such as llama.", show_default="standard")
    ] = None,
    eps: Annotated[
        float | None, typer.Option(help="The eps that it should have.", show_default="that of the variant")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Dtype of x: {', '.join(dtypes.FLOATS)}. Repeatable.", show_default="float16, bfloat16, float32"
        ),
    ] = None,
    init: Init = None,
    framework: Framework = None,
    call: Call = None,
    group_size: GroupSize = None,
    compiled: Compiled = False,
    gradients: Gradients = True,
    device: Device = "cpu",
    extremes: Annotated[
        bool,
        _more("--extremes", help="It takes x of no rows and of 66,001 columns, and rows whose squares leave float32."),
    ] = False,
    exact: Annotated[bool, _more("--exact", help="Sums are better than terms added one after the other.")] = False,
    batch_invariant: Annotated[
        bool, _more("--batch-invariant", help="A row has the same bits in calls of any number of rows.")
    ] = False,
    all_: Annotated[
        bool, _more("--all", help="Every triple of circumstances, and very many rows; minutes, in JAX an hour.")
    ] = False,
    quantity: Annotated[
        list[str] | None, _less(help="What is judged, such as y,dx. Repeatable.", show_default="everything")
    ] = None,
    quantisation: Annotated[
        str | None,
        typer.Option(help="For a function that quantises y: what it should be.", metavar="NAME", show_default="none"),
    ] = None,
    rank: Annotated[int | None, _limit(help="The only number of axes of x.", min=1, show_default=False)] = None,
    multiple_of: Annotated[
        int | None, _limit(help="A number that divides the width.", min=1, show_default=False)
    ] = None,
    width: Annotated[list[int] | None, _limit(help="A width that it takes. Repeatable.", show_default=False)] = None,
    contiguous: Annotated[bool, _limit("--contiguous", help="Tensors are dense in memory.")] = False,
    same_dtype: Annotated[bool, _limit("--same-dtype", help="The gain has the dtype of x.")] = False,
    max_rows: Annotated[int | None, _limit(help="The most rows that it takes.", min=1, show_default=False)] = None,
    verbose: Verbose = False,
    json: Json = None,
) -> None:
    """Compare your function or layer with a variant: values and gradients, against the golden.

    It is called in 40 to 160 circumstances, in which every pair occurs: rows, widths, dtypes, memory, values,
    gradients, and with and without each of mask, residual, gate and eps that it takes. If it differs, the report says
    what it computes and how to mend it. It runs in a process of its own, which is ended after an hour. JAX compiles
    each shape, so there fewer are asked without --all. `rmsnorm.parity.check` does the same in Python.

    Each element must lie in an interval around the golden's, whose width is the rounding error of the terms that add
    up to it, so cancellation does not count as a defect; rmsnorm/accuracy/bounds.py derives it. `rmsnorm selftest`
    compares the backends of this package.
    """
    if target is None:
        raise unusable(
            f"{_COMMAND}: TARGET is missing, expected your own such as my_norm.py:norm; "
            "to compare the backends of this package, use `rmsnorm selftest`"
        )
    names = variant or ["standard"]
    if len(names) > 1:
        raise unusable(f"{_COMMAND}: --variant is given {len(names)} times, expected one for a TARGET; drop some")
    from rmsnorm.parity import Report, check_quantised
    from rmsnorm.parity import check as check_norm
    from rmsnorm.parity.comparison import Run
    from rmsnorm.parity.report import write_json

    wanted = get_variant("check", names[0])
    wanted = wanted if eps is None else wanted.replace(eps=eps)
    limits = {
        "rank": rank, "multiple_of": multiple_of, "widths": width, "contiguous": contiguous, "same_dtype": same_dtype,
        "max_rows": max_rows,
    }  # fmt: skip
    of_norm: dict[str, Any] = {
        "group_size": group_size, "compiled": compiled, "extremes": extremes, "exact": exact,
        "batch_invariant": batch_invariant, "strength": 3 if all_ else None, "call": call,
        "quantities": ",".join(quantity or ()) or None, "limits": {k: v for k, v in limits.items() if v} or None,
    }  # fmt: skip
    options = {"dtypes": dtype or None, **opening(_COMMAND, init, framework, device)}
    if quantisation is not None:
        other = {"variant": variant, "eps": eps, "no_gradients": not gradients, **of_norm}
        for name in (name for name, value in other.items() if value not in (None, False)):
            option = {"strength": "all", "quantities": "quantity"}.get(name, name).replace("_", "-")
            raise unusable(f"{_COMMAND}: --{option} is for a norm, expected none beside --quantisation; drop it")
    if end := lost():
        report = Report(target, wanted, Run(target, end.status, end.message))
    else:
        with asking(target):
            if quantisation is None:
                report = check_norm(target, wanted, gradients=gradients, **of_norm, **options)
            else:
                report = check_quantised(target, quantisation, **options)
    console = Console(soft_wrap=True)
    console.print(Text(report.text, style="" if report.passed else "red"))
    if verbose:
        console.print(Text(report.details))
    if json:
        write_json([report.run], json)
    end_of_check([report.run])
