"""``rmsnorm port translate``, ``score`` and ``norms``: real models, lines, dictionaries, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm
from nematus_commands import run, saved, skip_without, with_dictionaries
from nematus_models import config_of, random_parameters, reference, reoption

from rmsnorm import nematus
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.translate import score, translate
from rmsnorm.nematus.vocabulary import Vocabulary, batch, count_unknown, vocabularies


def line(sequence: Any) -> str:
    """As Nematus writes it: a space before the end of sentence."""
    ids = list(sequence)
    words = [f"w{index}" for index in (ids[: ids.index(0)] if 0 in ids else ids)]
    return " ".join([*words, ""] if 0 in ids and words else words)


@pytest.mark.parametrize(
    ("name", "backend"), [*product(("A4", "B"), ("numpy", "torch")), ("B", "keras"), ("B", "flax")]
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
    compiles = backend in ("keras", "flax")  # anew for each command
    beams, alphas = (3,) if compiles else (1, 3), ("_alpha0", "_alpha1") if config.search == "sampler" else ("",)
    for beam, alpha in product(beams, alphas):
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
        shown = [sign * float(score) for *_, score in printed]
        np.testing.assert_allclose(shown, [cost for *_, cost in wanted], rtol=0, atol=2e-5)
        assert compiles or run("translate", *options).split("\n") == [*[words for _, words, _ in wanted][::beam], ""]
    options, losses = [*usual, "--target", tmp_path / "target"], in_nematus.arrays["loss_per_sentence"]
    for alpha in (0.5,) if compiles else (0, 0.5):
        scored = list(map(float, run("score", *options, "--alpha", alpha).split()))
        np.testing.assert_allclose(scored, losses / y_mask.sum(axis=0) ** alpha, rtol=0, atol=5e-5)


def test_batches_do_not_show(tmp_path: Path) -> None:
    """Sentences are batched by length; the output has the order of the source. By default a beam of 5, and alpha 0."""
    saved(tmp_path, dialect="tensorflow-v0.3", search="costs")
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{index}" for index in rng.integers(1, 9, size)) for size in rng.integers(0, 9, 20)]
    (tmp_path / "source").write_text("\n".join(lines), encoding="utf-8")  # without an end to the last line
    usual = ["translate", tmp_path, "--source", tmp_path / "source", "--max-length", 6, "--backend", "numpy"]
    alone = run(*usual, "--batch", 1)
    assert len(alone.splitlines()) == 20
    assert {run(*usual, "--batch", size) for size in (3, 80)} == {alone}
    best = run(*usual, "--n-best")
    assert best == run(*usual, "--n-best", "--beam", 5, "--alpha", 0)
    normalised = {run(*usual, "--n-best", name, 1) for name in ("--alpha", "--normalization_alpha")}
    assert len(normalised) == len(normalised - {best}) == 1


def damaged(folder: Path) -> None:
    path = folder / "model.npz"
    path.write_bytes(path.read_bytes()[:2000])


def exchanged(folder: Path) -> None:
    (folder / "0.json").rename(folder / "2.json")
    (folder / "1.json").rename(folder / "0.json")
    (folder / "2.json").rename(folder / "1.json")


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


NOTHING: Callable[[Path], Any] = lambda folder: None  # noqa: E731
SOURCE, TARGET = ("--source", "source"), ("--target", "target")
TRANSLATE, SCORE = (
    ("translate", ".", *SOURCE, "--output", "output"),
    ("score", ".", *SOURCE, *TARGET, "--output", "output"),
)
INFO, CONVERT = ("info", "."), ("nematus", ".", "out", "--to", "numpy")
SMALL = b'{"w0": 0, "w1": 1, "w2": 2}'
# What is done to the files, the commands, and what each says.
REFUSALS: list[tuple[Callable[[Path], Any], list[tuple[Any, ...]], str]] = [
    (damaged, [TRANSLATE, SCORE, INFO, CONVERT, ("norms", ".", *SOURCE, *TARGET)],
     "model.npz is damaged .its end is missing., expected an npz archive; copy it again"),
    (write("1.json", SMALL), [TRANSLATE, SCORE, CONVERT], "1.json has no word for 3 and 4 more, expected"),
    (exchanged, [CONVERT], "expected a dictionary of 9 words for the source and one of 8 for the target"),
    (write("0.json", b"[1, 2]"), [CONVERT], "0.json is no dictionary of Nematus"),
    (write("out", b"a file"), [CONVERT], "out exists, expected a new or an empty folder; name another"),
    (NOTHING, [("nematus", ".", "no/out", "--to", "numpy")], "no is not a folder, expected one to make out in"),
    (NOTHING, [("nematus", ".", "out", "--to", "onnx")], "to is 'onnx', expected 'torch'.* or 'theano'"),
    (write("source", b""), [TRANSLATE, SCORE], r"the source is \[\], expected at least one line"),
    (write("source", b"w3 \xff"), [TRANSLATE, SCORE], "byte 4 of line 1 of "),
    (lambda folder: (folder / "source").unlink(), [TRANSLATE, SCORE], "No such file or directory"),
    (write("target", b"w1\n"), [SCORE], "the target is 1, expected 3 lines, as the source has; align the files"),
    (NOTHING, [("translate", ".", *SOURCE, "--output", "no/out")], "out cannot be used.* No such file or directory"),
    (NOTHING, [(*TRANSLATE, "--beam", 9)], "beam_size is 9, expected at most 8, the target vocabulary"),
    (NOTHING, [(*TRANSLATE, "--alpha", "nan"), (*SCORE, "--alpha", "nan")], "alpha is nan, expected a finite number"),
    (NOTHING, [(*TRANSLATE, "--backend", "mxnet")], "backend is 'mxnet', expected 'torch', 'tf', 'keras', 'jax'"),
    (NOTHING, [(*TRANSLATE, "--dictionary", "0.json")], "expected 2 files; name all of them"),
    (NOTHING, [("translate", "nothing", *SOURCE)], "is neither a directory, nor a file, nor the prefix of"),
    (NOTHING, [(*CONVERT, "--norm", "layer")], "norm is 'layer', expected 'rms'"),
    (NOTHING, [("score", ".", "--source", "-", "--target", "-")], "target is '-', expected another file"),
    (NOTHING, [("translate", ".", "b", *SOURCE), ("score", ".", "b", "c", *SOURCE, *TARGET)], "expected one model"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "commands", "message"), REFUSALS, ids=[row[2][:30] for row in REFUSALS])
def test_refusals(
    change: Callable[[Path], Any], commands: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, exit status 2, and no output: neither a new one nor a changed one."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path)
    (tmp_path / "source").write_text("w3 w4\n\nw5 w3\n")
    (tmp_path / "target").write_text("w1\n\nw2 w4\n")
    (tmp_path / "output").write_text("before")
    change(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments in commands:
        shown = run(*arguments, status=2)
        assert re.search(message, shown), shown
        assert len(shown.strip().splitlines()) == 1, "one sentence"
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("dialect", ["theano", "zero"])
@pytest.mark.parametrize("work", [translate, score])
def test_each_line_is_answered_before_the_next_batch_is_read(dialect: Any, work: Any) -> None:
    config = config_of("rms" if dialect == "theano" else "zero rnn").replace(dialect=dialect)
    config = config.replace(options={"buffer_size": 2, "data_leak_ratio": 0})
    words = Vocabulary({f"w{index}": index for index in range(8)}, unknown=1, end=2 if dialect == "zero" else 0)
    model = RNNSearch(config, random_parameters(config))
    lines, read, seen = ["w3 w4 w5", "w6", "w3", "w5 w7", "w4"], [], []
    typed = (read.append(text) or text for text in lines)  # type: ignore[func-returns-value]
    more, options = ([], {"max_length": 4}) if work is translate else ([lines], {})
    answers = []
    for answer in work(model, config, typed, *more, [words], words, batch_size=2, **options):
        answers.append(answer)
        seen.append(len(read))
    assert seen == [2, 2, 4, 4, 5]
    assert answers == list(work(model, config, lines, *more, [words], words, batch_size=2, **options))


def test_lines(tmp_path: Path) -> None:
    """Of a file and of standard input; they end at line feeds alone, and a mark of the byte order is no word."""
    saved(tmp_path)
    source, usual = tmp_path / "source", [tmp_path, "--backend", "numpy"]

    def scores(data: bytes) -> str:
        source.write_bytes(data)
        shown = run("score", *usual, "--source", source, "--target", source)
        assert run("score", *usual, "--source", "-", "--target", source, typed=data) == shown
        return shown

    for data, count in ((b"w3 w4\n\nw5\n", 3), ("a\x85b\n\nc\u2028d\r\n".encode(), 3), (b"\n", 1), (b"a", 1)):
        assert len(scores(data).splitlines()) == count
    assert len({scores(data) for data in (b"w3\n\nw5\n", b"w3\r\n\r\nw5", b"\xef\xbb\xbfw3\n\nw5\n")}) == 1
    shown = run("translate", *usual, "--source", "-", "--batch", 1, typed=b"w3\nw\xff", status=2)
    assert "byte 2 of line 2 of standard input is 255, expected UTF-8" in shown
    shown = run("score", *usual, "--source", "-", "--target", source, typed=b"w3\n", status=2)
    assert "the source is 1, expected more lines, as the target has" in shown


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


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    """On standard error: of the first line that has some at once, of all lines at the end. Translations stay."""
    saved(tmp_path)
    source, usual = tmp_path / "source", ["port", "translate", tmp_path, "--backend", "numpy", "--max-length", 5]
    for text, wanted in (
        ("w3\n", []),
        ("w3\n" + "cat " * 12 + "\n\n", ["12 of 12 words of line 2 are unknown"]),
        ("w3 cat\nw4\ndog cow\n", ["1 of 2 words of line 1 are unknown", "3 of 5 words in 2 of 3 lines are unknown"]),
    ):
        source.write_text(text)
        for options, typed in (([source], None), (["-", "--batch", 1], text.encode())):
            result = rmsnorm(*usual, "--source", *options, typed=typed, COLUMNS="1000")
            shown = [row.removeprefix("warning: ").partition(";")[0] for row in result.stderr.splitlines()]
            assert (result.exit_code, shown) == (0, wanted)
            assert len(result.stdout.splitlines()) == len(text.splitlines())
    factors = [Vocabulary({"a": 2}, unknown=1), Vocabulary({"x": 2}, unknown=1)]
    assert count_unknown("a|x b|x a|y", factors) == (2, 3), "a word is unknown if one of its factors is"


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_norm_of_a_model_is_found_by_its_scores(norm: Any, tmp_path: Path) -> None:
    """Translations that are drawn from the model with one of the norms are likelier with that norm."""
    saved(tmp_path, "layer", rnn_dec_depth=1)
    source, target = tmp_path / "source", tmp_path / "target"
    usual = [tmp_path, "--source", source, "--target", target, "--backend", "numpy"]
    target.write_bytes(source.read_bytes())
    assert "LayerNorm: the variables or" in run("norms", *usual)
    reoption(tmp_path, norm=None, layer_normalization_type=None)
    assert "rmsnorm port norms" in run("info", tmp_path, status=2)
    rng, count = np.random.default_rng(0), 100
    source.write_text("".join(" ".join(f"w{i}" for i in rng.integers(2, 9, 5)) + "\n" for _ in range(count)))
    model = nematus.load(tmp_path, norm=norm)
    x, x_mask = batch(source.read_text().splitlines(), vocabularies(model)[0])
    y = np.zeros((6, count), np.int64)
    for time in range(len(y)):  # words are drawn from what the model says of the next one
        logits = RNNSearch(model.config, model.parameters).logits(x, x_mask, y)[time]
        y[time] = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    target.write_text("".join(vocabularies(model)[1].words(words) + "\n" for words in y.T))
    shown = run("norms", *usual).splitlines()
    assert shown[2].endswith(f"the model was trained with it. Add --source-norm {norm} to the next command.")
    for row, asked in zip(shown, ("layer", "rms"), strict=False):
        scores = list(map(float, run("score", *usual, "--source-norm", asked).split()))
        words = len(target.read_text().split()) + len(scores)
        perplexity = np.exp(sum(scores) / words)
        assert row.endswith(f"-log p {sum(scores) / count:.5g} a sentence, perplexity {perplexity:.5g}")
    for path in (source, target):
        path.write_text(path.read_text().splitlines()[0] + "\n")
    assert "of 1 sentences, which may be chance: give more sentences" in run("norms", *usual, status=1)
