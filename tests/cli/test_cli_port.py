"""``rmsnorm port translate`` and ``score``: real models through the commands, lines, dictionaries, every refusal."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm
from nematus_commands import run, saved, skip_without, with_dictionaries
from nematus_models import config_of, random_parameters, reference

from rmsnorm import nematus
from rmsnorm.nematus.config import BEAM
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.translate import score, translate
from rmsnorm.nematus.vocabulary import Vocabulary, batch, count_unknown, vocabularies


def line(sequence: Any) -> str:
    """As Nematus writes it: a space before the end of sentence."""
    ids = list(sequence)
    words = [f"w{index}" for index in (ids[: ids.index(0)] if 0 in ids else ids)]
    return " ".join([*words, ""] if 0 in ids and words else words)


@pytest.mark.parametrize(
    ("name", "backend"),
    [*product(("A4", "B"), ("numpy", "torch")), ("A7b", "numpy"), ("B", "keras"), ("B", "flax")],
)
def test_what_nematus_translated_and_scored(name: str, backend: str, tmp_path: Path) -> None:
    """Real runs of it: words, order and scores of the beams, losses of the sentences."""
    in_nematus = reference(name)
    config, parameters, _ = in_nematus.model("rms")
    skip_without(backend)
    nematus.save_safetensors(tmp_path / "model.safetensors", with_dictionaries(tmp_path, config), parameters)
    x, x_mask, y, y_mask = in_nematus.sentences
    for file, ids, mask in (("source", x[0], x_mask), ("target", y, y_mask)):
        columns = [ids[: int(length) - 1, i] for i, length in enumerate(mask.sum(axis=0))]  # the end is implied
        (tmp_path / file).write_text("".join(" ".join(f"w{index}" for index in column) + "\n" for column in columns))

    usual = [tmp_path, "--source", tmp_path / "source", "--backend", backend]
    for beam in (1, 3):
        for alpha in ("_alpha0", "_alpha1") if config.search == "sampler" else ("",):
            sequences = in_nematus.arrays[f"beam{beam}{alpha}_sequences"]
            scores = in_nematus.arrays.get(f"beam{beam}{alpha}_scores")
            costs = in_nematus.arrays[f"beam{beam}_costs"] if scores is None else -scores
            order = np.argsort(costs, axis=1, kind="stable")
            options = [*usual, "--beam", beam, "--max-length", 12, "--alpha", alpha[-1:] or 0]
            wanted = []
            for i, best in enumerate(order):
                wanted += [(str(i), line(np.maximum(sequences[i, j], 0)), costs[i, j]) for j in best]
            printed = [row.split(" ||| ") for row in run("translate", *options, "--n-best").splitlines()]
            assert [(number, words) for number, words, _ in printed] == [row[:2] for row in wanted]
            sign = -1 if scores is not None else 1  # v0.3 writes costs
            np.testing.assert_allclose(
                [sign * float(score) for *_, score in printed], [cost for *_, cost in wanted], rtol=0, atol=2e-5
            )
            best_words = [words for _, words, _ in wanted][::beam]
            assert run("translate", *options).split("\n") == [*best_words, ""]
    options = [*usual, "--target", tmp_path / "target"]
    losses = in_nematus.arrays["loss_per_sentence"]
    np.testing.assert_allclose(list(map(float, run("score", *options).split())), losses, rtol=0, atol=5e-5)
    lengths = y_mask.sum(axis=0)
    normalised = list(map(float, run("score", *options, "--alpha", 0.5).split()))
    np.testing.assert_allclose(normalised, losses / lengths**0.5, rtol=0, atol=5e-5)


def test_batches_do_not_show(tmp_path: Path) -> None:
    """Sentences are batched by length; the output has the order of the source, of any number of lines."""
    config, _ = saved(tmp_path, dialect="tensorflow-v0.3", search="costs")
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{index}" for index in rng.integers(1, 9, size)) for size in rng.integers(0, 9, 20)]
    (tmp_path / "source").write_text("\n".join(lines), encoding="utf-8")  # without an end to the last line
    usual = ["translate", tmp_path, "--source", tmp_path / "source", "--max-length", 6, "--backend", "numpy"]
    alone = run(*usual, "--batch", 1)
    assert len(alone.splitlines()) == 20
    for size in (3, 80):
        assert run(*usual, "--batch", size) == alone
    lengths: list[int] = []

    class Recording:
        def loss(self, x: Any, x_mask: Any, y: Any, y_mask: Any) -> Any:
            lengths.extend(x_mask.sum(axis=0).tolist())
            return np.zeros(x.shape[2])

    progress: list[tuple[int, int]] = []
    model = nematus.load(tmp_path)
    sources, target = vocabularies(model)
    scores = score(
        Recording(), model.config, lines, [""] * 20, sources, target, batch_size=8,
        on_progress=lambda *done: progress.append(done),
    )  # fmt: skip
    assert len(list(scores)) == 20
    assert lengths == sorted(lengths) != [len(text.split()) + 1 for text in lines]
    assert progress == [(0, 20), (8, 20), (16, 20), (20, 20)]
    best = RNNSearch(config, model.parameters).translate(*batch(lines[:1], sources), 5, 6).sequences[0, 0]
    words = target.words(best)
    assert alone.split("\n")[0] == (words + " " if words else "")


def damaged(folder: Path) -> None:
    path = folder / "model.npz"
    path.write_bytes(path.read_bytes()[:2000])


def small_dictionary(folder: Path) -> None:
    (folder / "1.json").write_text(json.dumps({"w0": 0, "w1": 1, "w2": 2}))


FAULTS = {
    "truncated": (damaged, "model.npz is damaged (its end is missing), expected an npz archive; copy it again"),
    "vocabulary": (small_dictionary, "1.json has no word for 3 and 4 more, expected one for each of the 8 ids of the"),
    "empty": (lambda folder: (folder / "source").write_bytes(b""), "the source is [], expected at least one line; is"),
    "encoding": (lambda folder: (folder / "source").write_bytes(b"w3 \xff"), "byte 4 of line 1 of "),
    "no source": (lambda folder: (folder / "source").unlink(), "No such file or directory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refusals(fault: str, tmp_path: Path) -> None:
    """One sentence, exit status 2, and no output: neither a new one nor a changed one."""
    (tmp_path / "other").mkdir()
    saved(tmp_path)
    change, message = FAULTS[fault]
    change(tmp_path)
    output = tmp_path / "output"
    output.write_text("before")
    model, source = tmp_path / "model.npz", tmp_path / "source"
    target = tmp_path / "target"
    target.write_text("w1\n\nw2 w4\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    commands: list[list[Any]] = [
        ["translate", model, "--source", source, "--output", output],
        ["score", model, "--source", source, "--target", target, "--output", output],
    ]
    if fault == "truncated":
        commands += [["info", model], ["nematus", model, tmp_path / "out", "--to", "numpy"]]
    for arguments in commands:
        shown = run(*arguments, status=2)
        assert message in shown
        assert len(shown.strip().splitlines()) == 1, "one sentence"
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        assert output.read_text() == "before"


def test_other_refusals(tmp_path: Path) -> None:
    saved(tmp_path)
    source = tmp_path / "source"
    short = tmp_path / "short"
    short.write_text("w1\n")
    shown = run("score", tmp_path, "--source", source, "--target", short, status=2)
    assert "score: the target is 1, expected 3 lines, as the source has; align the files" in shown
    shown = run("translate", tmp_path, "--source", source, "--output", tmp_path / "no" / "out", status=2)
    assert "out cannot be used, as the system says: No such file or directory" in shown
    shown = run("translate", tmp_path, "--source", source, "--beam", 9, status=2)
    assert "beam_size is 9, expected at most 8, the target vocabulary" in shown
    for command, more in (("translate", ()), ("score", ("--target", source))):
        shown = run(command, tmp_path, "--source", source, *more, "--alpha", "nan", status=2)
        assert f"{command}: alpha is nan, expected a finite number; pass 1 or so" in shown
    shown = run("translate", tmp_path, "--source", source, "--backend", "mxnet", status=2)
    assert "backend is 'mxnet', expected 'torch', 'tf', 'keras', 'jax', 'flax' or 'numpy'" in shown
    shown = run("translate", tmp_path, "--source", source, "--dictionary", tmp_path / "0.json", status=2)
    assert "expected 2 files; name all of them" in shown
    shown = run("translate", tmp_path / "nothing", "--source", source, status=2)
    assert "is neither a directory, nor a file, nor the prefix of a checkpoint" in shown
    shown = run("nematus", tmp_path, tmp_path / "out", "--to", "numpy", "--norm", "layer", status=2)
    assert "norm is 'layer', expected 'rms'" in shown


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, ModuleNotFoundError])
def test_a_mistake_of_ours_is_not_called_bad_usage(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise error("nothing that a user did")

    monkeypatch.setattr(nematus, "load", wrong, raising=False)
    shown = run("info", tmp_path, status=3)
    assert "in wrong\n" in shown, "the traceback"
    assert "this is a mistake of rmsnorm, not of its use; please report the lines above" in shown


@pytest.mark.parametrize("dialect", ["theano", "zero"])
@pytest.mark.parametrize("work", [translate, score])
def test_each_line_is_answered_before_the_next_batch_is_read(dialect: Any, work: Any) -> None:
    config = config_of("rms" if dialect == "theano" else "zero rnn").replace(dialect=dialect)
    config = config.replace(options={"buffer_size": 2, "data_leak_ratio": 0})
    words = Vocabulary({f"w{index}": index for index in range(8)}, unknown=1, end=2 if dialect == "zero" else 0)
    model = RNNSearch(config, random_parameters(config))
    lines, read = ["w3 w4 w5", "w6", "w3", "w5 w7", "w4"], 0

    def typed() -> Any:
        nonlocal read
        for text in lines:
            read += 1
            yield text

    texts, options = ([typed()], {"max_length": 4}) if work is translate else ([typed(), lines], {})
    answers, seen = [], []
    for answer in work(model, config, *texts, [words], words, batch_size=2, **options):
        answers.append(answer)
        seen.append(read)
    assert seen == [2, 2, 4, 4, 5]
    texts[0] = lines
    assert answers == list(work(model, config, *texts, [words], words, batch_size=2, **options))


def test_standard_input(tmp_path: Path) -> None:
    """Empty lines, carriage returns and a last line without an end, as in a file."""
    saved(tmp_path)
    usual = [tmp_path, "--backend", "numpy"]
    for data in (b"w3 w4\n\nw5\n", b"w3 w4\r\n\r\nw5"):
        (tmp_path / "source").write_bytes(data)
        for command, *options in (("translate", "--max-length", 5), ("score", "--target", tmp_path / "source")):
            wanted = run(command, *usual, *options, "--source", tmp_path / "source")
            assert run(command, *usual, *options, "--source", "-", typed=data) == wanted
            assert len(wanted.splitlines()) == 3
    assert "expected at least one line; is the" in run("translate", *usual, "--source", "-", typed=b"", status=2)
    shown = run("translate", *usual, "--source", "-", "--batch", 1, typed=b"w3\nw\xff", status=2)
    assert "byte 2 of line 2 of standard input is 255, expected UTF-8; convert the file" in shown
    shown = run("score", *usual, "--source", "-", "--target", "-", status=2)
    assert "target is '-', expected another file than the source; name one of the two" in shown
    shown = run("score", *usual, "--source", "-", "--target", tmp_path / "source", typed=b"w3\n", status=2)
    assert "the source is 1, expected more lines, as the target has; align the files" in shown


def test_the_beam_without_an_option_is_that_of_the_model(tmp_path: Path) -> None:
    config, _ = saved(tmp_path)
    usual = ["translate", tmp_path, "--source", tmp_path / "source", "--backend", "numpy", "--n-best"]
    shown = run(*usual)
    assert len(shown.splitlines()) == 3 * config.beam_size == 3 * BEAM
    assert shown == run(*usual, "--beam", BEAM)


def test_dictionaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beside the model come before those of the folder one is in; files that are named come before both."""
    config, _ = saved(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("0.json", "1.json"):
        Path(name).write_text(json.dumps({f"u{index}": index for index in range(9)}))
    named = tmp_path / "named.json"
    named.write_text(json.dumps({f"v{index}": index for index in range(config.target_vocab_size)}))
    usual = ["translate", tmp_path, "--source", tmp_path / "source", "--max-length", 5, "--beam", 1]
    other = run(*usual, "--dictionary", tmp_path / "0.json", "--dictionary", named)
    assert "v" in other
    assert other.replace("v", "w") == run(*usual)
    (tmp_path / "1.json").unlink()
    assert other.replace("v", "u") == run(*usual), "those of the working folder, where the model has none"
    (tmp_path / "elsewhere" / "1.json").rename(tmp_path / "1.json")
    two = config.replace(options={"dictionaries": ["/elsewhere/a/0.json", "/elsewhere/b/0.json"]})
    nematus.save_safetensors(tmp_path / "m.safetensors", two, random_parameters(two))
    run("nematus", tmp_path / "m.safetensors", tmp_path / "out", "--to", "numpy")
    names = nematus.load(tmp_path / "out").config.options["dictionaries"]
    assert names == ["0.json", "1.0.json"]
    assert json.loads((tmp_path / "out" / "1.0.json").read_text()) == json.loads((tmp_path / "0.json").read_text())


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    """Other ends of lines in Unicode would shift all lines after them."""
    saved(tmp_path)
    path = tmp_path / "lines"
    for text, count in (("a\x85b\n\nc\u2028d\r\n", 3), ("\n", 1), ("a", 1)):
        path.write_bytes(text.encode())
        scores = run("score", tmp_path, "--source", path, "--target", path)
        assert len(scores.splitlines()) == count


def test_a_byte_order_mark_is_no_part_of_the_first_word(tmp_path: Path) -> None:
    saved(tmp_path)
    source, marked = tmp_path / "source", tmp_path / "marked"
    source.write_text("w2 w3\n")
    marked.write_bytes(b"\xef\xbb\xbf" + source.read_bytes())
    without, with_mark = (run("score", tmp_path, "--source", path, "--target", source) for path in (source, marked))
    assert without == with_mark


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    """On standard error: of the first line that has some at once, of all lines at the end. Translations stay."""
    saved(tmp_path)
    source, usual = tmp_path / "source", ["port", "translate", tmp_path, "--backend", "numpy", "--max-length", 5]
    split = "; are lines split (BPE) as for training?\n"
    for text, wanted in (
        ("w3\n", ""),
        ("w3\n" + "cat " * 12 + "\n\n", f"warning: 12 of 12 words of line 2 are unknown{split}"),
        (
            "w3 cat\nw4\ndog cow\n",
            f"warning: 1 of 2 words of line 1 are unknown{split}warning: 3 of 5 words in 2 of 3 lines are unknown\n",
        ),
    ):
        source.write_text(text)
        for options, typed in (([source], None), (["-", "--batch", 1], text.encode())):
            result = rmsnorm(*usual, "--source", *options, typed=typed, COLUMNS="1000")
            assert (result.exit_code, result.stderr) == (0, wanted)
            assert len(result.stdout.splitlines()) == len(text.splitlines())


def test_a_word_is_unknown_if_one_of_its_factors_is() -> None:
    factors = [Vocabulary({"a": 2}, unknown=1), Vocabulary({"x": 2}, unknown=1)]
    assert count_unknown("a|x b|x a|y", factors) == (2, 3)
    assert count_unknown("a|x", factors[:1]) == (1, 1)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_norm_of_a_model_is_found_by_its_scores(norm: Any, tmp_path: Path) -> None:
    """Translations that are drawn from the model with one of the norms are likelier with that norm."""
    saved(tmp_path, "layer", rnn_dec_depth=1)
    options = json.loads((tmp_path / "model.npz.json").read_text())
    options.pop("norm", None)
    options.pop("layer_normalization_type", None)
    (tmp_path / "model.npz.json").write_text(json.dumps(options))
    rng, count = np.random.default_rng(0), 100
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("".join(" ".join(f"w{i}" for i in rng.integers(2, 9, 5)) + "\n" for _ in range(count)))
    usual = [tmp_path, "--source", source, "--backend", "numpy"]
    model = nematus.load(tmp_path, norm=norm)
    x, x_mask = batch(source.read_text().splitlines(), vocabularies(model)[0])
    y = np.zeros((6, count), np.int64)
    for time in range(len(y)):  # words are drawn from what the model says of the next one
        logits = RNNSearch(model.config, model.parameters).logits(x, x_mask, y)[time]
        y[time] = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    target.write_text("".join(vocabularies(model)[1].words(words) + "\n" for words in y.T))
    shown = run("norms", *usual, "--target", target).splitlines()
    assert [line.split()[0] for line in shown] == [
        "LayerNorm",
        "RMSNorm",
        {"layer": "LayerNorm", "rms": "RMSNorm"}[norm],
    ]
    assert shown[2].endswith(f"the model was trained with it. Add --source-norm {norm} to the next command.")
    for line, asked in zip(shown, ("layer", "rms"), strict=False):
        scores = list(map(float, run("score", *usual, "--target", target, "--source-norm", asked).split()))
        mean, words = sum(scores) / len(scores), len(target.read_text().split()) + len(scores)
        assert line.endswith(f"-log p {mean:.5g} a sentence, perplexity {np.exp(sum(scores) / words):.5g}")
    assert "rmsnorm port norms" in run("info", tmp_path, status=2)
    for path in (source, target):
        path.write_text(path.read_text().splitlines()[0] + "\n")
    shown = run("norms", *usual, "--target", target, status=1)
    assert "of 1 sentences, which may be chance: give more sentences" in shown


def test_a_norm_that_the_names_tell_needs_no_scores(tmp_path: Path) -> None:
    for kind, wanted in (("rms", "RMSNorm: the variables or"), ("plain", "no norm: the variables or")):
        saved(tmp_path, kind)
        usual = ["--source", tmp_path / "source", "--target", tmp_path / "source"]
        assert wanted in run("norms", tmp_path, *usual)
    damaged(tmp_path)
    assert "model.npz is damaged" in run("norms", tmp_path, *usual, status=2)


def test_an_ensemble_is_refused(tmp_path: Path) -> None:
    """Not as an argument that typer does not expect."""
    saved(tmp_path)
    source = tmp_path / "source"
    for command, more in (("translate", ()), ("score", ("--target", source))):
        shown = run(command, tmp_path, tmp_path / "b", tmp_path / "c", "--source", source, *more, status=2)
        assert "expected one model, as ensembles are not ported; name one of them, or let Nematus" in shown


def test_nematus_own_name_of_alpha_is_an_option(tmp_path: Path) -> None:
    saved(tmp_path)
    usual = [
        "translate",
        tmp_path,
        "--source",
        tmp_path / "source",
        "--backend",
        "numpy",
        "--max-length",
        5,
        "--n-best",
    ]
    plain, shown = run(*usual), run(*usual, "--alpha", 1)
    assert shown != plain
    assert run(*usual, "--normalization-alpha", 1) == run(*usual, "--normalization_alpha", 1) == shown
