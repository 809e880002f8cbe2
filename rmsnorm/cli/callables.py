"""What ``check`` and ``identify`` share: a callable of the user, and the options for how it is opened and called."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final

import typer

from rmsnorm.cli.usage import DEVICES, choices
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import NAMES

called = partial(typer.Option, rich_help_panel="How it is called")
TARGET_HELP: Final = "module:attribute or file.py:attribute of a function, a layer or its class; an .onnx file"
Init = Annotated[
    list[str] | None,
    typer.Option(
        help="Argument for its constructor, or option for a function: NAME=VALUE, or several as a JSON object. "
        "Repeatable.",
        show_default="guessed",
    ),
]
Framework = Annotated[
    str | None, typer.Option(help=f"Framework of a function's arrays: {', '.join(NAMES)}.", show_default="guessed")
]
Call = Annotated[
    str | None,
    called(
        help="The arguments of a function in their order, such as 'out, x, weight, eps', where its own names do not "
        "say them, or 'x as out, residual as h_out, weight, eps' where it writes its results to x and the residual.",
        show_default="by their names",
    ),
]
GroupSize = Annotated[
    int | None, called(help="How many elements of the last axis it must normalise together.", min=1, show_default=False)
]
Compiled = Annotated[
    bool, called("--compiled", help="Call what the compiler of its framework makes of it; check calls both.")
]
Gradients = Annotated[bool, called(help="Ask for its gradients, too.")]
Device = Annotated[str, called(help=f"Where it runs: {' or '.join(DEVICES)}.")]

_WORD: Final = re.compile(r"[A-Za-z_][\w.-]*")


def opening(command: str, init: Sequence[str] | None, framework: str | None, device: str) -> dict[str, Any]:
    """How a callable is opened, as these options mean it.

    Raises:
        ValueError: one is wrong.
    """
    choices("device", [device], DEVICES, command)
    return {"framework": framework, "device": device, "init": _arguments(command, init or ())}


def _arguments(command: str, texts: Sequence[str]) -> dict[str, Any]:
    """The arguments that the user wrote.

    >>> _arguments("rmsnorm check", ["dim=64", '{"eps": 1e-5, "bias": false}', "dtype=float32", "affine=True"])
    {'dim': 64, 'eps': 1e-05, 'bias': False, 'dtype': 'float32', 'affine': True}
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            if text.lstrip().startswith("{"):
                arguments |= json.loads(text)
            elif name.isidentifier():
                arguments[name] = _value(value)
            else:
                raise ValueError(name)
        except ValueError:
            want = "NAME=VALUE or a JSON object"
            raise errors.out_of_domain(command, "init", text, want, "write it as dim=64") from None
    return arguments


def _value(text: str) -> Any:
    """A value of JSON or of Python, or a word."""
    for read in (json.loads, literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    if not _WORD.fullmatch(text):
        raise ValueError(text)
    return text
