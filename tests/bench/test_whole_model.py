"""``benchmarks/whole_model.py`` times every norm in the same model, and ours computes what the built-in layer does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import whole_model as model
from commands import command
from timing.backends import BACKENDS
from timing.measure import LEAST_TURNS
from whole_models import DTYPES, NORMS, OPS, Sizes, draw_decoding, draw_tokens

SMALL = Sizes(layers=1, width=16, batch=1, length=4)


@pytest.mark.slow
def test_the_model_in_pytorch_is_timed_with_every_norm(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed; pip install '.[torch]'")
    sizes = [f"--{name}={size}" for name, size in SMALL._asdict().items()]
    target = tmp_path / "model.json"
    arguments = ["--backend", "torch", "--mode", "eager", "--seconds", "0", "--threads", "1", *sizes, "--json", target]
    done = command(model.app, *arguments)
    assert done.exit_code == 0, done.output
    records = json.loads(target.read_text())["records"]
    rows = [(record["dtype"], record["op"], record["norm"]) for record in records]
    assert rows == [(dtype, op, norm) for dtype in DTYPES for op in OPS for norm in NORMS]
    for record in records:
        medians = {
            other["norm"]: other["timing"]["median"]
            for other in records
            if (other["dtype"], other["op"]) == (record["dtype"], record["op"])
        }
        assert record["timing"]["turns"] >= LEAST_TURNS
        for name, norm in (("speedup", "built-in"), ("layer_norm_speedup", "LayerNorm")):
            ratio = None if record["norm"] == norm else medians[norm] / medians[record["norm"]]
            assert record[name] == ratio
    assert "PyTorch bf16 eager" in done.stdout
    assert "LayerNorm / it" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "mode"), [("tf", "graph"), ("flax", "jit")])
def test_ours_computes_what_the_built_in_layer_does_and_a_model_without_norms_does_not(backend: str, mode: str) -> None:
    for package in BACKENDS[backend].packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    step = model.step_in(backend)

    def results(op: str, norm: str) -> Any:
        call = step(op, norm, SMALL, "float32", mode)
        return [np.asarray(call(), np.float64) for _ in range(2)]

    with _promotion(backend):
        (_, loss), (loss_before, built_in_loss) = (results("train", norm) for norm in ("ours", "built-in"))
        logits, built_in_logits, other = (results("decode", norm)[0] for norm in ("ours", "built-in", "none"))
    limit = model.allowed(SMALL, "float32")
    assert built_in_loss < loss_before, "it learns"
    assert abs(loss - built_in_loss) <= limit * built_in_loss
    assert np.abs(logits - built_in_logits).max() <= limit * np.abs(built_in_logits).max()
    assert np.abs(other - built_in_logits).max() > 100 * limit * np.abs(built_in_logits).max()


def _promotion(backend: str) -> Any:
    if backend != "flax":
        return contextlib.nullcontext()
    import jax

    return jax.numpy_dtype_promotion("standard")  # Flax's own layers do not run under the strict one of the tests


def made_up(spoil: str) -> Any:
    """A step whose result is 1, and which is spoilt for ours."""

    def step(op: str, norm: str, sizes: Sizes, dtype: str, mode: str) -> Any:
        if norm == "ours" and spoil == "raises":
            raise RuntimeError("no compiler\nhere")
        return lambda: np.array(
            [1.0, 2.0 + (norm == "ours") * {"close": 1e-6, "far": 1e-3, "nan": np.nan}.get(spoil, 0.0)]
        )

    return step


@pytest.mark.parametrize(
    ("spoil", "status", "detail"),
    [
        ("close", "timed", ""),
        ("far", "wrong", "0.0005 away from the model with the built-in layer"),
        ("nan", "wrong", "nan away from"),
        ("raises", "failed", "RuntimeError: no compiler"),
    ],
)
def test_ours_that_is_wrong_or_fails_is_named_and_not_timed(spoil: str, status: str, detail: str) -> None:
    records = model.measure(made_up(spoil), "train", SMALL, "float32", "eager", NORMS, seconds=0.0)
    ours, *others = records
    assert ours["status"] == status
    assert ours["detail"].startswith(detail)
    assert (ours["timing"] is None) == (status != "timed")
    json.dumps(records, allow_nan=False)
    assert all(record["timing"] and record["status"] == "timed" for record in others)


def test_what_is_drawn_is_the_same_each_time_and_has_the_sizes() -> None:
    tokens, following = draw_tokens(SMALL)
    assert tokens.shape == following.shape == (1, 4)
    np.testing.assert_array_equal(tokens[:, 1:], following[:, :-1])
    np.testing.assert_array_equal(tokens, draw_tokens(SMALL)[0])
    word, caches = draw_decoding(Sizes(2, 128, 4, 8))
    assert word.shape == (1, 1)
    assert [array.shape for pair in caches for array in pair] == [(1, 7, 2, 64)] * 4
