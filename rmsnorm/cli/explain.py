"""``rmsnorm explain``."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from rmsnorm import PRESETS
from rmsnorm.cli.usage import BACKEND_NAMES, DIFFERS, backends, choices, sizes
from rmsnorm.specification import dtypes, errors

_COMMAND: Final = "rmsnorm explain"
_ARRAYS: Final = ("bias", "mask", "residual", "gate")
EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm explain torch --shape 512x768 --dtype bfloat16 --with mask\n\n"
    "    rmsnorm explain flax --variant gemma --axis 0\n\n"
    "Exit status: 0 a kernel computes the call, 1 the recipe does, 2 bad usage or the framework is not installed."
)


def explain(
    backend: Annotated[str, typer.Argument(help=f"Whose arrays: {BACKEND_NAMES}.")],
    shape: Annotated[str, typer.Option(help="Shape of x.")] = "512x768",
    dtype: Annotated[str, typer.Option(help=f"Dtype of all arrays: {', '.join(dtypes.FLOATS)}.")] = "float32",
    variant: Annotated[str, typer.Option(help="The variant; `rmsnorm variants` lists them.")] = "standard",
    axis: Annotated[int, typer.Option(help="The normalised axis.")] = -1,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", help=f"What the call has beside x and a gain: {', '.join(_ARRAYS)}. Repeatable."),
    ] = None,
) -> None:
    """Say which code computes a call on this machine: a kernel by its name, or the recipe and why.

    The call is made once. For the arrays, layers and models that you have, call `rmsnorm.explain` in Python.
    """
    import numpy as np

    from rmsnorm.explaining import explain as explained
    from rmsnorm.targets.bridges import bridge

    (key,) = backends([backend], _COMMAND)
    (dtype,) = choices("dtype", [dtype], dtypes.FLOATS, _COMMAND)
    (variant,) = choices("variant", [variant], list(PRESETS), _COMMAND)
    present = choices("with", with_, _ARRAYS, _COMMAND) if with_ else ()
    rows = sizes(shape, _COMMAND)
    if not -len(rows) <= axis < len(rows):
        raise errors.out_of_domain(_COMMAND, "axis", axis, f"an axis of x of shape {shape}", "pass -1 for the last one")
    arrays = bridge(key)
    with arrays.scope(wide=dtype == "float64"):
        ones = {name: arrays.send(np.ones(rows, dtype)) for name in ("x", "residual", "gate")}
        gain, mask = arrays.send(np.ones(rows[axis], dtype)), arrays.send(np.ones(rows, bool))
        options = {name: array for name, array in {**ones, "mask": mask}.items() if name in present}
        bias = gain if "bias" in present else None
        text = explained(ones["x"], gain, bias, variant=variant, axis=axis, **options)
    typer.echo(text)
    raise typer.Exit(0 if ": kernel " in text else DIFFERS)
