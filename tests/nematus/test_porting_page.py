"""docs/porting.md: its commands and snippets run as they stand, on a small model of Nematus v0.3."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from nematus_commands import checkpoint, run, saved, skip_without
from nematus_models import config_of, random_parameters, same

from rmsnorm import nematus
from rmsnorm.nematus.config import write
from rmsnorm.nematus.convert import TARGETS
from rmsnorm.nematus.names import variables
from rmsnorm.nematus.rules import Dialect

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text()
# What stands indented below a snippet is what it prints.
SNIPPETS = re.findall(r"^```(sh|python)\n(.*?)^```\n((?:\n|    [^\n]*\n)*)", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ as the trainer leaves it, and the texts that the page names."""
    skip_without("tf")
    skip_without("torch")
    folder = tmp_path_factory.mktemp("porting")
    (folder / "model").mkdir()
    config = config_of("layer").replace(
        dialect="tensorflow-v0.3", search="costs", rnn_enc_depth=2, rnn_dropout_hidden=0.1,
        options={"dictionaries": ["src.json", "trg.json"]},
    )  # fmt: skip
    parameters = random_parameters(config, "float32", seed=6)
    tensors: dict[str, Any] = {str(row.v03): parameters[row.name] for row in variables(config)}
    tensors |= {"time": np.int32(7), "beta1_power": np.float32(0.9)}
    checkpoint(folder / "model" / "model.npz", tensors, write(config))
    for name, size in (("src", 9), ("trg", 8)):
        words = ["eos", "UNK", *(f"w{index}" for index in range(2, size))]
        (folder / "model" / f"{name}.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    for name in ("train", "test"):
        (folder / f"{name}.src").write_text("w3 w4 w3\nw5\nw6 w7\n")
        (folder / f"{name}.trg").write_text("w2 w3 w4\nw5\nw7 w6\n")
    return folder


def _words(line: str) -> str:
    """Without the errors, which another processor may have otherwise."""
    return re.sub(r"(?<=error )[\d.]+(e-\d+)?", "#", line)


def test_the_page_runs_from_its_first_line_to_its_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    losses: list[float] = []
    for kind, code, shown in SNIPPETS:
        if kind == "sh":
            printed = "".join(run(*shlex.split(line)[2:]) for line in code.splitlines())
        else:
            exec(compile(code, "porting.md", "exec"), {"__name__": "page"})
            printed = capsys.readouterr().out
        lines = [_words(line).rstrip() for line in printed.splitlines()]
        for line in shown.splitlines():
            assert not line or _words(line.removeprefix("    ")) in lines, printed
        if "optimizer.step()" in code:
            losses = [float(line) for line in lines]
    assert losses[-1] < losses[0]
    assert len((folder / "test.out").read_text().split()) == 3
    assert len([float(line) for line in (folder / "test.scores").read_text().split()]) == 3
    source, ported, *others = (nematus.load(folder / name) for name in ("model", "ported", "back", "again"))
    assert source.config == ported.config
    for other in others:
        assert other.config == ported.config
        same(other.parameters, ported.parameters)
    for name, array in ported.parameters.items():
        assert not np.array_equal(array, source.parameters[name]), "trained"
    assert nematus.load(folder / "rms").config.norm == "rms"


def test_the_tables_name_every_form_and_dialect() -> None:
    forms, dialects = (
        dict(re.findall(r"^\| `(\S+)` \| (.*?) \|", table, re.MULTILINE)) for table in PAGE.split("## Dialects")
    )
    assert forms.keys() == TARGETS.keys()
    for form, target in TARGETS.items():
        assert target.file in forms[form].replace(".index", "")
    assert dialects.keys() == set(get_args(Dialect))
    for name in re.findall(r"save_\w+", PAGE):
        assert name in nematus.__all__


@pytest.mark.slow
def test_a_new_process_loads_what_keras_saved(tmp_path: Path) -> None:
    """By the lines that the conversion prints, and by those of docs/layers.md; not without the import."""
    skip_without("keras")
    saved(tmp_path)
    shown = run("nematus", tmp_path, tmp_path / "ported", "--to", "keras")
    lines = shown.split("load it in a new process with\n")[1].splitlines()
    assert [line[:4] for line in lines] == [" " * 4] * 2
    code = "\n".join(line.strip() for line in lines)
    page = (ROOT / "docs" / "layers.md").read_text()
    layers = re.search(r"^    import keras\n(    from .*\n)    model = .*$", page, re.MULTILINE)
    assert layers is not None
    of_page = "\n".join(line.strip() for line in layers[0].splitlines())
    first, second, third = of_page.splitlines()
    save = "keras.Sequential([keras.Input((4,)), RMSNormalization()]).save('model.keras')"
    checked = "assert type({}).__name__ == '{}', model"
    of_layer, of_model = checked.format("model.layers[-1]", "RMSNormalization"), checked.format("model", "RNNSearch")
    in_new_process("\n".join((first, second, save, third, of_layer, code, of_model)), tmp_path)
    with pytest.raises(AssertionError, match="Could not locate class 'RMSNormalization'"):
        in_new_process(f"{first}\n{third}", tmp_path)


def in_new_process(code: str, folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
