"""The experiments reader and retrieval: trained for some steps, continued, and on files like those of the real data."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.experiment import get
from experiments.reader import cloze
from experiments.retrieval import captions
from experiments.retrieval.ranks import measures, ranks
from experiments.weights import initial

SMALL: dict[str, dict[str, Any]] = {
    "reader": {"batch_size": 8, "width": 8, "questions": 20, "tested": 6, "keep": 0.5},
    "retrieval": {"batch_size": 8, "width": 8, "embedding": 4, "images": 20, "tested": 6, "features": 5},
}
FRAMEWORKS = {"reader": "torch", "retrieval": "flax"}


@pytest.fixture(params=list(SMALL))
def experiment(request: pytest.FixtureRequest) -> Iterator[Any]:
    framework = pytest.importorskip(FRAMEWORKS[request.param])
    threads = framework.get_num_threads() if request.param == "reader" else 0
    yield get(request.param)
    if threads:
        framework.set_num_threads(threads)


@pytest.mark.slow
def test_training_continues_from_its_state_as_if_it_had_not_ended(experiment: Any) -> None:
    task = experiment.open(experiment.options(**SMALL[experiment.name]), None)
    norms = experiment.norms if experiment.name == "reader" else ("prms",)  # XLA compiles each for seconds
    for norm in norms:
        trainer, again = task.trainer(norm, 1), task.trainer(norm, 1)
        losses = [trainer.step(number) for number in range(3)]
        assert np.isfinite(losses).all()
        state = {name: value.copy() for name, value in trainer.state().items()}
        again.restore(state)
        trainer.evaluate()
        wanted = [trainer.step(3), trainer.step(4)]  # over the end of an epoch of two batches
        assert [again.step(3), again.step(4)] == wanted
        assert task.trainer(norm, 2).step(0) != losses[0]
        quality = again.evaluate()
        assert 0 <= quality[experiment.quality] <= 100


def question(folder: Path, name: str, *, text: str | None = None) -> Path:
    path = folder / "questions" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = ["http://a.b/c", "( @entity0 ) saw a dog , said @entity12", "@placeholder saw a dog", "@entity0"]
    entities = "@entity0:Ann\n@entity12:Bob"
    path.write_text("\n\n".join([*parts, entities]) if text is None else text)
    return path


def test_questions_of_the_release(tmp_path: Path) -> None:
    for name in ("training/a.question", "training/b.question", "validation/c.question"):
        question(tmp_path, name)
    read = cloze.read(tmp_path, 0, 0, longest=5, vocabulary=6)
    assert (len(read.train), len(read.test), read.words) == (2, 1, 6)
    first = read.train[0]
    assert len(first.document) == 5  # the rest is not read
    markers = dict(zip(("@entity0", "@entity12"), read.entities.tolist(), strict=False))
    assert first.answer == first.document[1] == markers["@entity0"]
    assert 1 in first.query  # a word that is not among the most frequent
    assert len(cloze.read(tmp_path, 1, 0, longest=99, vocabulary=99).train) == 1
    desc, desc_mask, _, q_mask, answers = cloze.batch([first, first._replace(document=first.document[:2])])
    assert desc_mask.sum(0).tolist() == [5, 2]
    assert not desc[2:, 1].any()
    assert (q_mask.shape, answers.tolist()) == ((4, 2), [first.answer] * 2)
    for text in ("", "url\n\ndocument", "url\n\ndocument\n\nquery\n\nBob", "url\n\n \n\nquery\n\n@entity1"):
        path = question(tmp_path, "training/b.question", text=text)
        with pytest.raises(
            ValueError, match=r"b.question is damaged \(parts are missing\), expected a question of CNN"
        ):
            cloze.read(tmp_path, 0, 0, longest=99, vocabulary=99)
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match=r"b.question is not UTF-8"):
        cloze.read(tmp_path, 0, 0, longest=99, vocabulary=99)
    with pytest.raises(FileNotFoundError, match=r"has no \*.question, expected the release"):
        cloze.read(tmp_path / "elsewhere", 0, 0, longest=99, vocabulary=99)


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Features where the authors' program keeps them, and captions; two images in each part."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("a dog runs\n" * 9 + f"a {name} cat\n")
    (tmp_path / "images" / "10crop").mkdir(parents=True)
    np.save(tmp_path / "images" / "10crop" / "train.npy", np.ones((2, 3), "f4"))
    np.save(tmp_path / "test.npy", np.ones((2, 3), "f4"))
    return tmp_path


def test_features_and_captions(coco: Path) -> None:
    read = captions.read(coco)
    assert read.words == 2 + len({"a", "dog", "runs", "train", "cat"})
    assert (read.train.images.shape, len(read.train.captions)) == ((2, 3), 10)
    unknown = read.test.captions[9][1]
    assert unknown == captions.UNKNOWN
    ids, mask = captions.batch(read.train.captions)
    assert (ids.shape, mask.sum(0).tolist()) == ((8, 10), [4.0] * 10)  # three words and the end


DAMAGE: dict[str, tuple[str, Any, str]] = {
    "objects": ("test.npy", np.array([[{}, 1.0]]), "test.npy is damaged .*expected features of images"),
    "NaN": ("test.npy", np.full((2, 3), np.nan), "test.npy is damaged .it holds NaN"),
    "zeros": ("test.npy", np.eye(2, 3)[[0, 0]] * [[1], [0]], "all features of an image are 0"),
    "a row": ("test.npy", np.ones(6), "an array float64.6"),
    "another network": ("test.npy", np.ones((2, 4)), "features of the test images is 4, expected 3 as for training"),
    "more images": ("test.npy", np.ones((3, 3)), "lines of .*test.txt is 10, expected 15, five for every image"),
    "a file that is cut": ("test.npy", b"\x93NUMPY\x01\x00", "test.npy is damaged"),
    "a file that is missing": ("test.npy", None, "test.npy is missing, expected features"),
    "no captions": ("train.txt", None, "train.txt is missing, expected captions"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_features_and_captions_that_do_not_fit(coco: Path, case: str) -> None:
    name, content, message = DAMAGE[case]
    (coco / name).unlink()
    if isinstance(content, bytes):
        (coco / name).write_bytes(content)
    elif content is not None:
        np.save(coco / name, content, allow_pickle=True)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        captions.read(coco)


def test_batches_larger_than_the_data(experiment: Any) -> None:
    with pytest.raises(ValueError, match="batch_size is 99, expected at most 20"):
        experiment.open(experiment.options(**{**SMALL[experiment.name], "batch_size": 99}), None)


def test_options_of_the_reader() -> None:
    pytest.importorskip("torch")
    reader = get("reader")
    with pytest.raises(ValueError, match=r"keep is 2\.0, expected a probability"):
        reader.options(keep=2.0)
    with pytest.raises(ValueError, match="tested is 0, expected 1 or more"):
        reader.open(reader.options(questions=99, tested=0), None)


def test_ranks_as_the_authors_count_them() -> None:
    errors = np.random.default_rng(0).standard_normal((30, 6))
    image_of, caption_of = ranks(errors)
    for caption, row in enumerate(errors):
        assert image_of[caption] == np.where(np.argsort(row) == caption // 5)[0][0]
    for image, column in enumerate(errors.T):
        assert caption_of[image] == np.where(np.argsort(column) // 5 == image)[0][0]
    assert measures(np.array([0, 0, 5, 9]))["R@5"] == 50


def test_initial_weights() -> None:
    """The same matrices for every norm."""
    shapes = {"cell_W": (3, 8), "cell_U": (2, 8), "cell_b": (8,), "att_proj": (4,)}
    bare, normed = initial(shapes, 1), initial({"cell_s1": (8,), **shapes}, 1)
    assert all(np.array_equal(bare[name], normed[name]) for name in shapes)
    assert normed["cell_s1"].tolist() == [1.0] * 8
    assert bare["att_proj"].any()
    assert not bare["cell_b"].any()


@pytest.mark.parametrize(
    "name", ["pickles", "archives", "weights", "reader.config", "retrieval.config", "retrieval.ranks"]
)
def test_examples(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"experiments.{name}"))
    assert attempted
    assert not failed
