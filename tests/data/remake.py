"""Makes the archives of tests/data/nematus from runs of other programs.

    OPENBLAS_CORETYPE=Haswell python tests/data/remake.py RUNS [OUT]

RUNS has a folder for each run of Nematus: its TensorFlow checkpoint (model.npz), its options (config.json), the
gradients of the mean loss (grads.npz), and a batch with its results (io.npz). The cells have one archive each. Needs
NumPy and TensorFlow. The norms of the gradients are dot products in float32, whose last bit depends on the kernels of
the BLAS library: those for Haswell give the bits of the files that stand in tests/data/nematus.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm.nematus.config import LEGACY, Config

RUNS = {
    "A2s": "A2s_master_rnn_layernorm_smallweights",
    "A4": "A4_master_rnn_deep_rmsnorm",
    "A7b": "A7b_master_transformer_rmsnorm",
    "B": "B_v03_rmsnorm",
}
CELLS = {"gru": "gru_float64", "rlngru": "rlngru_float64", "rlnlstm": "rlnlstm_smallweights_float64"}
OPTIONS = {
    *(field.name for field in fields(Config)), *LEGACY, *(name for names in LEGACY.values() for name in names),
    "dictionaries", "factors", "layer_normalization_type", "model_version", "translation_strategy",
}  # fmt: skip
IDS_AND_MASKS = ("x", "x_mask", "y", "y_mask")
OTHER_MASKS = {"prefix", "suffix", "holes"}  # of the cells; the tests use the fractional mask


def nematus_run(folder: Path) -> dict[str, Any]:
    """Options, variables, probes of their gradients, a batch, its logits, losses and beams."""
    import tensorflow as tf

    gradients, results = arrays_of(folder / "grads.npz"), arrays_of(folder / "io.npz")
    checkpoint = tf.train.load_checkpoint(str(folder / "model.npz"))
    tensors = {name: checkpoint.get_tensor(name) for name in sorted(gradients)}
    options = json.loads((folder / "config.json").read_text())
    arrays = {
        "options": as_bytes({name: value for name, value in options.items() if name in OPTIONS}),
        "names": as_bytes({name: list(tensor.shape) for name, tensor in tensors.items()}),
        "tensors": np.concatenate([tensor.ravel() for tensor in tensors.values()]),
        "gradients": np.array([probes(gradients[name]) for name in tensors], np.float32),
    }
    arrays |= {name: results[name].astype(np.int8) for name in IDS_AND_MASKS}
    arrays |= {name: results[name] for name in ("logits", "loss_per_sentence")}
    for name in filter(lambda name: name.startswith("beam"), results):
        arrays[name] = results[name].astype(np.int8) if name.endswith("sequences") else results[name]
    if (folder / "theano_io_float64.npz").exists():
        theano = arrays_of(folder / "theano_io_float64.npz")
        arrays |= {"theano_logits": theano["logits"], "theano_loss": theano["loss_per_sentence"]}
    return arrays


def probes(gradient: Any) -> list[Any]:
    """The norm, and the products with cos(k i) for k = 1, 2, 3."""
    position = np.arange(gradient.size)
    return [np.linalg.norm(gradient), *((gradient.ravel() * np.cos(k * position)).sum() for k in (1, 2, 3))]


def cells(folder: Path) -> dict[str, Any]:
    """Inputs, outputs and gradients of the authors' cells, with the fractional mask and without one."""
    return {
        f"{cell}/{name}": array
        for cell, file in CELLS.items()
        for name, array in arrays_of(folder / f"{file}.npz").items()
        if not name.startswith("scalar") and not OTHER_MASKS & set(name.split("_"))
    }


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def as_bytes(value: Any) -> Any:
    """A JSON value as an array of bytes."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def remake(runs: Path, out: Path) -> None:
    """Writes every archive to the folder ``out``."""
    for name, folder in RUNS.items():
        np.savez_compressed(out / f"{name}.npz", **nematus_run(runs / folder))
    np.savez_compressed(out / "C1.npz", **cells(runs / "C1_cells"))


if __name__ == "__main__":
    paths = [*map(Path, sys.argv[1:]), Path(__file__).parent / "nematus"]
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    remake(*paths[:2])
