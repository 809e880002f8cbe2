"""The attentive reader and the order embeddings: against the authors' programs, against the golden, and their files."""

from __future__ import annotations

import json
import pickle
import warnings
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from authors_models import DATA, Reader, Retrieval, random_batch, random_parameters, recorded

from experiments.pickles import read_pickle

# Two computations of one thing in another order, of numbers below 10, with some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
KINDS = pytest.mark.parametrize("kind", [Reader, Retrieval], ids=lambda kind: kind.name)


def check(results: dict[str, Any], wanted: dict[str, Any], dtype: str) -> None:
    for name, result in results.items():
        assert np.dtype(result.dtype) == dtype, name
        assert np.shape(result) == np.shape(wanted[name]), name
        atol = EXACT[dtype] * max(1.0, abs(wanted[name]).max())
        np.testing.assert_allclose(result, wanted[name], rtol=0, atol=atol, err_msg=name)


RUNS = [(kind, model, "float64") for kind in (Reader, Retrieval) for model in ("golden", "own")]


@pytest.mark.parametrize(("kind", "model", "dtype"), [*RUNS, (Reader, "own", "float32")])
def test_what_the_authors_programs_computed(kind: Any, model: str, dtype: str) -> None:
    run = recorded(kind)
    parameters = {name: value.astype(dtype) for name, value in run.parameters.items()}
    gradients = {}
    if model == "golden":
        outputs = kind.golden(run.config, parameters, run.batch)
    else:
        with kind.wide():
            outputs, gradients = kind.own(run.config, parameters, run.batch)
        assert gradients.keys() == run.parameters.keys()
    if kind is Retrieval:  # their program compares embeddings in float32, also where it runs in float64
        check({"errors": outputs.pop("errors").astype("f4")}, run.results, "float32")
    check(outputs, run.results, dtype)
    check(gradients, {name.removeprefix("grad_"): value for name, value in run.results.items()}, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(Reader, "reader_elu"), (Reader, "reader_sentences"), (Retrieval, "retrieval_cosine")]
)
def test_what_the_authors_programs_computed_with_other_options(kind: Any, name: str) -> None:
    run = recorded(kind, name)
    parameters = {name: value.astype("f8") for name, value in run.parameters.items()}
    with kind.wide():
        both = kind.golden(run.config, parameters, run.batch), *kind.own(run.config, parameters, run.batch)
    gradients = both[2]
    for outputs in both[:2]:
        recorded_outputs = outputs.keys() & run.results.keys()
        assert len(recorded_outputs) >= 3
        check({name: outputs[name] for name in recorded_outputs}, run.results, "float64")
    assert gradients.keys() == run.parameters.keys()
    check(gradients, {name.removeprefix("grad_"): value for name, value in run.results.items()}, "float64")


def test_the_errors_of_answers() -> None:
    """Of all words, and of those that the entities of the document allow."""
    run = recorded(Reader)
    probs = Reader.golden(run.config, run.parameters, run.batch)["probs"]
    answers, entities = run.results["ans"], run.results["entity_mask"]
    assert (probs.argmax(1) != answers).mean() == run.results["errors"]
    assert ((probs * entities).argmax(1) != answers).mean() == run.results["error_entity_desc"]


READERS: list[dict[str, Any]] = [
    {"encoder_desc_word": "lnlstm", "encoder_q": "lstm", "use_dq_sims": 1, "use_desc_skip_c_g": 1, "use_bidir": 1},
    {"encoder_desc_word": "lstm", "encoder_q": "prlnlstm", "learn_h0": 1, "use_elu_g": 1, "use_desc_skip_c_g": 1},
    {"encoder_q": "rlnlstm", "encoder_desc_sent": "lnlstm", "use_sent_reps": 1, "use_bidir": 1, "learn_h0": 1},
    {"encoder_desc_sent": "prlnlstm", "use_sent_reps": 1, "use_dropout": False, "use_elu_g": 1, "use_dq_sims": 1},
]
RETRIEVALS: list[dict[str, Any]] = [
    {"encoder": "lngru", "abs": 0},
    {"encoder": "prlngru", "method": "cosine", "margin": 0.2, "abs": 0},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"), [*((Reader, case) for case in READERS), *((Retrieval, case) for case in RETRIEVALS)]
)
def test_other_options_are_the_goldens(kind: Any, options: dict[str, Any]) -> None:
    sizes = {"n_words_q": 9, "n_words_ans": 7, "dim": 5, "dim_word_desc": 6, "dim_word_ans": 4, "dropout_rate": 0.3}
    if kind is Retrieval:
        sizes = {"n_words": 9, "dim": 6, "dim_word": 4, "dim_image": 5}
    config = kind.config.Config(**sizes, **options)
    parameters, batch = random_parameters(config), random_batch(config)
    wanted = kind.golden(config, parameters, batch)
    with kind.wide():
        outputs, gradients = kind.own(config, parameters, batch)
    check(outputs, wanted, "float64")
    assert gradients.keys() == parameters.keys()
    # Differences of the golden's cost: a step of 1e-6 errs by its square, and by some roundings over the step.
    rng, step = np.random.default_rng(7), 1e-6
    for name, value in parameters.items():
        direction = rng.standard_normal(value.shape)
        moved = ({**parameters, name: value + sign * step * direction} for sign in (1, -1))
        above, below = (kind.golden(config, one, batch)[kind.cost] for one in moved)
        slope = (above - below) / (2 * step)
        assert abs(slope - (gradients[name] * direction).sum()) <= 1e-7 * (1 + abs(slope)), name


