"""Makes the archives of tests/data/nematus and tests/data/zero from runs of other programs.

    OPENBLAS_CORETYPE=Haswell python tests/data/remake.py RUNS [OUT]
    OPENBLAS_CORETYPE=Haswell python tests/data/remake.py --zero RUNS [OUT]

RUNS has a folder for each run of Nematus: its TensorFlow checkpoint (model.npz), its options (config.json), the
gradients of the mean loss (grads.npz), and a batch with its results (io.npz). The cells have one archive each. Needs
NumPy and TensorFlow. The norms of the gradients are dot products in float32, whose last bit depends on the kernels of
the BLAS library: those for Haswell give the bits of the files that stand in tests/data. A run of zero has a checkpoint
model-<step> and param.json.
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
    "F1": "F1_master_transformer_factors",
    "L1": "L1_master_rnn_lexical_factors",
    "M1": "M1_master_rnn_mixture",
}
ZERO_RUNS = {"Z1": "Z1_transformer_rmsnorm", "Z2": "Z2_transformer_layernorm", "Z3": "Z3_rnnsearch_rmsnorm"}
CELLS = {"gru": "gru_float64", "rlngru": "rlngru_float64", "rlnlstm": "rlnlstm_smallweights_float64"}
OPTIONS = {
    *(field.name for field in fields(Config)), *LEGACY, *(name for names in LEGACY.values() for name in names),
    "dictionaries", "factors", "layer_normalization_type", "model_version", "translation_strategy",
}  # fmt: skip
IDS_AND_MASKS = ("x", "x_mask", "y", "y_mask")
OTHER_MASKS = {"prefix", "suffix", "holes"}  # of the cells; the tests use the fractional mask


def nematus_run(folder: Path) -> dict[str, Any]:
    """Options, variables, probes of their gradients, a batch, its logits, losses and beams."""
    options = json.loads((folder / "config.json").read_text())
    arrays, results = common(folder, str(folder / "model.npz"))
    arrays["options"] = as_bytes({name: value for name, value in options.items() if name in OPTIONS})
    arrays |= {name: results[name] for name in ("logits", "loss_per_sentence")}
    if (folder / "theano_io_float64.npz").exists():
        theano = arrays_of(folder / "theano_io_float64.npz")
        arrays |= {"theano_logits": theano["logits"], "theano_loss": theano["loss_per_sentence"]}
    return arrays


def zero_run(folder: Path) -> dict[str, Any]:
    """As nematus_run; also states of the encoder, logits of single steps, losses without smoothing, norms alone."""
    arrays, results = common(folder, str(next(folder.glob("model-*.index")).with_suffix("")))
    arrays["options"] = as_bytes(json.loads((folder / "param.json").read_text()))
    names = ("encoder_output", "logits", "step_logits", "loss_per_sentence", "loss_per_sentence_nosmooth", "score")
    arrays |= {name: results[name] for name in names}
    if (folder / "norms.npz").exists():
        arrays |= {f"norms/{name}": array for name, array in arrays_of(folder / "norms.npz").items()}
    return arrays


def common(folder: Path, checkpoint: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables, probes of their gradients, a batch and its beams; and everything in io.npz."""
    import tensorflow as tf

    gradients, results = arrays_of(folder / "grads.npz"), arrays_of(folder / "io.npz")
    reader = tf.train.load_checkpoint(checkpoint)
    tensors = {name: reader.get_tensor(name) for name in sorted(gradients)}
    arrays = {
        "names": as_bytes({name: list(tensor.shape) for name, tensor in tensors.items()}),
        "tensors": np.concatenate([tensor.ravel() for tensor in tensors.values()]),
        "gradients": np.array([probes(gradients[name]) for name in tensors], np.float32),
    }
    arrays |= {name: results[name].astype(np.int8) for name in IDS_AND_MASKS}
    for name in filter(lambda name: name.startswith("beam"), results):
        arrays[name] = results[name].astype(np.int8) if name.endswith("sequences") else results[name]
    return arrays, results


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


def remake_zero(runs: Path, out: Path) -> None:
    """Writes the archives of zero's runs to the folder ``out``."""
    for name, folder in ZERO_RUNS.items():
        np.savez_compressed(out / f"{name}.npz", **zero_run(runs / folder))


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--zero"]
    system = "zero" if "--zero" in sys.argv else "nematus"
    if not arguments:
        sys.exit(__doc__)
    paths = [*map(Path, arguments), Path(__file__).parent / system]
    (remake_zero if system == "zero" else remake)(*paths[:2])
