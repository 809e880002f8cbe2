"""``rmsnorm port info``, ``nematus``, ``zero``, ``translate``, ``score``, ``norms`` and ``verify``."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rmsnorm.cli.opened import Backend, Dictionary, Options, SourceNorm, Where, backend_key, computed_by, load, opened
from rmsnorm.cli.streams import STDIN, lines_of, unknown_counted, write
from rmsnorm.cli.usage import DIFFERS, choices, progress
from rmsnorm.files import replacing
from rmsnorm.nematus.config import BEAM
from rmsnorm.specification import errors

app = typer.Typer(
    name="port", help="Models of Nematus and of zero: describe, convert, translate, score.", no_args_is_help=True
)

_TARGETS: Final = ("torch", "keras", "flax", "numpy", "tf", "theano")
_SPELLINGS: Final = {"pytorch": "torch", "tensorflow": "tf", "jax": "flax"}
_NORMS: Final = {"none": "no norm", "layer": "LayerNorm", "rms": "RMSNorm", "prms": "pRMSNorm"}
_MORE: Final = {"allow_extra_args": True}  # the other models of an ensemble, which the command refuses by name


def _epilog(status: str, *examples: str) -> str:
    """The examples of a command, and what its exit statuses say; 2 is that of all."""
    shown = "".join(f"    rmsnorm port {example}\n\n" for example in examples)
    unusable = "2 bad usage, or files that are damaged, missing, or do not fit each other."
    return f"{'Examples:' * bool(examples)}\n\n{shown}Exit status: {status}, {unusable}"


Source = Annotated[Path, typer.Option(help="Sentences, one a line, as the model takes them (BPE); - is the input.")]
Target = Annotated[Path, typer.Option(help="Their translations, one a line; - is standard input.")]
Output = Annotated[Path | None, typer.Option(help="Where to write.", dir_okay=False, show_default="the terminal")]
_names, _what = ("--alpha", "--normalization-alpha", "--normalization_alpha"), "Scores are divided by length^ALPHA."
Alpha = Annotated[float | None, typer.Option(*_names, help=_what, show_default="0, in zero its option")]
Batch = Annotated[int | None, computed_by(help="Sentences at once.", min=1, show_default="80, in zero its option")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder for the result.")]
To = Annotated[str, typer.Option(help=f"Form: {', '.join(_TARGETS)}; of zero not theano.")]
ToNorm = Annotated[str | None, typer.Option(help="rms to make RMSNorm of LayerNorm.", show_default="unchanged")]
_what = f"{BEAM}, in zero its option"
Beam = Annotated[int | None, typer.Option(help="Hypotheses kept.", min=1, max=1000, show_default=_what)]
NBest = Annotated[bool, typer.Option("--n-best", help="All hypotheses of the beam, with scores (5 digits as Nematus).")]
_what = "Words at most, with the end; of zero, more than the source has."
MaxLength = Annotated[int | None, typer.Option(help=_what, min=1, show_default="the model's")]


@app.command(epilog=_epilog("0 shown"))
def info(model: Where, config: Options = None, source_norm: SourceNorm = None) -> None:
    """Describe a model: its Nematus version, norm, sizes and vocabulary, and the tensors that are not part of it."""
    loaded = load(model, config, source_norm)
    from rmsnorm.nematus.report import facts

    table = Table.grid(padding=(0, 2))
    for name, value in facts(loaded):
        table.add_row(Text(name, style="bold"), Text(value))
    Console(soft_wrap=True).print(table)


def _add_conversion(system: str, targets: tuple[str, ...], text: str) -> None:
    """The command that converts models of Nematus, or of zero."""
    status = "0 written and the same numbers, 1 other numbers and nothing written"
    examples = (f"{system} model/ ported/ --to torch", f"{system} model/ rms/ --to numpy --norm rms")

    @app.command(system, help=text, epilog=_epilog(status, *examples))
    def convert(
        model: Where, folder: Folder, to: To, norm: ToNorm = None, config: Options = None,
        source_norm: SourceNorm = None,
    ) -> None:  # fmt: skip
        command = f"rmsnorm port {system}"
        (to,) = choices("to", [_SPELLINGS.get(to, to)], targets, command)
        choices("norm", [norm] if norm else None, ("rms",), command)
        source = load(model, config, source_norm)
        from rmsnorm.nematus.convert import convert

        own = source.config.rules
        if own.system != system:
            fix = f"use rmsnorm port {own.system}"
            raise errors.out_of_domain(command, "the model", f"of {own.system}", system, fix)
        with Console(stderr=True).status("converting and comparing"):
            result = convert(source, folder, to, rms_norm=norm is not None)
        _show(result, to, "" if norm is None else "LayerNorm to RMSNorm: ", is_zero=own.is_zero)


def _show(result: Any, to: str, what: str, *, is_zero: bool) -> None:
    """What was converted, and how to go on; exits with 1 if the numbers are other ones."""
    console, path = Console(highlight=False, soft_wrap=True), result.model.path
    kept = "; gains are kept, offsets are in biases" if is_zero else "; gains and offsets are kept"
    scale = f"of logits up to {result.largest:.3g}, {result.sentences} random sentences"
    console.print(f"{what}max error {result.exact:.2g} {scale}{kept if what else ''}")
    if what:
        dtype = next(iter(result.model.parameters.values())).dtype.name
        console.print(f"weights rounded to {dtype}: max error {result.error:.2g}")
    for warning in result.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if not result.is_exact:
        console.print(Text("other numbers: nothing is written", style="red"))
        raise typer.Exit(DIFFERS)
    console.print(f"{len(result.model.parameters)} parameters in {path}")
    console.print(f"rmsnorm port verify {path.parent} computes its proof again, on any machine")
    if to == "keras":
        console.print("load it in a new process with\n    import keras, rmsnorm.nematus.tf_models")
        console.print(f"    model = keras.models.load_model({str(path)!r})")


_NEMATUS: Final = """Convert a model, and compare the logits of random sentences before and after with the golden.

