"""``rmsnorm port info``, ``nematus``, ``zero``, ``translate``, ``score``, ``norms`` and ``verify``."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm.cli.opened import backend_key, load, opened
from rmsnorm.cli.streams import STDIN, lines_of, unknown_counted, write
from rmsnorm.cli.usage import BACKEND_NAMES, DIFFERS, choices, progress
from rmsnorm.files import replacing
from rmsnorm.nematus.config import BEAM, Norm
from rmsnorm.specification import errors

app = typer.Typer(
    name="port", help="Models of Nematus and of zero: describe, convert, translate, score.",
    no_args_is_help=True,
)  # fmt: skip

_TARGETS: Final = ("torch", "keras", "flax", "numpy", "tf", "theano")
_FORMS: Final = {"pytorch": "torch", "tensorflow": "tf", "jax": "flax"}
_STATUS: Final = "Exit status: 0 written, 2 bad usage, or files that are damaged or do not fit each other."
_read_from = partial(typer.Option, rich_help_panel="What the model is read from")
_computed_by = partial(typer.Option, rich_help_panel="How it is computed")
NEMATUS_EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm port nematus model/ model.torch --to torch\n\n"
    "    rmsnorm port nematus model/model.npz-90000 model.rms --to numpy --norm rms\n\n"
    "Exit status: 0 written and the same numbers, 1 other numbers and nothing written, 2 bad usage, or files that are "
    "damaged or do not fit each other."
)
ZERO_EPILOG: Final = NEMATUS_EPILOG.replace("port nematus", "port zero").replace("model.npz-90000", "model-90000")
TRANSLATE_EPILOG: Final = (
    "Examples:\n\n"
    "    rmsnorm port translate model/ --source test.bpe.de --beam 12 --output test.bpe.en\n\n"
    "    rmsnorm port translate model/ --source test.bpe.de --n-best --alpha 1\n\n"
    "    cat test.bpe.de | rmsnorm port translate model/ --source - --batch 1 | less\n\n" + _STATUS
)
SCORE_EPILOG: Final = (
    "Examples:\n\n    rmsnorm port score model/ --source test.bpe.de --target test.bpe.en\n\n" + _STATUS
)
NORMS_EPILOG: Final = (
    "Examples:\n\n    rmsnorm port norms model.npz --source dev.bpe.de --target dev.bpe.en\n\n"
    "Exit status: 0 said which, 1 the difference may be chance, 2 bad usage, or files that are damaged or do not fit "
    "each other."
)
VERIFY_EPILOG: Final = (
    "Examples:\n\n    rmsnorm port verify ported/ --backend numpy\n\n"
    "Exit status: 0 held, 1 not held, 2 bad usage, or files that are damaged or missing."
)
_MORE: Final = {"allow_extra_args": True}  # the other models of an ensemble, which the command refuses by name
_NORMS: Final = {"none": "no norm", "layer": "LayerNorm", "rms": "RMSNorm", "prms": "pRMSNorm"}

Where = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A folder, the prefix of a checkpoint, an .npz, .safetensors, .keras or .orbax."
    ),
]
Options = Annotated[
    Path | None,
    _read_from(help="The model's options as JSON.", dir_okay=False, show_default="the file beside the model"),
]
SourceNorm = Annotated[
    str | None,
    _read_from(
        help=f"Its norm: {', '.join(get_args(Norm))}; a Theano model with offsets needs it.",
        show_default="by its names",
    ),
]
Dictionary = Annotated[
    list[Path] | None,
    _read_from(
        help="Nematus's JSON: for each factor of the source, then for the target. Repeatable.",
        show_default="those that the options name",
    ),
]
Source = Annotated[
    Path, typer.Option(help="Sentences, one a line, as the model takes them (BPE); - is standard input.")
]
Target = Annotated[Path, typer.Option(help="Their translations, one a line; - is standard input.")]
Output = Annotated[Path | None, typer.Option(help="Where to write.", dir_okay=False, show_default="the terminal")]
Backend = Annotated[
    str | None,
    _computed_by(help=f"Backend: {BACKEND_NAMES}.", show_default="torch if it is installed, else numpy"),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha", "--normalization-alpha", "--normalization_alpha", help="Scores are divided by length^ALPHA.",
        show_default="0, in zero its option",
    ),
]  # fmt: skip
Batch = Annotated[
    int | None,
    _computed_by(help="Sentences at once.", min=1, show_default="80, in zero its option"),
]


@app.command(epilog=_STATUS.replace("written", "shown"))
def info(model: Where, config: Options = None, source_norm: SourceNorm = None) -> None:
    """Describe a model: its Nematus version, norm, sizes and vocabulary, and the tensors that are not part of it."""
    loaded = load(model, config, source_norm)
    from rmsnorm.nematus.report import facts

    table = Table.grid(padding=(0, 2))
    for name, value in facts(loaded):
        table.add_row(Text(name, style="bold"), Text(value))
    Console(soft_wrap=True).print(table)


Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder for the result.")]
To = Annotated[str, typer.Option(help=f"Form: {', '.join(_TARGETS)}.")]
ToZero = Annotated[str, typer.Option(help=f"Form: {', '.join(_TARGETS[:-1])}.")]
ToNorm = Annotated[
    str | None, typer.Option(help="rms to convert LayerNorm into RMSNorm, exactly.", show_default="unchanged")
]


@app.command(epilog=NEMATUS_EPILOG)
def nematus(
    model: Where,
    folder: Folder,
    to: To,
    norm: ToNorm = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Convert a model, and compare the logits of random sentences before and after with the golden.

    torch and numpy are one form: model.safetensors, a state dict of the model in PyTorch. keras is model.keras, for
    keras.saving.load_model. flax is model.orbax, a checkpoint of Orbax. tf is a checkpoint for TensorFlow Nematus, and
    theano an archive for Theano Nematus. These commands and rmsnorm.nematus.load read all of them. Options and
    dictionaries are copied. The folder is made in the last step.
    """
    _convert("nematus", _TARGETS, model, folder, to, norm, config, source_norm)


