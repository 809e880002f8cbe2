"""docs/porting.md: its commands and snippets run as they stand, on a small model of Nematus v0.3."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import run, skip_without
from nematus_models import same

from rmsnorm import nematus
from rmsnorm.numpy_impl import rms_norm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "porting.md").read_text()
# What stands indented below a snippet is what it prints.
SNIPPETS = re.findall(r"^```(sh|python)\n(.*?)^```\n((?:\n|    [^\n]*\n)*)", PAGE, re.DOTALL | re.MULTILINE)


def words(line: str) -> str:
    """Without the errors, which another processor may have otherwise."""
    return re.sub(r"(?<=error )[\d.]+(e-\d+)?", "#", line.strip())


def test_the_page_runs_from_its_first_line_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the models and the texts that the program makes which it names."""
    skip_without("tf")
    skip_without("torch")
    runpy.run_path(str(ROOT / "examples" / "nematus_models.py"))["main"](tmp_path)
    monkeypatch.chdir(tmp_path)
    losses: list[float] = []
    commands = re.findall(r"^ *(rmsnorm port (\w+).*)$", PAGE, re.MULTILINE)
    assert {name for _, name in commands} == {"info", "nematus", "zero", "translate", "score", "norms", "verify"}
    run_here = "".join(code for kind, code, _ in SNIPPETS if kind == "sh")
    assert all(line in run_here for line, _ in commands)
    for kind, code, shown in SNIPPETS:
        if kind == "sh":
            printed = "".join(run(*shlex.split(line)[2:]) for line in code.splitlines())
        else:
            exec(compile(code, "porting.md", "exec"), {"__name__": "page"})
            printed = capsys.readouterr().out
        assert {*map(words, shown.splitlines())} <= {"", *map(words, printed.splitlines())}
        if "optimizer.step()" in code:
            losses = [float(line) for line in printed.splitlines()]
    assert losses[-1] < losses[0]
    for name in ("test.out", "test.scores"):
        assert len(Path(name).read_text().split()) == 3
    source, ported, *others = map(nematus.load, ("model", "ported", "back", "again"))
    assert source.config == ported.config
    for other in others:
        assert other.config == ported.config
        same(other.parameters, ported.parameters)
    same(nematus.load("output_dir").parameters, nematus.load("to_zero").parameters)
    for name, array in ported.parameters.items():
        assert not np.array_equal(array, source.parameters[name]), "trained"
    assert nematus.load("rms").config.norm == "rms"


def test_the_layer_for_nematus_own_graphs() -> None:
    """As the page has it: in a graph of TensorFlow 1, where the shape of its input is lost, and eagerly."""
    tf = pytest.importorskip("tensorflow")
    names: dict[str, Any] = {}
    exec(next(code for _, code, _ in SNIPPETS if "class LayerNormLayer" in code), names)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f4")
    wanted = rms_norm(x, np.ones(4, "f4"), variant="nematus")
    np.testing.assert_allclose(names["LayerNormLayer"](4).forward(tf.constant(x), input_is_3d=True), wanted, rtol=1e-6)
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        with tf.name_scope("gates_x_norm"):
            layer = names["LayerNormLayer"](4)
        place = v1.placeholder(tf.float32)
        y = layer.forward(place, input_is_3d=True)
        gradient = v1.gradients(y, layer.new_std)[0]
        session.run(v1.global_variables_initializer())
        result, slopes = session.run([y, gradient], {place: x})
        assert [variable.op.name for variable in v1.trainable_variables()] == ["gates_x_norm/new_std"]
    np.testing.assert_allclose(result, wanted, rtol=1e-6)
    np.testing.assert_allclose(slopes, wanted.sum((0, 1)), rtol=1e-5)