torch, flax and numpy are one form: model.safetensors, a state dict of the model in PyTorch. keras is model.keras, for
keras.saving.load_model. tf is a checkpoint for TensorFlow Nematus, and theano an archive for Theano Nematus. These
commands and rmsnorm.nematus.load read all of them. Options and dictionaries are copied. The folder is made in the last
step."""
_ZERO: Final = """Convert a model of zero, the authors' toolkit, as rmsnorm port nematus converts one of Nematus.

tf is a checkpoint for zero, with its param.json. Where ema_decay is set, the averages become the weights."""
_add_conversion("nematus", _TARGETS, _NEMATUS)
_add_conversion("zero", _TARGETS[:-1], _ZERO)


@app.command(epilog=_epilog("0 held, 1 not held", "verify ported/ --backend numpy"))
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that rmsnorm port nematus or zero wrote.")],
    backend: Backend = None,
) -> None:
    """Compute the proof of a conversion again: a sentence, its translation and two scores, in float64.

    The conversion wrote them into proof.json of the folder, as the golden computed them.
    """
    from rmsnorm.nematus.convert import prove

    model, key = load(folder, None, None), backend_key("rmsnorm port verify", backend)
    proof, name = prove(folder, key, model.config, model.parameters), backend or key
    count = len(proof.output)
    words = f"the same {count} word{'s' * (count != 1)}" if proof.output == proof.expected_output else "other words"
    scores = ", ".join(f"{score:.10g}" for score in proof.expected_scores)
    numbers = f"{words}; -log p {scores}: max error {proof.error:.2g}, at most {proof.bound:.2g} is rounding"
    console = Console(highlight=False, soft_wrap=True)
    if proof.holds:
        return console.print(f"held in {name}: {numbers}")
    console.print(Text(f"not held in {name}: {numbers}", style="red"))
    console.print(f"expected {proof.expected_output}, now {proof.output}; the model is another one than that "
                  "which was converted, or the backend has a mistake")  # fmt: skip
    raise typer.Exit(DIFFERS)


@app.command(epilog=_epilog("0 written", "translate m/ --source in --beam 12 --output out"), context_settings=_MORE)
def translate(
    context: typer.Context, model: Where, source: Source, beam: Beam = None, output: Output = None,
    n_best: NBest = False, alpha: Alpha = None, max_length: MaxLength = None, batch: Batch = None,
    backend: Backend = None, dictionary: Dictionary = None, config: Options = None, source_norm: SourceNorm = None,
) -> None:  # fmt: skip
    """Translate a file, as Nematus or zero does: the same search, the same words; Nematus ends lines with a space.

    A warning on standard error says how many words the model does not know. To answer line by line, as from a pipe:
    --source - --batch 1.
    """
    from rmsnorm.nematus.translate import translate

    command = "rmsnorm port translate"
    options: dict[str, Any] = {"beam_size": beam, "max_length": max_length, "n_best": n_best}
    loaded, lines = load(model, config, source_norm, context.args), lines_of(command, source)
    array_model, words = opened(command, loaded, backend, dictionary, scoring=False)
    counted = unknown_counted(lines, words[0])
    lines = list(counted) if isinstance(lines, list) else counted
    options |= {"alpha": alpha, "batch_size": batch}
    compute = partial(translate, array_model, loaded.config, lines, *words, **options)
    _write(compute, array_model.key, output)


@app.command(epilog=_epilog("0 written", "score model/ --source test.bpe.de --target test.en"), context_settings=_MORE)
def score(
    context: typer.Context, model: Where, source: Source, target: Target, output: Output = None, alpha: Alpha = None,
    batch: Batch = None, backend: Backend = None, dictionary: Dictionary = None, config: Options = None,
    source_norm: SourceNorm = None,
) -> None:  # fmt: skip
    """Write -log p of each translation given its source, one a line, as Nematus does; of zero divided by its length."""
    from rmsnorm.nematus.translate import score

    command = "rmsnorm port score"
    loaded = load(model, config, source_norm, context.args)
    if source == target == STDIN:
        raise errors.out_of_domain(command, "target", "-", "another file than the source", "name one of the two")
    texts: list[Any] = [lines_of(command, path) for path in (source, target)]
    array_model, words = opened(command, loaded, backend, dictionary, scoring=True)
    compute = partial(score, array_model, loaded.config, *texts, *words, alpha=alpha or 0.0, batch_size=batch)
    _write(compute, array_model.key, output)


def _write(compute: Callable[..., Iterator[str]], name: str, output: Path | None) -> None:
    """Write each line as soon as it is computed; a file is there when all are complete."""
    with progress("sentences", hidden=output is None and sys.stdout.isatty()) as bars:
        bar = bars.add_task(name, total=None)
        lines = compute(on_progress=lambda done, total: bars.update(bar, completed=done, total=total))
        if output is None:
            write(lines, sys.stdout.buffer)
            return
        with replacing(output) as temporary, temporary.open("wb") as file:
            write(lines, file)


@app.command(epilog=_epilog("0 said which, 1 it may be chance", "norms model.npz --source dev.de --target dev.en"))
def norms(
    model: Where, source: Source, target: Target, batch: Batch = None, backend: Backend = None,
    dictionary: Dictionary = None, config: Options = None,
) -> None:  # fmt: skip
    """Say which norm a Theano model was trained with: score a development set with LayerNorm and with RMSNorm.

    Theano Nematus has the same names for both. The norm of the training has the lower scores by far.
    """
    from rmsnorm.nematus.translate import score

    command, console = "rmsnorm port norms", Console(highlight=False, soft_wrap=True)
    try:
        known = load(model, config, None).config.norm
    except errors.InputError:  # also of another fault, which the next call of load says
        known = None
    if known is not None:
        why = "the variables or the options of the model say so; --source-norm is not needed"
        return console.print(f"{_NORMS[known]}: {why}")
    texts: list[Any] = [list(lines_of(command, path)) for path in (source, target)]
    words, scores_of = sum(len(line.split()) + 1 for line in texts[1]), {}
    for norm in ("layer", "rms"):
        loaded = load(model, config, norm)
        array_model, vocabularies = opened(command, loaded, backend, dictionary, scoring=True)
        scores = [*map(float, score(array_model, loaded.config, *texts, *vocabularies, batch_size=batch))]
        scores_of[norm], mean = scores, statistics.fmean(scores)
        perplexity = math.exp(min(sum(scores) / words, 700.0))  # the largest that float64 holds
        console.print(f"{_NORMS[norm]:9}  -log p {mean:.5g} a sentence, perplexity {perplexity:.5g}")
    differences = [one - other for one, other in zip(*scores_of.values(), strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    norm, better = ("layer", sum(d < 0 for d in differences)) if mean < 0 else ("rms", sum(d > 0 for d in differences))
    which = f"{_NORMS[norm]} is better in {better} of {count} sentences"
    # Three standard errors of the mean of differences: chance is beyond them in 3 of 1,000 development sets.
    if abs(mean) <= 3 * (statistics.stdev(differences) if count > 1 else math.inf) / math.sqrt(count):
        console.print(f"{which}, which may be chance: give more sentences")
        raise typer.Exit(DIFFERS)
    console.print(f"{which}: the model was trained with it. Add --source-norm {norm} to the next command.")