@app.command(epilog=ZERO_EPILOG)
def zero(
    model: Where,
    folder: Folder,
    to: ToZero,
    norm: ToNorm = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Convert a model of zero, the authors' toolkit, as rmsnorm port nematus converts one of Nematus.

    tf is a checkpoint for zero, with its param.json. Where ema_decay is set, the averages become the weights.
    """
    _convert("zero", _TARGETS[:-1], model, folder, to, norm, config, source_norm)


def _convert(
    system: str,
    targets: tuple[str, ...],
    model: Path,
    folder: Path,
    to: str,
    norm: str | None,
    config: Path | None,
    source_norm: str | None,
) -> None:
    command = f"rmsnorm port {system}"
    (to,) = choices("to", [_FORMS.get(to, to)], targets, command)
    choices("norm", [norm] if norm else None, ("rms",), command)
    source = load(model, config, source_norm)
    from rmsnorm.nematus.convert import SENTENCES, convert
    from rmsnorm.nematus.dialects import rules

    own = rules(source.config)
    if own.system != system:
        raise errors.out_of_domain(command, "the model", f"of {own.system}", system, f"use rmsnorm port {own.system}")

    with Console(stderr=True).status("converting and comparing"):
        result = convert(source, folder, to, rms_norm=norm is not None)
    console = Console(highlight=False, soft_wrap=True)
    scale = f"of logits up to {result.largest:.3g}, {SENTENCES} random sentences"
    if norm is not None:
        kept = "gains and offsets are kept" if own.has_rms_offsets else "gains are kept, offsets are in biases"
        console.print(f"LayerNorm to RMSNorm: max error {result.exact:.2g} {scale}; {kept}")
        dtype = next(iter(result.model.parameters.values())).dtype.name
        console.print(f"weights rounded to {dtype}: max error {result.error:.2g}")
    else:
        console.print(f"max error {result.error:.2g} {scale}")
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if not result.is_exact:
        console.print(Text("other numbers: nothing is written", style="red"))
        raise typer.Exit(DIFFERS)
    console.print(f"{len(result.model.parameters)} parameters in {result.model.path}")
    folder_of = result.model.path.parent
    console.print(f"rmsnorm port verify {folder_of} computes its proof again, on any machine")
    if to == "keras":
        console.print("load it in a new process with\n    import keras, rmsnorm.nematus.tf")
        console.print(f"    model = keras.models.load_model({str(result.model.path)!r})")


@app.command(epilog=VERIFY_EPILOG)
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that rmsnorm port nematus or zero wrote.")],
    backend: Backend = None,
) -> None:
    """Compute the proof of a conversion again: a sentence, its translation and two scores, in float64.

    The conversion wrote them into proof.json of the folder, as the golden computed them.
    """
    from rmsnorm.nematus import proof

    model = load(folder, None, None)
    key = backend_key("rmsnorm port verify", backend)
    name = backend or key
    verdict = proof.verify(folder, key, model.config, model.parameters)
    console = Console(highlight=False, soft_wrap=True)
    same = verdict.now.output == verdict.expected.output
    count = len(verdict.now.output)
    words = f"the same {count} word{'s' * (count != 1)}" if same else "other words"
    scores = ", ".join(f"{score:.10g}" for score in verdict.expected.scores)
    numbers = f"{words}; -log p {scores}: max error {verdict.error:.2g}, at most {verdict.bound:.2g} is rounding"
    if verdict.holds:
        console.print(f"held in {name}: {numbers}")
        return
    console.print(Text(f"not held in {name}: {numbers}", style="red"))
    console.print(f"expected {verdict.expected.output}, now {verdict.now.output}; the model is another one than that "
                  "which was converted, or the backend has a mistake")  # fmt: skip
    raise typer.Exit(DIFFERS)


@app.command(epilog=TRANSLATE_EPILOG, context_settings=_MORE)
def translate(
    context: typer.Context,
    model: Where,
    source: Source,
    beam: Annotated[
        int | None,
        typer.Option(help="Hypotheses kept; 1 is greedy.", min=1, max=1000, show_default=f"{BEAM}, in zero its option"),
    ] = None,
    output: Output = None,
    n_best: Annotated[
        bool, typer.Option("--n-best", help="All hypotheses of the beam, with scores (5 digits as Nematus).")
    ] = False,
    alpha: Alpha = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            help="Words at most, with the end; of zero, more than the source has.", min=1, show_default="the model's"
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _computed_by(
            help="Of the noise of zero's enable_noise_beam_search.", min=0, show_default="the model's random_seed"
        ),
    ] = None,
    batch: Batch = None,
    backend: Backend = None,
    dictionary: Dictionary = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Translate a file, as Nematus or zero does: the same search, the same words; Nematus ends lines with a space.

    A warning on standard error says how many words the model does not know.
    """

    from rmsnorm.nematus.translate import translate

    command = "rmsnorm port translate"
    _require_one(command, model, context.args)
    options = {
        "beam_size": beam, "max_length": max_length, "alpha": alpha, "seed": seed, "n_best": n_best, "batch_size": batch
    }  # fmt: skip
    loaded = load(model, config, source_norm)
    _run(command, loaded, backend, dictionary, output, translate, [lines_of(command, source)], options)


@app.command(epilog=SCORE_EPILOG, context_settings=_MORE)
def score(
    context: typer.Context,
    model: Where,
    source: Source,
    target: Target,
    output: Output = None,
    alpha: Alpha = None,
    batch: Batch = None,
    backend: Backend = None,
    dictionary: Dictionary = None,
    config: Options = None,
    source_norm: SourceNorm = None,
) -> None:
    """Write -log p of each translation given its source, one a line, as Nematus does; of zero divided by its length."""

    from rmsnorm.nematus.translate import score

    command = "rmsnorm port score"
    _require_one(command, model, context.args)
    if source == target == STDIN:
        raise errors.out_of_domain(command, "target", "-", "another file than the source", "name one of the two")
    options = {"alpha": alpha or 0.0, "batch_size": batch}
    loaded, texts = load(model, config, source_norm), [lines_of(command, path) for path in (source, target)]
    _run(command, loaded, backend, dictionary, output, score, texts, options, scoring=True)


@app.command(epilog=NORMS_EPILOG)
def norms(
    model: Where,
    source: Source,
    target: Target,
    batch: Batch = None,
    backend: Backend = None,
    dictionary: Dictionary = None,
    config: Options = None,
) -> None:
    """Say which norm a Theano model was trained with: score a development set with LayerNorm and with RMSNorm.

    Theano Nematus has the same names for both. The norm of the training has the lower scores by far.
    """
    from rmsnorm.nematus.translate import score

    command = "rmsnorm port norms"
    try:
        known = load(model, config, None).config.norm
    except errors.InputError:  # also of another fault, which the next call of load says
        known = None
    console = Console(highlight=False, soft_wrap=True)
    if known is not None:
        console.print(f"{_NORMS[known]}: the variables or the options of the model say so; --source-norm is not needed")
        return
    texts = [list(lines_of(command, path)) for path in (source, target)]
    words, scores_of = sum(len(line.split()) + 1 for line in texts[1]), {}
    for norm in ("layer", "rms"):
        loaded = load(model, config, norm)
        array_model, vocabularies = opened(command, loaded, backend, dictionary, scoring=True)
        scores = score(array_model, loaded.config, texts[0], texts[1], *vocabularies, batch_size=batch)
        scores_of[norm] = list(map(float, scores))
        mean = sum(scores_of[norm]) / len(scores_of[norm])
        perplexity = math.exp(min(sum(scores_of[norm]) / words, 700.0))  # the largest that float64 holds
        console.print(f"{_NORMS[norm]:9}  -log p {mean:.5g} a sentence, perplexity {perplexity:.5g}")
    differences = [one - other for one, other in zip(*scores_of.values(), strict=True)]
    mean = sum(differences) / len(differences)
    norm, better = ("layer", sum(d < 0 for d in differences)) if mean < 0 else ("rms", sum(d > 0 for d in differences))
    # Three standard errors of the mean of differences: chance is beyond them in 3 of 1,000 development sets.
    deviation = statistics.stdev(differences) if len(differences) > 1 else math.inf
    if abs(mean) <= 3 * deviation / math.sqrt(len(differences)):
        console.print(f"{_NORMS[norm]} is better in {better} of {len(differences)} sentences, which may be chance: "
                      "give more sentences")  # fmt: skip
        raise typer.Exit(DIFFERS)
    console.print(f"{_NORMS[norm]} is better in {better} of {len(differences)} sentences: the model was trained with "
                  f"it. Add --source-norm {norm} to the next command.")  # fmt: skip


def _require_one(command: str, model: Path, others: list[str]) -> None:
    if others:
        raise errors.out_of_domain(
            command, "MODEL", [str(model), *others], "one model, as ensembles are not ported",
            "name one of them, or let Nematus average them: rmsnorm port nematus MODEL DIR --to tf writes its form",
        )  # fmt: skip


def _run(
    command: str,
    model: Any,
    backend: str | None,
    dictionary: list[Path] | None,
    output: Path | None,
    compute: Callable[..., Iterator[str]],
    texts: list[Iterable[str]],
    options: dict[str, Any],
    *,
    scoring: bool = False,
) -> None:
    """Compute lines with a model, and write each as soon as it is there; a file is there when all are complete."""
    array_model, words = opened(command, model, backend, dictionary, scoring=scoring)
    if not scoring:
        counted = unknown_counted(texts[0], words[0])
        texts = [list(counted) if isinstance(texts[0], list) else counted, *texts[1:]]
    with progress("sentences", hidden=output is None and sys.stdout.isatty()) as bars:
        bar = bars.add_task(array_model.key, total=None)

        def advance(done: int, total: int | None) -> None:
            bars.update(bar, completed=done, total=total)

        lines = compute(array_model, model.config, *texts, *words, on_progress=advance, **options)
        if output is None:
            write(lines, sys.stdout.buffer)
            return
        with replacing(output) as temporary, temporary.open("wb") as file:
            write(lines, file)
