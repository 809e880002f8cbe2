"""remake.py, on small runs with invented results: the archives hold what the tests read, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import remake
from nematus_models import batch, check_gradients, config_of, random_parameters, read_reference

from rmsnorm import nematus
from rmsnorm.nematus.config import write
from rmsnorm.nematus.names import variables


def write_run(folder: Path, name: str) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Writes a run. Returns its config, its parameters and their gradients by the names of master, and its results."""
    config = config_of("transformer rms" if name == "A7b" else "rms")
    if name == "B":
        config = config.replace(dialect="tensorflow-v0.3", search="costs")
    parameters, gradients = random_parameters(config, "float32"), random_parameters(config, "float32", seed=1)
    folder.mkdir()
    nematus.save_tensorflow(folder / "model.npz", config, parameters)
    (folder / "config.json").write_text(json.dumps({**write(config), "learning_rate": 0.1}))
    in_run = {row.name: row.v03 if name == "B" else row.name for row in variables(config)}
    np.savez(folder / "grads.npz", **{in_run[key]: gradient for key, gradient in gradients.items()})
    results = dict(zip(("x", "x_mask", "y", "y_mask"), batch(config), strict=True))
    results |= {"logits": np.ones((4, 3, 8), "f4"), "loss_per_sentence": np.ones(3, "f4"), "mean_loss": np.ones(())}
    results |= {"beam1_sequences": np.ones((3, 1, 5), np.int64), "beam1_costs": np.ones((3, 1), "f4")}
    np.savez(folder / "io.npz", **results)
    if name == "B":
        np.savez(folder / "theano_io_float64.npz", logits=np.zeros((4, 3, 8)), loss_per_sentence=np.zeros(3))
    return config, parameters, gradients, results


def test_the_archives_hold_what_the_tests_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    runs, out = tmp_path / "runs", tmp_path / "out"
    (runs / "C1_cells").mkdir(parents=True)
    out.mkdir()
    written = {name: write_run(runs / folder, name) for name, folder in remake.RUNS.items()}
    for file in remake.CELLS.values():
        arrays = {"x": np.ones(2), "mask_fractional": np.ones(2), "grad_fractional_x": np.zeros(2)}
        left_out = {"scalar_fractional": np.ones(()), "mask_holes": np.ones(2), "grad_prefix_x": np.ones(2)}
        np.savez(runs / "C1_cells" / f"{file}.npz", **arrays, **left_out)
    remake.remake(runs, out)

    for name, (config, parameters, gradients, results) in written.items():
        run = read_reference(out / f"{name}.npz")
        assert "learning_rate" not in run.options
        config_again, parameters_again, own = run.model("rms")
        assert config_again == config
        for key, array in parameters.items():
            np.testing.assert_array_equal(parameters_again[key], array)
        check_gradients(gradients, own, run.probes, bound=1e-6)  # the probes are float32
        theano = {"theano_logits", "theano_loss"} if name == "B" else set()
        assert run.arrays.keys() == (results.keys() - {"mean_loss"}) | theano
        for key in run.arrays.keys() - theano:
            np.testing.assert_array_equal(run.arrays[key], results[key])
    with np.load(out / "C1.npz") as archive:
        names = ("x", "mask_fractional", "grad_fractional_x")
        assert set(archive) == {f"{cell}/{name}" for cell in remake.CELLS for name in names}
