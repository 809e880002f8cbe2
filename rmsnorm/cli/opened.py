"""Models that ``rmsnorm port`` opens, and the options that say from where."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from rmsnorm.cli.usage import BACKEND_NAMES, choices
from rmsnorm.nematus.config import Norm
from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import FRAMEWORKS, framework

_read_from = partial(typer.Option, rich_help_panel="What the model is read from")
computed_by = partial(typer.Option, rich_help_panel="How it is computed")
_what = "A folder, the prefix of a checkpoint, an .npz, .safetensors or .keras."
Where = Annotated[Path, typer.Argument(metavar="MODEL", help=_what)]
_what = "The model's options as JSON."
Options = Annotated[Path | None, _read_from(help=_what, dir_okay=False, show_default="the file beside the model")]
_what = f"Its norm: {', '.join(get_args(Norm))}; a Theano model with offsets needs it."
SourceNorm = Annotated[str | None, _read_from(help=_what, show_default="by its names")]
_what = "Nematus's JSON: for each factor of the source, then for the target. Repeatable."
Dictionary = Annotated[list[Path] | None, _read_from(help=_what, show_default="those that the options name")]
_what = "torch if it is installed, else numpy"
Backend = Annotated[str | None, computed_by(help=f"Backend: {BACKEND_NAMES}.", show_default=_what)]


def load(model: Path, config: Path | None, norm: str | None, others: Sequence[str] = ()) -> Any:
    """A model from files. Others are more models, of which an ensemble would be made."""
    from rmsnorm import nematus

    if others:
        fix = "name one of them, or let Nematus average them: rmsnorm port nematus MODEL DIR --to tf writes its form"
        want = "one model, as ensembles are not ported"
        raise errors.out_of_domain("rmsnorm port", "MODEL", [str(model), *others], want, fix)

    choices("source_norm", [norm] if norm else None, get_args(Norm), "rmsnorm port")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow still writes some lines, before it reads this
    return nematus.load(model, config=config, norm=norm)  # type: ignore[arg-type]


def opened(
    command: str, model: Any, backend: str | None, dictionary: list[Path] | None, *, scoring: bool
) -> tuple[Any, Any]:
    """A model in a framework, and its vocabularies."""
    from rmsnorm.nematus.backends import ArrayModel
    from rmsnorm.nematus.vocabulary import vocabularies

    key = backend_key(command, backend)
    files = (dictionary[:-1], dictionary[-1]) if dictionary else ()
    words = vocabularies(model, *files, scoring=scoring)
    config = model.config
    if scoring and config.rules.is_zero:
        config = config.replace(label_smoothing=0.0)
    return ArrayModel(key, config, model.parameters), words


def backend_key(command: str, name: str | None) -> str:
    """The key of the backend of this name, or of the usual one."""
    return framework(command, name or ("numpy" if FRAMEWORKS["torch"].missing else "torch"), "backend").key