def test_dropout_keeps_with_the_probability_that_evaluation_multiplies_by() -> None:
    torch = pytest.importorskip("torch")
    from experiments.reader.model import AttentiveReader

    run = recorded(Reader)
    for rate in (0.0, 1.0):
        config = replace(run.config, use_dropout=True, dropout_rate=rate)
        model = AttentiveReader(config, run.parameters)
        assert torch.equal(model(*run.batch[:4]).logits, model.train()(*run.batch[:4]).logits)
    config = replace(run.config, use_dropout=True)
    words = torch.ones(20_000)
    dropped = AttentiveReader(config, run.parameters).train()._drop(words)
    assert set(dropped.tolist()) == {0.0, 1.0}
    assert abs(dropped.mean() - 0.5) < 0.02  # more than five standard deviations


@KINDS
def test_archives_are_written_back(tmp_path: Path, kind: Any) -> None:
    """The same arrays, bit for bit, and the same options; arrays of their trainer are left out."""
    source, path = DATA / f"{kind.name}.npz", tmp_path / "model.npz"
    config, parameters = kind.config.load(source)
    with np.load(source) as archive:
        assert sorted(archive) == sorted(parameters)
        np.savez(tmp_path / "trained.npz", history_errs=np.array([0.5, None]), **archive)
    assert all(
        np.array_equal(parameters[name], value)
        for name, value in kind.config.load(tmp_path / "trained.npz", DATA / f"{kind.name}.json")[1].items()
    )
    kind.config.save(path, config, parameters)
    with np.load(source) as before, np.load(path) as after:
        assert before.files == after.files
        assert all(
            (before[name].dtype, before[name].tobytes()) == (after[name].dtype, after[name].tobytes())
            for name in before
        )
    options = json.loads((DATA / f"{kind.name}.json").read_text())
    assert options.items() <= json.loads((tmp_path / "model.npz.json").read_text()).items()
    assert kind.config.load(path)[0].options() == config.options()
    with pytest.raises(ValueError, match=r"save: the model lacks .*, expected"):
        kind.config.save(path, config, {})


@KINDS
def test_models_that_are_called_lngru(tmp_path: Path, kind: Any) -> None:
    """The released order.npz, with its options in a pickle: gains without offsets are RMSNorm's, whatever they say."""
    config, parameters = kind.config.load(DATA / f"{kind.name}.npz")
    options = config.options()
    options = {
        name: value[1:] if isinstance(value, str) and value[:3] == "rln" else value for name, value in options.items()
    }
    assert options != config.options()
    arrays = parameters
    if kind is Retrieval:
        arrays = {name.replace("encoder_", "lngru_"): value for name, value in parameters.items()}
        options = {"options": options, "worddict": OrderedDict(a=2, b=3)}
    np.savez(tmp_path / "order.npz", **arrays)
    (tmp_path / "order.pkl").write_bytes(pickle.dumps(options, protocol=0, fix_imports=True))
    again, values = kind.config.load(tmp_path / "order.npz")
    assert getattr(again, kind.layer) == getattr(config, kind.layer)
    assert all(np.array_equal(values[name], array) for name, array in arrays.items())
    kind.config.save(tmp_path / "again.npz", again, values)
    assert kind.config.load(tmp_path / "again.npz")[0].options() == again.options()
    if kind is Retrieval:
        assert kind.config.words(tmp_path / "order.npz") == {"a": 2, "b": 3}
        batch = [recorded(kind).results[name] for name in kind.batch]
        check(kind.golden(again, values, batch), kind.golden(config, parameters, batch), "float32")


class Called:
    """A pickle that would run a program."""

    def __reduce__(self) -> Any:
        return print, ("it ran",)


