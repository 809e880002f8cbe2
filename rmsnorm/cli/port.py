"""``rmsnorm port info``, ``nematus``, ``translate`` and ``score``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm import errors
from rmsnorm.cli.usage import DIFFERS, choices, progress, unusable

app = typer.Typer(
    name="port", help="Models of Nematus (TensorFlow and Theano): look into, convert, translate, score.",
    no_args_is_help=True,
)  # fmt: skip

_TARGETS: Final = ("torch", "keras", "flax", "numpy", "tf", "theano")
_WINGS: Final = ("torch", "numpy", "keras", "flax")
_STATUS: Final = "Exit status: 0 written, 2 bad usage, or files that are damaged or do not fit each other."
NEMATUS_EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm port nematus model/ model.torch --to torch\n\n"
    "    rmsnorm port nematus model/model.npz-90000 model.rms --to numpy --norm rms\n\n"
    "Exit status: 0 written and the same numbers, 1 other numbers and nothing written, 2 bad usage, or files that are "
    "damaged or do not fit each other."
)
TRANSLATE_EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm port translate model/ --source test.bpe.de --beam 12 --output test.bpe.en\n\n"
    "    rmsnorm port translate model/ --source test.bpe.de --n-best --alpha 1\n\n" + _STATUS
)
SCORE_EPILOG: Final = (
    "Examples:\n\n    rmsnorm port score model/ --source test.bpe.de --target test.bpe.en\n\n" + _STATUS
)

Where = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A folder, the prefix of a checkpoint, an .npz, .safetensors, .keras or .orbax."
    ),
]
Options = Annotated[
    Path | None, typer.Option(help="The model's options as JSON.", dir_okay=False, show_default="beside the model")
]
SourceNorm = Annotated[
    str | None,
    typer.Option(help="rms for a Theano model of RMSNorm that still adds its offsets.", show_default="by its names"),
]
Dictionary = Annotated[
    list[Path] | None,
    typer.Option(
        help="Nematus's JSON: for each factor of the source, then for the target. Repeatable.",
        show_default="as the options say, there or beside the model",
    ),
]
Source = Annotated[Path, typer.Option(help="Sentences, one a line, as the model takes them (BPE).")]
Output = Annotated[Path | None, typer.Option(help="Where to write.", dir_okay=False, show_default="the terminal")]
Backend = Annotated[str | None, typer.Option(help="torch, numpy, keras or flax.", show_default="torch if it can")]
Alpha = Annotated[float, typer.Option(help="Scores are divided by length^ALPHA.")]
Batch = Annotated[int, typer.Option(help="Sentences at once.", min=1)]


@app.command(epilog=_STATUS.replace("written", "shown"))
def info(model: Where, config: Options = None, source_norm: SourceNorm = None) -> None:
    """Say what a model is: whose it is, its norm and sizes, its vocabulary, and what of its file is no part of it."""
    with _refusals():
        found = _load(model, config, source_norm)
        from rmsnorm.nematus.report import facts

        table = Table.grid(padding=(0, 2))
        for name, value in facts(found):
            table.add_row(Text(name, style="bold"), Text(value))
        Console().print(table)


@app.command(epilog=NEMATUS_EPILOG)
def nematus(
    model: Where,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where: a new folder, or an empty one.")],
    to: Annotated[str, typer.Option(help=f"Form: {', '.join(_TARGETS)}.")],
    norm: Annotated[
        str | None, typer.Option(help="rms to make RMSNorm of LayerNorm, exactly.", show_default="as it is")
    ] = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Convert a model, and hold the result to the golden: the logits of random sentences, before and after.

    torch and numpy are one form: model.safetensors, a state dict of the model in PyTorch. keras is model.keras, for
    keras.saving.load_model. flax is model.orbax, a checkpoint of Orbax. tf is a checkpoint for TensorFlow Nematus, and
    theano an archive for Theano Nematus. These commands and rmsnorm.nematus.load read them all. Options and
    dictionaries come along. The folder is made last of all.
    """
    command = "rmsnorm port nematus"
    choices("to", [to], _TARGETS, command)
    choices("norm", [norm] if norm else None, ("rms",), command)
    with _refusals():
        source = _load(model, config, source_norm)
        from rmsnorm.nematus.convert import SENTENCES, convert

        with _silence() as terminal, Console(file=terminal).status("converting and comparing"):
            done = convert(source, folder, to, rms_norm=norm is not None)
    console = Console(highlight=False)
    moved = f"of logits up to {done.largest:.3g}, {SENTENCES} random sentences"
    if norm is not None:
        console.print(f"LayerNorm to RMSNorm: max error {done.exact:.2g} {moved}; gains and offsets are kept")
        dtype = next(iter(done.model.parameters.values())).dtype.name
        console.print(f"weights rounded to {dtype}: max error {done.error:.2g}")
    else:
        console.print(f"max error {done.error:.2g} {moved}")
    for warning in done.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if not done.held:
        console.print(Text("other numbers: nothing is written", style="red"))
        raise typer.Exit(DIFFERS)
    console.print(f"{len(done.model.parameters)} parameters in {done.model.path}")


