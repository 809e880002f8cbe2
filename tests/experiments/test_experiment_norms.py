"""``--operations`` and ``--times``: three ways to compute a norm, the same numbers, and their times side by side."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from experiments.cli import main
from experiments.experiment import NAMES as EXPERIMENTS
from experiments.experiment import get, partial_of
from experiments.norms import KINDS, has, norms, used
from experiments.timing import PARTS

FRAMEWORKS = [
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("tf", marks=pytest.mark.tf),
    pytest.param("flax", marks=pytest.mark.flax),
]
NAMES = {"torch": "torch", "tf": "tensorflow", "flax": "jax.numpy"}


def tensors(framework: str, arrays: list[np.ndarray]) -> list[Any]:
    module: Any = pytest.importorskip(NAMES[framework])
    make = {"torch": "from_numpy", "tf": "constant", "flax": "asarray"}[framework]
    return [getattr(module, make)(array) for array in arrays]


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("has_offset", [True, False])
def test_all_kinds_compute_the_norms_of_the_paper(framework: str, has_offset: bool) -> None:
    draw = np.random.default_rng(0)
    arrays = [draw.normal(1, 1, shape).astype(np.float32) for shape in ((5, 40), (40,), (40,))]
    x, gain, offset = arrays
    own = tensors(framework, arrays)
    if not has_offset:
        own[2], offset = None, 0.0
    centred = x - x.mean(-1, keepdims=True)
    first = np.square(x[:, :3]).mean(-1, keepdims=True)  # ceil(40 * 0.0625) elements
    wanted = {
        "layer": centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + 1e-5) * gain + offset,
        "rms": x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5) * gain + offset,
        "prms": x / np.sqrt(first + 1e-5) * gain + offset,
    }
    for kind in KINDS:
        made = norms(framework, kind)
        for norm, want in wanted.items():
            if has(kind, norm):
                y = (
                    made.layer_norm(*own, 1e-5)
                    if norm == "layer"
                    else made.rms_norm(*own, eps=1e-5, partial=partial_of(norm))
                )
                # a sum of 40 float32, and one rounding for each operation: at most 40 + 8 of 2^-24, of the sum's terms
                np.testing.assert_allclose(np.asarray(y), want, atol=48 * 2**-24 * np.abs(want).max(), rtol=0)
    with pytest.raises(ValueError, match="norm is 'prms', expected 'layer' or 'rms'"):
        norms(framework, "framework").rms_norm(*own, eps=1e-5, partial=0.0625)


def test_a_framework_ships_no_prms() -> None:
    for name in EXPERIMENTS:
        for norm in get(name).norms:
            assert has("framework", norm) == (partial_of(norm) is None)


@pytest.mark.torch
def test_models_compute_with_the_kind_that_is_used() -> None:
    pytest.importorskip("torch")
    from rmsnorm.nematus.torch import operations

    before = operations.layer_norm, operations.rms_norm
    with used("torch", "separate"):
        assert operations.rms_norm is not before[1]
        assert operations.layer_norm is not before[0]
    assert (operations.layer_norm, operations.rms_norm) == before


@pytest.mark.slow
@pytest.mark.torch
def test_times_by_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")  # which the command changes
    command = ["mlp", "--width", "8", "--times", "2", "--norm", "none,layer,rms,prms", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["experiments", *command])
    with pytest.raises(SystemExit, match="0"):
        main()
    out = capfd.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.split()[:1] == ["framework"]] == [
        ["framework", "none"], ["framework", "layer"], ["framework", "rms"],
    ]  # fmt: skip
    seconds = json.loads((tmp_path / "times.json").read_text())["seconds"]
    assert list(seconds) == list(KINDS)
    assert list(seconds["separate"]) == ["none", "layer", "rms", "prms"]
    for kinds in seconds.values():
        for own in kinds.values():
            assert list(own) == list(PARTS)
            assert own["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("translation", {"framework": "flax", "state": 8, "embedding": 4}, marks=pytest.mark.flax),
        pytest.param("translation", {"framework": "keras", "state": 8, "embedding": 4}, marks=pytest.mark.tf),
        pytest.param("retrieval", {"width": 8, "embedding": 4, "images": 20, "tested": 6}, marks=pytest.mark.flax),
        pytest.param("reader", {"width": 8, "questions": 20, "tested": 6}, marks=pytest.mark.torch),
        pytest.param("cifar", {"width": 2, "images": 20}, marks=pytest.mark.torch),
    ],
)
def test_every_kind_is_compiled_with_its_own_operations(name: str, options: dict[str, Any]) -> None:
    """A program that was traced with another kind's operations would give the very same model, to the last bit."""
    pytest.importorskip("sacrebleu")
    experiment = get(name)
    losses, states = {}, {}
    for kind in KINDS:
        task = experiment.open(experiment.options(**options, batch_size=8, operations=kind), None)
        trainer = task.trainer("layer", 1)
        assert set(trainer.seconds()) == set(PARTS)
        losses[kind], states[kind] = [trainer.step(number) for number in range(3)], trainer.state()
    np.testing.assert_allclose(losses["separate"], losses["ours"], rtol=1e-3)
    assert not all(np.array_equal(states["ours"][name], array) for name, array in states["separate"].items())
