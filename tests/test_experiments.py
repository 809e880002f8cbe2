"""The runner of the experiments: turns, resume, damage, a full disk, the report; most with a model of one number."""

from __future__ import annotations

import csv
import gzip
import json
import re
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from experiments.cli import main
from experiments.experiment import NAMES, Experiment, Options, get, option
from experiments.images import mnist
from experiments.report import page
from experiments.run import run
from experiments.runs import RUNS, missing
from experiments.timing import PARTS
from experiments.verdict import interval, is_not_worse

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class LineOptions(Options):
    kind: str = option("straight", "Kind of line.", choices=("straight", "bent"))


class Line:
    """Learns one number by steps that draw noise from the seed and the number of the step."""

    parameters = 1
    end, turns = None, []

    def __init__(self, norm, seed):
        self.norm, self.seed, self.value = norm, seed, np.zeros(1)

    def step(self, number):
        if number == Line.end:
            raise KeyboardInterrupt
        Line.turns.append((number, self.norm))
        self.value += np.random.default_rng([self.seed, number]).normal() / (1 + number)
        return float(self.value[0])

    def evaluate(self):
        return {"height": float(self.value[0])}

    def state(self):
        return {"value": self.value}

    def restore(self, state):
        self.value = state["value"].copy()


class Lines:
    facts = {"lines": 1}  # noqa: RUF012

    def trainer(self, norm, seed):
        return Line(norm, seed)


LINE = Experiment("line", "a line", "height", ("none", "layer", "rms"), LineOptions, lambda *_: Lines(), {"rms": -24.7})


class Silent:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def begin(self, total, done):
        pass

    def advance(self):
        pass

    def evaluated(self, text):
        pass


@pytest.fixture(autouse=True)
def _line(monkeypatch):
    Line.end, Line.turns = None, []
    monkeypatch.setattr("experiments.figures.draw", lambda *_: None)  # which takes a second


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.undo()


def train(folder, *, norms=("none", "layer", "rms"), seeds=(1, 2), **options):
    return run(LINE, LineOptions(**{"steps": 30, "every": 10, **options}), norms, seeds, None, folder, Silent())