@app.command(epilog=TRANSLATE_EPILOG)
def translate(
    model: Where,
    source: Source,
    beam: Annotated[int, typer.Option(help="Hypotheses kept; 1 is greedy.", min=1)] = 5,
    output: Output = None,
    n_best: Annotated[bool, typer.Option("--n-best", help="All hypotheses of the beam, with their scores.")] = False,
    alpha: Alpha = 0.0,
    max_length: Annotated[
        int | None, typer.Option(help="Words at most, with the end.", min=1, show_default="the model's")
    ] = None,
    batch: Batch = 80,
    backend: Backend = None,
    dictionary: Dictionary = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Translate a file, as Nematus does: the same search, the same words, a space before the end of each line."""

    def lines(opened: Any, told: Any, words: Any, on_progress: Callable[[int, int], None]) -> list[str]:
        from rmsnorm.nematus.translate import translate

        return translate(
            opened, told, _lines(source), *words, beam_size=beam, max_length=max_length, alpha=alpha, n_best=n_best,
            batch_size=batch, on_progress=on_progress,
        )  # fmt: skip

    with _refusals():
        _run("rmsnorm port translate", _load(model, config, source_norm), backend, dictionary, output, lines)


@app.command(epilog=SCORE_EPILOG)
def score(
    model: Where,
    source: Source,
    target: Annotated[Path, typer.Option(help="Their translations, one a line.")],
    output: Output = None,
    alpha: Alpha = 0.0,
    batch: Batch = 80,
    backend: Backend = None,
    dictionary: Dictionary = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Write -log p of each translation given its source, one a line, as Nematus does."""

    def lines(opened: Any, told: Any, words: Any, on_progress: Callable[[int, int], None]) -> list[str]:
        from rmsnorm.nematus.translate import score

        return score(
            opened, _lines(source), _lines(target), *words, alpha=alpha, batch_size=batch, on_progress=on_progress
        )

    with _refusals():
        _run("rmsnorm port score", _load(model, config, source_norm), backend, dictionary, output, lines, scoring=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """What is wrong with files and arguments, as one sentence and exit status 2."""
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        raise unusable(str(error)) from None


def _load(model: Path, config: Path | None, norm: str | None) -> Any:
    from rmsnorm import nematus

    choices("source_norm", [norm] if norm else None, ("none", "layer", "rms"), "rmsnorm port")
    with _silence():
        return nematus.load(model, config=config, norm=norm)  # type: ignore[arg-type]


@contextmanager
def _silence() -> Iterator[TextIO]:
    """TensorFlow writes to the terminal as it starts, past Python's streams. Gives a stream that still reaches it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with open(os.dup(2), "w") as kept, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield kept
        finally:
            os.dup2(kept.fileno(), 2)


def _run(
    command: str,
    model: Any,
    backend: str | None,
    dictionary: list[Path] | None,
    output: Path | None,
    lines: Callable[..., list[str]],
    *,
    scoring: bool = False,
) -> None:
    """Lines out of an opened model, written when all are there."""
    from rmsnorm.nematus.backends import Opened, has
    from rmsnorm.nematus.checkpoints.files import replacing
    from rmsnorm.nematus.vocabulary import vocabularies

    choices("backend", [backend] if backend else None, _WINGS, command)
    if output is not None and not output.parent.is_dir():
        raise FileNotFoundError(f"{command}: {output.parent} is not a folder, expected one to write {output.name} in")
    files = (dictionary[:-1], dictionary[-1]) if dictionary else ()
    words = vocabularies(model, *files, scoring=scoring)
    with _silence():
        wing = backend or next(each for each in _WINGS if has(each, model.config))
    with progress("sentences") as shown:
        bar = shown.add_task(wing, total=None)
        with _silence():
            opened = Opened(wing, model.config, model.parameters)
        found = lines(opened, model.config, words, lambda done, total: shown.update(bar, completed=done, total=total))
    text = "".join(f"{line}\n" for line in found)
    if output is None:
        typer.echo(text, nl=False)
    else:
        with replacing(output) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")


def _lines(path: Path) -> list[str]:
    """Separated by line feeds alone: other marks that Unicode counts as such may stand in a sentence."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise errors.out_of_domain(
            "rmsnorm port", f"byte {error.start} of {path}", error.object[error.start], "UTF-8", "convert the file"
        ) from None
    return text.removesuffix("\n").split("\n") if text else []