PICKLES = {
    "a program": (pickle.dumps({"dim": Called()}, protocol=2), "names __builtin__.print, which is not loaded"),
    "a name put together": (pickle.dumps({"dim": Called()}, protocol=4), "operation b.*protocol 2"),
    "a memo of 2^31 entries": (b"\x80\x02}r\xff\xff\xff\x7f]a.", "is damaged"),
    "bytes that are not there": (b"\x80\x02B\xff\xff\xff\x7f.", "is damaged"),
    "its half": (pickle.dumps({"dim": 3}, protocol=2)[:-3], "is damaged"),
    "a list": (pickle.dumps([3], protocol=2), "is no object"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_pickles_that_are_no_options(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = PICKLES[case]
    path = tmp_path / "options.pkl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Retrieval.config.load(DATA / "retrieval.npz", path)
    assert not capsys.readouterr().out


def test_pickles_of_python_2(tmp_path: Path) -> None:
    """As it wrote them: an OrderedDict of texts in bytes."""
    path = tmp_path / "words.pkl"
    path.write_bytes(b"ccollections\nOrderedDict\np0\n((lp1\n(lp2\nS'caf\\xc3\\xa9'\np3\naI2\naatp4\nRp5\n.")
    assert read_pickle("load", path, "words", {"collections.OrderedDict": OrderedDict}) == {"café": 2}


DAMAGE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an array of objects": ({"ff_logit_b": np.array([{}, 1])}, {}, "ff_logit_b .* array of Python objects"),
    "no array": ({"ff_logit_b": None}, {}, "lacks ff_logit_b, expected"),
    "another array": ({"ff_more": np.ones(2, "f4")}, {}, "holds ff_more"),
    "NaN": ({"ff_logit_b": np.full(33, np.nan, "f4")}, {}, "ff_logit_b .* 33 NaN"),
    "another layer": ({}, {"encoder_q": "lstm"}, "holds encoder_q_r_s1"),
    "no such layer": ({}, {"encoder_q": "gru"}, "encoder_q is 'gru', expected 'lstm'"),
    "a size": ({}, {"dim": 10**12}, r"has shape .*, expected .*000000000000"),
    "a text": ({}, {"dim": "8"}, "dim is '8' .*expected an integer"),
    "a number": ({}, {"dropout_rate": float("nan")}, "dropout_rate is nan"),
    "a switch": ({}, {"use_bidir": "perhaps"}, "use_bidir is 'perhaps'"),
    "two sizes of words": ({}, {"dim_word_q": 9}, "dim_word_q is 9, expected 8"),
    "no size": ({}, {"dim": None}, "lack dim, expected"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_archives_that_do_not_fit(tmp_path: Path, case: str) -> None:
    arrays, options, message = DAMAGE[case]
    with np.load(DATA / "reader.npz") as archive:
        changed = {name: value for name, value in {**archive, **arrays}.items() if value is not None}
    np.savez(tmp_path / "reader.npz", **changed)
    written = {**json.loads((DATA / "reader.json").read_text()), **options}
    written = {name: value for name, value in written.items() if value is not None}
    (tmp_path / "reader.json").write_text(json.dumps(written))
    with pytest.raises((ValueError, TypeError), match=message):
        Reader.config.load(tmp_path / "reader.npz")


def test_files_that_are_missing_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "reader.npz"
    with pytest.raises(FileNotFoundError, match=r"reader.load: .*reader.npz is missing, expected an archive"):
        Reader.config.load(path)
    path.write_bytes((DATA / "reader.npz").read_bytes()[:-1000])
    with pytest.raises(FileNotFoundError, match=r"reader.npz.json is missing, expected the options"):
        Reader.config.load(path)
    with pytest.raises(ValueError, match=r"reader.load: .*reader.npz is damaged"):
        Reader.config.load(path, DATA / "reader.json")


BATCHES: dict[str, tuple[Any, int, Any, str]] = {
    "a word beyond": (Reader, 0, np.full((10, 4), 33), "an id of desc is 33, expected 0 to 32"),
    "a negative word": (Reader, 2, np.full((7, 4), -1), "an id of q is -1"),
    "an answer beyond": (Reader, 4, np.full(4, 33), "an id of ans is 33"),
    "another mask": (Reader, 1, np.ones((4, 10)), "desc_mask has shape"),
    "an empty document": (Reader, 1, np.zeros((10, 4)), "a word in every document"),
    "sentences": (Reader, 0, np.ones((2, 10, 4), int), "see use_sent_reps"),
    "another batch": (Reader, 2, np.ones((7, 3), int), "q has shape"),
    "a caption beyond": (Retrieval, 0, np.full((7, 5), 30), "an id of x is 30"),
    "features": (Retrieval, 2, np.ones((5, 9)), "expected the shape"),
    "more images": (Retrieval, 2, np.ones((6, 10)), "images has shape"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_that_do_not_fit(case: str) -> None:
    kind, index, value, message = BATCHES[case]
    run = recorded(kind)
    run.batch[index] = value
    for model in (kind.golden, kind.own):
        with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
            model(run.config, run.parameters, run.batch)
