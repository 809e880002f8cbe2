"""Translation by RNNSearch and the Transformer: the texts, their dictionaries, runs of seconds in three frameworks."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")

from test_experiments import Silent

from experiments.experiment import get
from experiments.run import run
from experiments.translation import task, texts
from rmsnorm.nematus.names import variables

SMALL = {"steps": 2, "every": 1, "batch_size": 3, "state": 8, "sentences": 20, "tested": 2}


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch):
    monkeypatch.setattr("experiments.figures.draw", lambda *_: None)


def train(name, folder, norms=("rms",), data=None, **options):
    experiment = get(name)
    return run(experiment, experiment.options(**{**SMALL, **options}), norms, [1], data, folder, Silent())


def test_the_generated_language_can_be_translated_back():
    made = texts.generated(500)
    assert len(set(made.source) | set(made.test_source)) == 700, "no sentence of the test is one of training"
    assert len(set(made.target) | set(made.test_target)) == 700, "two sentences have no translation in common"
    source, target = made.vocabularies
    assert [source.ids[word] for word in texts.SPECIAL] == [0, 1, 2]
    assert {word for line in made.test_source for word in line.split()} <= source.ids.keys()
    assert {word for line in made.test_target for word in line.split()} <= target.ids.keys()
    assert 100 > len(target.ids) > len(source.ids) > 30


@pytest.fixture
def folder(tmp_path):
    made = texts.generated(20)
    for name, lines in zip(texts.FILES, made[:4], strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines[:20]))
    return tmp_path


def test_dictionaries_are_made_beside_the_texts_as_nematus_makes_them(folder):
    first = texts.read(folder, 10)
    entries = json.loads((folder / "train.src.json").read_text())
    assert list(entries.items())[:3] == [("<EOS>", 0), ("<GO>", 1), ("<UNK>", 2)]
    assert sorted(entries.values()) == list(range(10))
    counts = [sum(line.split().count(word) for line in first.source) for word in list(entries)[3:]]
    assert counts == sorted(counts, reverse=True)
    assert texts.read(folder, 99).vocabularies == first.vocabularies, "those that are there are read"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.src", None, "train.src is missing, expected sentences, one a line"),
        ("test.trg", "one\n", r"lines in .*test.trg is 1, expected 20 as its source has, and at least one; align"),
        ("train.src", "", "lines in .*train.trg is 20, expected 0 as its source has, and at least one"),
        ("train.trg", b"\xff\xfe", "train.trg is not UTF-8"),
        (
            "train.src.json",
            '{"<EOS>": 0, "x": 1}',
            r"knows is '0% of the words of train.src', expected at least 50%, or",
        ),
        ("train.src.json", '{"<EOS>": 0, "x": 2}', "has no word for 1"),
        ("train.trg.json", '{"<EOS>": 0', "train.trg.json is not JSON"),
        ("train.trg.json", '["a"]', "is no dictionary of Nematus"),
        ("train.trg.json", "{}", "knows is '0% of the words of train.trg', expected"),
    ],
)
def test_texts_that_do_not_fit(folder, name, text, message):
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        texts.read(folder, 100)


def test_parameters_begin_the_same_with_every_norm_and_around_the_center():
    options = get("translation").options(**SMALL)
    configs = [task._config(options, (9, 8)).replace(norm=norm) for norm in ("none", "layer", "prms")]
    none, layer, prms = (task.begin(config, 1, 0.2) for config in configs)
    shared = none.keys() & layer.keys()
    assert shared == none.keys()
    for name in shared:
        np.testing.assert_array_equal(none[name], layer[name], name)
    plain = task.begin(configs[2], 1, 0.0)
    square = "encoder/forward-stack/level0/gru0/state_to_gates"
    np.testing.assert_allclose(plain[square][:, :8] @ plain[square][:, :8].T, np.eye(8), atol=1e-6)
    for row in variables(configs[2]):
        difference = prms[row.name] - plain[row.name]
        np.testing.assert_allclose(difference, 0.2 if len(row.shape) == 2 else 0.0, atol=1e-6, err_msg=row.name)
        if row.name.endswith("/scale"):
            np.testing.assert_array_equal(prms[row.name], 1)


@pytest.mark.slow
@pytest.mark.torch
def test_runs_in_pytorch(tmp_path, folder):
    pytest.importorskip("torch")
    result = train("translation", tmp_path / "rnn", ("none", "layer", "rms", "prms"), folder, framework="torch")
    assert result["facts"]["sentences"] == 20
    sizes = {norm: row["parameters"] for norm, row in result["norms"].items()}
    assert sizes["none"] < sizes["rms"] == sizes["prms"] < sizes["layer"]
    for place in ("pre", "post"):
        norms = ("none", "layer", "rms", "prms")
        result = train("transformer", tmp_path / place, norms, None, place=place, inner=8, depth=1)
        sizes = {norm: row["parameters"] for norm, row in result["norms"].items()}
        count = 5 + 2 * (place == "pre")  # norms of 8 features: of the blocks, and at the ends of the stacks
        assert [sizes[norm] - sizes["none"] for norm in norms] == [0, 16 * count, 8 * count, 8 * count]
        losses = [row["loss"] for row in result["norms"].values()]
        assert np.isfinite(losses).all()
        assert max(losses[:3]) < 12, "of pRMSNorm one element of 8 is the statistic, which may be next to 0"


def experiment_trainer(framework, seed):
    experiment = get("translation")
    options = experiment.options(**SMALL, framework=framework, clip=0.5, longest=7)
    return experiment.open(options, None).trainer("rms", seed)


@pytest.mark.parametrize(
    "framework", [pytest.param("keras", marks=pytest.mark.tf), pytest.param("flax", marks=pytest.mark.flax)]
)
@pytest.mark.slow
def test_other_frameworks_train_as_pytorch_does(framework, request):
    pytest.importorskip({"keras": "tensorflow"}.get(framework, framework))
    pytest.importorskip("torch")
    if framework == "keras":  # a graph takes ten seconds to make
        import tensorflow as tf

        tf.config.run_functions_eagerly(True)
        request.addfinalizer(lambda: tf.config.run_functions_eagerly(False))
    made = {}
    for name in (framework, "torch"):
        trainer = experiment_trainer(name, 1)
        made[name] = trainer, [trainer.step(number) for number in range(1 if framework == "keras" else 2)]
    (trainer, losses), (_, wanted) = made[framework], made["torch"]
    # float32 and sums in another order; Adam divides by the size of gradients, which may be near 0
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    kept, other = trainer.state(), experiment_trainer(framework, 2)
    assert kept.keys() == other.state().keys()
    other.restore(kept)
    for name, array in other.state().items():
        np.testing.assert_array_equal(array, kept[name])
