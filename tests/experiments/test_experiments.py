"""Every experiment runs for two steps, small, is ended, goes on, and writes its results. The page of all results."""

from __future__ import annotations

import csv
import doctest
import gzip
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")
pytest.importorskip("sklearn")

from experiments import cli
from experiments.cifar.data import cifar
from experiments.experiment import NAMES, get
from experiments.images import mnist
from experiments.norms import KINDS
from experiments.reader import cloze
from experiments.report import page
from experiments.retrieval import captions
from experiments.runs import RUNS, missing
from experiments.timing import PARTS
from experiments.translation import texts

ROOT = Path(__file__).parents[2]
TEXTS = "--sentences 20 --tested 2 --batch-size 3 --state 8"
SMALL = {
    "mlp": "--width 8",
    "translation": f"{TEXTS} --embedding 4 --norm rms",
    "transformer": f"{TEXTS} --inner 8 --depth 1",
    "reader": "--width 8 --questions 20 --tested 6 --batch-size 8",
    "retrieval": "--width 8 --embedding 4 --images 20 --tested 6 --batch-size 8 --features 5 --norm rms",
    "cifar": "--width 2 --images 20 --batch-size 4",
}
TORCH, FLAX = pytest.mark.torch, pytest.mark.flax
FRAMEWORKS = {name: "flax" if name == "retrieval" else "torch" for name in SMALL}
CASES = [pytest.param(name, own, marks=getattr(pytest.mark, own)) for name, own in FRAMEWORKS.items()]
CASES += [pytest.param("translation", "flax", marks=[FLAX, pytest.mark.slow])]  # which is compiled for a minute


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """The command sets the number of threads."""
    with patch.dict(os.environ):
        yield


def start(name: str, options: str, folder: Path) -> int | None:
    """The status of the command, if it was ended."""
    return cli.app([name, *SMALL[name].split(), *options.split(), "--out", str(folder)], standalone_mode=False)


def end_early(name: str, options: str, folder: Path) -> None:
    """Ctrl-C after the first evaluation."""
    with patch.object(cli._Bar, "evaluated", side_effect=KeyboardInterrupt):
        assert start(name, options, folder) == 130


def rows_of(folder: Path) -> list[dict[str, Any]]:
    with (folder / "metrics.csv").open() as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


def test_every_experiment_has_a_case() -> None:
    assert set(SMALL) == set(NAMES)
    assert [get(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize(("name", "framework"), CASES)
def test_an_experiment(name: str, framework: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    options = "--steps 2 --every 1" + (f" --framework {framework}" if name == "translation" else "")
    end_early(name, options, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]
    start(name, options, tmp_path)
    files = {"checkpoint.npz", "metrics.csv", "summary.json", "loss-steps.svg", "loss-seconds.svg", "quality.svg"}
    assert {path.name for path in tmp_path.iterdir()} == files
    result = json.loads((tmp_path / "summary.json").read_text())
    norms = ["rms"] if "--norm rms" in SMALL[name] else list(get(name).norms)
    assert list(result["norms"]) == norms
    rows = rows_of(tmp_path)
    assert {(row["norm"], row["step"]) for row in rows} == {(norm, step) for norm in norms for step in "12"}
    assert np.isfinite([[float(row["loss"]), float(row[result["quality"]])] for row in rows]).all()
    with pytest.raises(ValueError, match="expected a new folder, as its run has other options"):
        start(name, f"{options} --steps 3", tmp_path)


@TORCH
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    end_early("cifar", "--steps 3 --every 2", tmp_path / "ended")
    for name in ("ended", "whole"):
        start("cifar", "--steps 3 --every 2", tmp_path / name)
    assert rows_of(tmp_path / "ended") == rows_of(tmp_path / "whole")


@TORCH
def test_times(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    start("mlp", "--norm none,layer,rms,prms --times 1", tmp_path)
    seconds = json.loads((tmp_path / "times.json").read_text())["seconds"]
    assert {kind: list(norms) for kind, norms in seconds.items()} == {
        kind: ["none", "layer", "rms", "prms"][: 3 if kind == "framework" else 4] for kind in KINDS
    }
    every = [own for norms in seconds.values() for own in norms.values()]
    assert all(list(own) == list(PARTS) and own["step"] > 0 for own in every)


def test_the_committed_page_is_what_the_program_writes(tmp_path: Path) -> None:
    """Without a line by hand, which the next report would lose."""
    folder = ROOT / "experiments" / "results"
    assert missing(folder) == []
    copy = tmp_path / "results"
    shutil.copytree(folder, copy)  # where the figure may be drawn again
    assert (folder.parent / "RESULTS.md").read_text() == page(copy, tmp_path)
    for planned in RUNS:
        own, statement = planned.of, json.loads((folder / planned.name / "summary.json").read_text())["statement"]
        assert statement == {"level": own.level, "margin": own.margin}, "which was there before the run"
    (copy / "reader" / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is damaged \('norms'\), expected what python -m experiments all writes"):
        page(copy, tmp_path)


def test_the_folders_of_real_data(tmp_path: Path) -> None:
    def idx(array: Any) -> bytes:
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()

    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (6, 2, 2), dtype=np.uint8)
    for name in ("train", "t10k"):
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(6, dtype=np.uint8)))
    np.testing.assert_array_equal(mnist(tmp_path).train, images.reshape(6, 4).astype("f4") / np.float32(255))

    records = np.concatenate([[[3], [9]], draw.integers(0, 256, (2, 3072))], axis=1).astype(np.uint8)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            entry.size = records.nbytes
            archive.addfile(entry, io.BytesIO(records.tobytes()))
    read = cifar(tmp_path)
    assert read.train_classes.tolist() == [3, 9] * 5
    np.testing.assert_array_equal(read.test * np.float32(255), records[:, 1:].reshape(2, 3, 32, 32))

    made = texts.generated(20)
    for name, lines in zip(texts.FILES, made[:4], strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    assert list(texts.read(tmp_path, 10).source) == list(made.source)
    assert len(json.loads((tmp_path / "train.trg.json").read_text())) == 10

    for part in ("training", "validation"):
        path = tmp_path / "questions" / part / "a.question"
        path.parent.mkdir(parents=True)
        parts = ["http://a.b/c", "( @entity0 ) saw a dog", "@placeholder saw a dog", "@entity0", "@entity0:Ann"]
        path.write_text("\n\n".join(parts))
    questions = cloze.read(tmp_path, 0, 0, longest=5, vocabulary=6)
    assert (len(questions.train), len(questions.test), questions.words) == (1, 1, 6)
    assert questions.train[0].answer == questions.train[0].document[1]

    for name in ("train", "test"):
        (tmp_path / f"{name}.txt").write_text("a dog runs\n" * 9 + f"a {name} cat\n")
        np.save(tmp_path / f"{name}.npy", np.ones((2, 3), "f4"))
    pairs = captions.read(tmp_path)
    assert (pairs.train.images.shape, len(pairs.train.captions), pairs.words) == ((2, 3), 10, 7)


MODULES = "experiment verdict weights retrieval.ranks"


@pytest.mark.parametrize("name", MODULES.split())
def test_examples(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"experiments.{name}"))
    assert attempted > failed == 0
