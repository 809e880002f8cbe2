"""The commands ``rmsnorm port``: real models, every conversion, lines, dictionaries, and refusals."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import rmsnorm
from nematus_commands import rewrite, run, save, saved, skip_without, with_dictionaries
from nematus_models import CONFIGS, random_parameters, reference, reoption, same

from rmsnorm import nematus
from rmsnorm.nematus import convert as converting
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import unused, variables
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.translate import translate
from rmsnorm.nematus.vocabulary import Vocabulary, count_unknown
from rmsnorm.specification import frameworks


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
    skip_without(backend)
    recorded = reference(name)
    config, parameters, _ = recorded.model()
    nematus.save_safetensors(tmp_path / "model.safetensors", with_dictionaries(tmp_path, config), parameters)
    x, x_mask, y, y_mask = recorded.sentences
    for file, ids, mask in (("source", x[0], x_mask), ("target", y, y_mask)):
        columns = [ids[: int(length) - 1, i] for i, length in enumerate(mask.sum(axis=0))]  # the end is implied
        (tmp_path / file).write_text("".join(" ".join(f"w{index}" for index in column) + "\n" for column in columns))
    usual = [tmp_path, "--source", tmp_path / "source", "--backend", backend]
    for alpha in ("_alpha0", "_alpha1") if config.search == "sampler" else ("",):
        options = [*usual, "--beam", 3, "--max-length", 12, "--alpha", alpha[-1:] or 0]
        sequences, scores = recorded.beam(f"beam3{alpha}")
        lines = [(str(number), line(sequence)) for number, best in enumerate(sequences) for sequence in best]
        printed = [row.split(" ||| ") for row in run("translate", *options, "--n-best").splitlines()]
        assert [(number, words) for number, words, _ in printed] == lines
        sign = 1 if alpha else -1  # v0.3 writes costs
        np.testing.assert_allclose([sign * float(row[2]) for row in printed], scores.ravel(), rtol=0, atol=2e-5)
    assert run("translate", *options).split("\n") == [*[words for _, words in lines[::3]], ""]
    for power in (0, 0.5):
        scored = run("score", *usual, "--target", tmp_path / "target", "--alpha", power)
        wanted = recorded.arrays["loss_per_sentence"] / y_mask.sum(axis=0) ** power
        np.testing.assert_allclose(list(map(float, scored.split())), wanted, rtol=0, atol=5e-5)


def test_batches_do_not_show(tmp_path: Path) -> None:
    """Sentences are batched by length; the output has the order of the source. By default a beam of 5, and alpha 0."""
    saved(tmp_path, dialect="tensorflow-v0.3", search="costs")
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{index}" for index in rng.integers(1, 9, size)) for size in rng.integers(0, 9, 20)]
    (tmp_path / "source").write_text("\n".join(lines))  # without an end to the last line
    usual = ["translate", tmp_path, "--source", tmp_path / "source", "--max-length", 6, "--backend", "numpy"]
    alone, *together = (run(*usual, "--batch", size) for size in (1, 3, 80))
    assert len(alone.splitlines()) == 20
    assert together == [alone, alone]
    best, same_best, normalised, spelt = (
        run(*usual, "--n-best", *options)
        for options in ((), ("--beam", 5, "--alpha", 0), ("--alpha", 1), ("--normalization_alpha", 1))
    )
    assert best == same_best != normalised == spelt


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
SOURCE, TARGET, OUTPUT = ("--source", "source"), ("--target", "target"), ("--output", "output")
TRANSLATE, SCORE = ("translate", ".", *SOURCE, *OUTPUT), ("score", ".", *SOURCE, *TARGET, *OUTPUT)
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
    (NOTHING, [("zero", ".", "out", "--to", "torch")], "the model is 'of nematus', expected zero; use rmsnorm port n"),
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
    (NOTHING, [(*CONVERT, "--norm", "rms")], "the model is .rnn with rms., expected rnn with layer"),
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


@pytest.mark.parametrize("kind", ["deep theano", "zero rnn"])
def test_each_line_is_answered_before_the_next_batch_is_read(kind: str) -> None:
    config = CONFIGS[kind].replace(options={"buffer_size": 2, "data_leak_ratio": 0})
    words = Vocabulary({f"w{index}": index for index in range(8)}, unknown=1, end=config.rules.end)
    model, lines, read = RNNSearch(config, random_parameters(config)), ["w3 w4 w5", "w6", "w3", "w5 w7", "w4"], []

    def typed() -> Iterator[str]:
        for text in lines:
            read.append(text)
            yield text

    answers = translate(model, config, typed(), [words], words, batch_size=2, max_length=4)
    translations, seen = zip(*((answer, len(read)) for answer in answers), strict=True)
    assert seen == (2, 2, 4, 4, 5)
    assert [*translations] == list(translate(model, config, lines, [words], words, batch_size=2, max_length=4))


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
    saved(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for letter, names in (("u", ("0.json", "1.json")), ("v", ("named.json",))):
        for name in names:
            Path(name).write_text(json.dumps({f"{letter}{index}": index for index in range(9)}))
    usual = ["translate", tmp_path, "--source", tmp_path / "source", "--max-length", 5, "--beam", 1]
    other = run(*usual, "--dictionary", tmp_path / "0.json", "--dictionary", "named.json")
    assert "v" in other
    assert other.replace("v", "w") == run(*usual)
    (tmp_path / "1.json").unlink()
    assert other.replace("v", "u") == run(*usual), "those of the working folder, where the model has none"


def test_unknown_words_are_counted(tmp_path: Path) -> None:
    """On standard error: of the first line that has some at once, of all lines at the end. Translations stay."""
    saved(tmp_path)
    usual = ["port", "translate", tmp_path, "--backend", "numpy", "--max-length", 5, "--batch", 1, "--source", "-"]
    for text, wanted in (
        ("w3\n", []),
        ("w3\n" + "cat " * 12 + "\n\n", ["12 of 12 words of line 2 are unknown"]),
        ("w3 cat\nw4\ndog cow\n", ["1 of 2 words of line 1 are unknown", "3 of 5 words in 2 of 3 lines are unknown"]),
    ):
        result = rmsnorm(*usual, typed=text.encode(), COLUMNS="1000")
        shown = [row.removeprefix("warning: ").partition(";")[0] for row in result.stderr.splitlines()]
        assert (result.exit_code, shown) == (0, wanted)
        assert len(result.stdout.splitlines()) == len(text.splitlines())
    factors = [Vocabulary({"a": 2}, unknown=1), Vocabulary({"x": 2}, unknown=1)]
    assert count_unknown("a|x b|x a|y", factors) == (2, 3), "a word is unknown if one of its factors is"


def test_the_norm_of_a_model_is_found_by_its_scores(tmp_path: Path) -> None:
    """docs/porting.md shows a model with LayerNorm. One whose files say the norm is not asked, nor a single line."""
    saved(tmp_path, "layer", rnn_dec_depth=1)
    source = tmp_path / "source"
    norms = "norms", tmp_path, "--source", source, "--target", tmp_path / "target", "--backend", "numpy"
    (tmp_path / "target").write_bytes(source.read_bytes())
    assert "LayerNorm: the variables or" in run(*norms)
    reoption(tmp_path, norm=None, layer_normalization_type=None)
    assert "rmsnorm port norms" in run("info", tmp_path, status=2)
    source.write_text("".join(" ".join(f"w{(i * k) % 9}" for k in range(2, 7)) + "\n" for i in range(100)))
    best = run("translate", tmp_path, "--source", source, "--source-norm", "rms", "--backend", "numpy", "--beam", 1)
    (tmp_path / "target").write_text(best)
    assert run(*norms).endswith("the model was trained with it. Add --source-norm rms to the next command.\n")
    for path in (source, tmp_path / "target"):
        path.write_text(path.read_text().splitlines()[0] + "\n")
    assert "of 1 sentences, which may be chance: give more sentences" in run(*norms, status=1)


@pytest.mark.parametrize(
    ("kind", "to"), [*(("layer", to) for to in converting.TARGETS), ("factors", "torch"), ("factors", "theano")]
)
def test_conversions_keep_every_bit(kind: str, to: str, tmp_path: Path) -> None:
    skip_without(to)
    config, parameters = saved(tmp_path, kind)
    out = tmp_path / "out"
    out.mkdir()  # empty
    assert f"{len(parameters)} parameters in {out}" in run("nematus", tmp_path, out, "--to", to)
    loaded = nematus.load(out)
    assert loaded.config == config
    same(loaded.parameters, parameters)
    usual = ["--source", tmp_path / "source", "--max-length", 5]
    assert run("translate", out, *usual) == run("translate", tmp_path / "model.npz", *usual)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    if to == "torch":
        from safetensors.torch import load_file
        from torch_nematus import Model

        model = Model(config, random_parameters(config, "float32", seed=1)).own
        model.load_state_dict(load_file(out / "model.safetensors"))
        same({name: array.detach().numpy() for name, array in model.by_name().items()}, parameters)


@pytest.mark.parametrize(
    ("options", "factor", "status", "message"),
    [
        ({"output_hidden_activation": "relu"}, 1, 1, "other numbers: nothing is written"),
        ({}, 2, 3, "was read back with other values, expected those written"),
    ],
)
def test_other_numbers_are_not_written(
    options: Any, factor: int, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def wrong(path: Any, config: Config, parameters: Any) -> None:
        changed = {name: factor * array for name, array in parameters.items()}
        nematus.save_safetensors(path, config.replace(**options), changed)

    monkeypatch.setitem(converting.TARGETS, "numpy", converting.TARGETS["numpy"]._replace(save=wrong))
    assert message in run("nematus", tmp_path, tmp_path / "out", "--to", "numpy", status=status)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_without_the_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None if name.startswith("torch") else sys)
    options = ["--source", tmp_path / "source", "--max-length", 5]
    assert len(run("translate", tmp_path, *options).splitlines()) == 3
    for command in (["nematus", tmp_path, tmp_path / "out", "--to"], ["translate", tmp_path, *options, "--backend"]):
        shown = run(*command, "torch", status=2)
        assert "torch is not installed, expected for this backend; from a checkout: pip install '.[torch]'" in shown
    assert not (tmp_path / "out").exists()


def test_info(tmp_path: Path) -> None:
    """Of what training leaves in an archive of Theano, of options that do not say the norm, and of a Transformer."""
    config, parameters = saved(tmp_path, "deep", rnn_dec_depth=1, dialect="tensorflow")
    averages = {f"{row.theano}_smooth": parameters[row.name] for row in variables(config)}
    rewrite(tmp_path, uidx=np.int64(7), adam_t=np.ones(1), **averages)
    reoption(tmp_path, exponential_smoothing=1e-4)
    (tmp_path / "1.json").unlink()
    spare = sorted(row.theano for row in variables(config.replace(dialect="theano")) if row.theano in unused(config))
    count = sum(math.prod(row.shape) for row in variables(config))
    shown = run("info", tmp_path)
    for words in (
        "Nematus master, under the names of Theano",
        "RMSNorm, without offsets",
        "source 9, target 8",
        f"{tmp_path}/0.json: 9 words",
        f"{tmp_path}/1.json is missing, expected a dictionary",
        f"{count:,} in {len(parameters)} tensors, float32, averages of exponential smoothing",
        "adam_t, uidx: of the trainer",
        "decoder_c_tt: it is added to every score of attention, and has no effect",
        f"Wemb, Wemb_dec and {len(averages) - 2} more: the averages are taken",
        f"{spare[0]}, {spare[1]} and {len(spare) - 2} more: biases of encoder transitions, which Nematus keeps but nev",
    ):
        assert words in shown
    saved(tmp_path, "layer")
    reoption(tmp_path, layer_normalization_type=None, norm=None, dialect=None)
    assert "in the commands --source-norm" in run("info", tmp_path, status=2)
    assert "pRMSNorm, with offsets" in run("info", tmp_path, "--source-norm", "prms")
    save(tmp_path / "other", "transformer tied decoder", "numpy")
    assert ": Transformer" in run("info", tmp_path / "other")


@pytest.mark.filterwarnings("ignore:save_theano. Theano Nematus will compute other numbers:UserWarning")  # of deep v0.4
@pytest.mark.parametrize(
    ("kind", "to"), [("layer", "torch"), ("deep v0.4", "theano"), ("transformer tied decoder", "tf")]
)
def test_a_proof_holds_until_the_model_is_another_one(kind: str, to: str, tmp_path: Path) -> None:
    skip_without(to)
    save(tmp_path / "model", kind, "numpy")
    shown = run("nematus", tmp_path / "model", tmp_path / "out", "--to", to)
    assert ("it adds the biases of decoder/high elsewhere" in shown) == (to == "theano")
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    for backend in ("numpy", *(["torch"] if not frameworks.FRAMEWORKS["torch"].missing else [])):
        assert f"held in {backend}: the same" in run("verify", moved, "--backend", backend)
    path, verify = moved / "proof.json", ("verify", moved, "--backend", "numpy")
    written, proof = path.read_text(), json.loads(path.read_text())
    for text, status, words in (
        (json.dumps({**proof, "scores": [proof["scores"][0] + 1e-6, proof["scores"][1]]}), 1, "max error 1e-06"),
        (json.dumps({**proof, "output": [*proof["output"][::-1], 1]}), 1, "not held in numpy: other words"),
        *((text, 2, "proof.json is something else, expected the proof") for text in ("[]", "{}", '{"source": 3}')),
    ):
        path.write_text(text)
        assert words in run(*verify, status=status)
    path.write_text(written)
    model, target = nematus.load(moved), converting.TARGETS[to]
    tuned = {name: array * np.float32(1.001) for name, array in model.parameters.items()}
    target.save(moved / target.file, model.config, tuned)
    assert "not held in numpy" in run(*verify, status=1)
    path.unlink()
    assert "proof.json is missing, expected the proof that rmsnorm port writes" in run(*verify, status=2)