def rows(folder):
    with (folder / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.usefixtures("figures")
def test_norms_take_turns_in_changing_order(tmp_path):
    result = train(tmp_path, seeds=(1,))
    steps = [{norm for number, norm in Line.turns[i : i + 3] if number == i // 3} for i in range(0, 90, 3)]
    assert steps == [{"none", "layer", "rms"}] * 30
    assert len({tuple(norm for _, norm in Line.turns[i : i + 3]) for i in range(0, 90, 3)}) == 6
    heights = [row["quality"][0] for row in result["norms"].values()]
    assert heights == [heights[0]] * 3, "all see the same noise"
    files = {"checkpoint.npz", "metrics.csv", "summary.json", "loss-steps.svg", "loss-seconds.svg", "quality.svg"}
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("end", [3, 17])
def test_a_run_that_was_ended_continues_as_if_it_had_not_been(tmp_path, end):
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    train(whole)
    Line.end = end
    with pytest.raises(KeyboardInterrupt):
        train(ended)
    Line.end, Line.turns = None, []
    train(ended)
    assert Line.turns[0][0] == end // 10 * 10, "from the last evaluation"
    assert rows(ended) == rows(whole)
    Line.turns = []
    train(ended, seeds=(1, 2, 3))
    assert len(Line.turns) == 30 * 3, "finished seeds are not trained again"


@pytest.mark.parametrize("change", [{"norms": ("none", "rms")}, {"steps": 40}, {"kind": "bent"}])
def test_another_run_does_not_continue(tmp_path, change):
    train(tmp_path, seeds=(1,))
    before = (tmp_path / "checkpoint.npz").read_bytes()
    with pytest.raises(
        ValueError, match=r"expected a new folder, as its run has other (norms|options); choose another"
    ):
        train(tmp_path, seeds=(1,), **change)
    assert (tmp_path / "checkpoint.npz").read_bytes() == before


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    Line.end = 15
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, seeds=(1,))
    before = (tmp_path / "checkpoint.npz").read_bytes()
    Line.end = None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            train(tmp_path, seeds=(1,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(tmp_path / "checkpoint.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]
    assert (tmp_path / "checkpoint.npz").read_bytes() == before
    train(tmp_path, seeds=(1,))


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    train(tmp_path, seeds=(1,))
    path = tmp_path / "checkpoint.npz"
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole.replace(b"settings", b"settinga")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checkpoint.npz is damaged .*, expected a checkpoint of this program"):
            train(tmp_path, seeds=(1,))


@pytest.fixture
def results(tmp_path):
    """A folder with results of all runs, made of the line's."""
    made = train(tmp_path / "line", seeds=(1, 2, 3, 4, 5))
    for planned in RUNS:
        norms = planned.norms or ("none", "batch", "layer", "rms", "prms")
        own = {norm: made["norms"].get(norm, made["norms"]["rms"]) for norm in norms}
        quality = [-1.0, -1.0, 0.0, 1.0, 2.0] if planned.name == "reader" else [0.0, 0.0, 1.0, 0.0, 0.0]
        pairs = {"interval": (min(quality), max(quality)), "is_not_worse": is_not_worse(quality, 0.5)}
        own |= {"rms": {**own["rms"], "quality": quality, "minus_layer": pairs}}
        own |= {"layer": {**own["layer"], "quality": [0.0] * 5}}
        folder = tmp_path / "results" / planned.name
        folder.mkdir(parents=True)
        statement, options = {"level": 0.9, "margin": 0.5}, {"steps": 30, "batch_size": 4}
        result = {**made, "norms": own, "statement": statement, "options": options, "title": planned.name}
        (folder / "summary.json").write_text(json.dumps(result))
        ratios = {"ours": 0.8, "framework": 1.25, "separate": 0.5}
        parts = {
            kind: {norm: dict.fromkeys(PARTS, ratio if norm == "rms" else 1.0) for norm in ("none", "layer", "rms")}
            for kind, ratio in ratios.items()
        }
        times = {"seconds": parts, "paper": {"rms": -24.7}, "environment": made["environment"]}
        (folder / "times.json").write_text(json.dumps(times))
    return tmp_path / "results"


@pytest.mark.usefixtures("figures")
def test_the_page_says_what_the_results_say(results):
    text = page(results, results.parent)
    lines = text.splitlines()
    assert "not worse than LayerNorm by more than the margin: yes in 7 of 8 (`translation`, " in text
    assert "not decided in 1 of 8 (`reader`)." in text
    assert "a step takes from 50 % less (`translation`) to 50 % less (`translation`) time than with LayerNorm: " in text
    assert "less in 7 of 7. As the frameworks ship both norms, a step takes from 25 % more" in text
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "|" in line
    }
    assert rows["reader"][-1] == "0.75", "the last table with that row is of times; the paper's is 24.7 % less"
    assert len(lines) <= 150
    for figure in re.findall(r"\]\((\S+)\)", text):
        assert figure.startswith(("http", "results/"))
    (results / "reader" / "summary.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is damaged \('norms'\), expected what python -m experiments all writes"):
        page(results, results.parent)


def test_missing_runs_are_named_with_the_command_that_makes_them(results):
    assert missing(results) == []
    (results / "center" / "times.json").unlink()
    (results / "reader" / "times.json").unlink()
    (results / "mlp-4" / "summary.json").unlink()
    assert [(planned.name, file) for planned, file in missing(results)] == [
        ("reader", "times.json"), ("mlp-4", "summary.json"),
    ]  # fmt: skip
    (_, times), (planned, summary) = missing(results)
    assert planned.arguments(times, Path("r")) == [
        "mlp", "--batch-size", "4", "--steps", "6000", "--out", "r/mlp-4", "--times", "400"
    ]  # fmt: skip
    assert planned.arguments(summary, Path("r"))[-2:] == ["--seeds", "1,2,3,4,5"]


def test_the_committed_page_is_what_the_program_writes(tmp_path):
    """Without a line by hand, which the next report would lose."""
    folder = ROOT / "experiments" / "results"
    copy = tmp_path / "results"
    shutil.copytree(folder, copy)  # where the figure may be drawn again
    assert (folder.parent / "RESULTS.md").read_text() == page(copy, tmp_path)
    for planned in RUNS:
        own, statement = planned.of, json.loads((folder / planned.name / "summary.json").read_text())["statement"]
        assert statement == {"level": own.level, "margin": own.margin}, "which was there before the run"


@pytest.mark.parametrize(
    ("differences", "want"),
    [
        ([0.0, 0.0, 0.0, 0.0], None),  # the least of four is above the median with a probability of 1/16
        ([5.0, 1.0, 4.0, 2.0, 3.0], (1.0, 5.0)),
        ([*range(8)], (1, 6)),
        ([*range(7)], (0, 6)),
    ],
)
def test_the_interval_of_a_median(differences, want):
    assert interval(differences) == want


def test_the_interval_holds_the_median_as_often_as_it_says():
    draw = np.random.default_rng(1)
    counts = [low <= 0 <= high for low, high in (interval(draw.standard_cauchy(5)) for _ in range(2000))]
    assert 0.92 < np.mean(counts) < 0.955, "1 - 2/32 = 0.9375, and 5 standard deviations are 0.027"


def test_a_verdict():
    assert is_not_worse([-0.1, 0.0, 0.1, 0.2, 0.3], 0.1) == "yes"
    assert is_not_worse([-0.11, 0.0, 0.1, 0.2, 0.3], 0.1) == "not decided"
    assert is_not_worse([-0.5, -0.4, -0.3, -0.2, -0.11], 0.1) == "no"
    assert is_not_worse([float("nan")] * 5, 0.1) == "not decided"
    assert is_not_worse([0.0] * 4, 0.1) == "not decided"


def test_options_are_checked():
    with pytest.raises(ValueError, match="experiments: steps is 0, expected a number >= 1; choose another"):
        LineOptions(steps=0)
    with pytest.raises(ValueError, match="kind is 'round', expected 'straight' or 'bent'"):
        LineOptions(kind="round")
    with pytest.raises(ValueError, match="norm is 'rsm', expected 'none', 'layer' or 'rms'"):
        run(LINE, LineOptions(), ["rsm"], [1], None, Path(), Silent())
    with pytest.raises(ValueError, match="the experiment is 'nlp', expected 'mlp'"):
        get("nlp")
    assert [get(name).name for name in NAMES] == list(NAMES)


def test_a_run_that_was_killed_continues(tmp_path):
    text = (
        "import time, sys, test_experiments as t; from pathlib import Path; step = t.Line.step\n"
        "t.Line.step = lambda self, number: step(self, number) if number < 15 else time.sleep(600)\n"
        "print('ready', flush=True); t.train(Path(sys.argv[1]), seeds=(1,))"
    )
    with subprocess.Popen([sys.executable, "-c", text, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            until = time.monotonic() + 60
            while not (tmp_path / "checkpoint.npz").exists() and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            process.kill()
    train(tmp_path, seeds=(1,))
    assert Line.turns[0][0] == 10


@pytest.mark.torch
def test_mlp_by_the_command(tmp_path, monkeypatch, capfd):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    command = ["mlp", "--width", "8", "--steps", "40", "--every", "20", "--out", str(tmp_path / "mlp")]
    monkeypatch.setattr(sys, "argv", ["experiments", *command])
    with pytest.raises(SystemExit, match="0"):
        main()
    out, err = capfd.readouterr()
    assert len(err.splitlines()) == 2
    assert err.startswith("seed 1 accuracy none 0.")
    result = json.loads((tmp_path / "mlp" / "summary.json").read_text())
    assert list(result["norms"])[:6] == ["none", "batch", "weight", "layer", "rms", "prms"]
    assert out.split("written")[0].split() != []
    sizes = {norm: row["parameters"] for norm, row in result["norms"].items()}
    plain = 8 * (64 + 8 + 8 + 10 + 3) + 10
    assert [sizes["none"], sizes["rms"], sizes["layer"]] == [plain, plain + 3 * 16, plain + 3 * 16]
    assert max(row["loss"] for row in result["norms"].values()) < 2.5
    monkeypatch.setattr(sys, "argv", ["experiments", *command, "--data", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "its run has other data; choose another or delete it" in capfd.readouterr().err


@pytest.mark.torch
def test_the_states_of_a_model_in_pytorch_are_all_that_training_changes():
    torch = pytest.importorskip("torch")
    from experiments.torch_training import TorchTrainer

    def trainer():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        made = TorchTrainer(model, torch.optim.Adam(model.parameters(), lr=0.1), 1)
        made.loss = lambda number: model(torch.arange(15.0).reshape(5, 3).sin() * (number + 1)).square()[:, 0].mean()
        return made

    whole, first, second = trainer(), trainer(), trainer()
    losses = [whole.step(number) for number in range(6)]
    assert [first.step(number) for number in range(3)] == losses[:3]
    second.restore(first.state())
    assert [second.step(number) for number in range(3, 6)] == losses[3:]


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.tobytes()


@pytest.fixture
def mnist_folder(tmp_path):
    for name, count in (("train", 6), ("t10k", 3)):
        images = np.arange(count * 4, dtype=np.uint8).reshape(count, 2, 2)
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(count, dtype=np.uint8)))
    return tmp_path


def test_mnist_is_read(mnist_folder):
    images = mnist(mnist_folder)
    np.testing.assert_array_equal(images.train * 255, np.arange(24).reshape(6, 4))
    assert images.test.shape == (3, 4)
    assert images.train.dtype == np.float32
    np.testing.assert_array_equal(images.test_classes, [0, 1, 2])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t10k-images-idx3-ubyte.gz", None, "t10k-images-idx3-ubyte.gz is missing, expected the IDX file"),
        ("t10k-images-idx3-ubyte.gz", b"no gzip", r"is damaged \(Not a gzipped file"),
        ("t10k-images-idx3-ubyte.gz", gzip.compress(bytes(999), mtime=0)[:-9], r"is damaged \("),
        ("t10k-labels-idx1-ubyte", idx(np.arange(3, dtype=np.uint8))[:-1], "is damaged .10 bytes that begin with"),
        ("t10k-labels-idx1-ubyte", idx(np.arange(4, dtype=np.uint8)), "is 3, expected 4 as there are classes"),
        ("t10k-labels-idx1-ubyte", idx(np.arange(8, 11, dtype=np.uint8)), "class 10.*expected classes from 0 to 9"),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(idx(np.zeros((6, 3, 3), np.uint8)), mtime=0),
            "expected .3, 3. as for",
        ),
    ],
    ids=["missing", "no gzip", "cut off", "too short", "too many", "another class", "another size"],
)
def test_mnist_that_is_damaged(mnist_folder, name, data, message):
    (mnist_folder / name).unlink()
    if data is not None:
        (mnist_folder / name).write_bytes(data)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        mnist(mnist_folder)
