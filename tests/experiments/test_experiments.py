"""Every experiment runs for two steps, small, is ended, goes on, and writes its results. The page of all results."""

from __future__ import annotations

import csv
import doctest
import io
import json
import os
import shutil
import tarfile
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sacrebleu")
pytest.importorskip("sklearn")

from experiments import cli
from experiments.cifar.data import cifar
from experiments.experiment import NAMES, get
from experiments.norms import KINDS
from experiments.report import page
from experiments.runs import RUNS, missing
from experiments.timing import PARTS

ROOT = Path(__file__).parents[2]
TEXTS = "--sentences 20 --tested 2 --batch-size 3 --state 8"
SMALL = {
    "mlp": "--width 8",
    "translation": f"{TEXTS} --embedding 4 --norm rms --framework torch",
    "transformer": f"{TEXTS} --inner 8 --depth 1",
    "reader": "--width 8 --questions 20 --tested 6 --batch-size 8",
    "retrieval": "--width 8 --embedding 4 --images 20 --tested 6 --batch-size 8 --features 5 --norm rms",
    "cifar": "--width 2 --images 20 --batch-size 4",
}
FRAMEWORKS = {name: "flax" if name == "retrieval" else "torch" for name in NAMES}
CASES = [pytest.param(name, own, marks=getattr(pytest.mark, own), id=name) for name, own in FRAMEWORKS.items()]


@pytest.fixture(autouse=True)
def _environment():
    """The command sets the number of threads."""
    with patch.dict(os.environ):
        yield


def start(name, options, folder):
    """The status of the command, if it was ended."""
    return cli.app([name, *SMALL[name].split(), *options.split(), "--out", str(folder)], standalone_mode=False)


def end_early(name, options, folder):
    """Ctrl-C after the first evaluation."""
    with patch.object(cli._Bar, "evaluated", side_effect=KeyboardInterrupt):
        assert start(name, options, folder) == 130


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return [{**row, "seconds": None} for row in csv.DictReader(file)]


@pytest.mark.parametrize(("name", "framework"), CASES)
def test_an_experiment(name, framework, tmp_path):
    pytest.importorskip(framework)
    end_early(name, "--steps 2 --every 1", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]
    start(name, "--steps 2 --every 1", tmp_path)
    files = {"checkpoint.npz", "metrics.csv", "summary.json", "loss-steps.svg", "loss-seconds.svg", "quality.svg"}
    assert {path.name for path in tmp_path.iterdir()} == files
    result = json.loads((tmp_path / "summary.json").read_text())
    norms = ["rms"] if "--norm rms" in SMALL[name] else list(get(name).norms)
    assert list(result["norms"]) == norms
    rows = rows_of(tmp_path)
    assert {(row["norm"], row["step"]) for row in rows} == {(norm, step) for norm in norms for step in "12"}
    assert np.isfinite([[float(row["loss"]), float(row[result["quality"]])] for row in rows]).all()
    with pytest.raises(ValueError, match="expected a new folder, as its run has other options"):
        start(name, "--steps 2 --every 1 --steps 3", tmp_path)


@pytest.mark.torch
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(tmp_path):
    pytest.importorskip("torch")
    end_early("cifar", "--steps 3 --every 2", tmp_path / "ended")
    for name in ("ended", "whole"):
        start("cifar", "--steps 3 --every 2", tmp_path / name)
    assert rows_of(tmp_path / "ended") == rows_of(tmp_path / "whole")


@pytest.mark.torch
def test_times(tmp_path):
    pytest.importorskip("torch")
    start("mlp", "--norm none,layer,rms,prms --times 1", tmp_path)
    seconds = json.loads((tmp_path / "times.json").read_text())["seconds"]
    assert {kind: len(norms) for kind, norms in seconds.items()} == {kind: 4 - (kind == "framework") for kind in KINDS}
    assert all(list(own) == list(PARTS) for norms in seconds.values() for own in norms.values())


def test_the_committed_page_is_what_the_program_writes(tmp_path):
    """Without a line by hand, which the next report would lose."""
    folder = ROOT / "experiments" / "results"
    assert missing(folder) == []
    copy = tmp_path / "results"
    shutil.copytree(folder, copy)  # where the figure may be drawn again
    assert (folder.parent / "RESULTS.md").read_text() == page(copy, tmp_path)
    for planned in RUNS:
        own, statement = planned.of, json.loads((folder / planned.name / "summary.json").read_text())["statement"]
        assert statement == {"level": own.level, "margin": own.margin}, "which was there before the run"


def test_the_folder_of_real_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (2, 3072))
    records = np.concatenate([[[3], [9]], images], axis=1).astype(np.uint8)
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            entry.size = records.nbytes
            archive.addfile(entry, io.BytesIO(records.tobytes()))
    read = cifar(tmp_path)
    assert read.train_classes.tolist() == [3, 9] * 5
    np.testing.assert_array_equal(read.test * np.float32(255), records[:, 1:].reshape(2, 3, 32, 32))


@pytest.mark.parametrize("name", ["experiment", "verdict", "weights", "retrieval.ranks"])
def test_examples(name):
    failed, attempted = doctest.testmod(import_module(f"experiments.{name}"))
    assert attempted > failed == 0
