"""Models of Nematus for the tests: those of tests/data, which Nematus ran itself, and random ones of every kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rmsnorm import nematus
from rmsnorm.nematus.config import Config, Norm
from rmsnorm.nematus.names import VERSIONS, variables
from rmsnorm.nematus.options import read, scope_of_zero

DATA = Path(__file__).parents[1] / "data" / "nematus"
# The norms of the recorded runs; those of zero are called Z.
RUNS: dict[str, Norm] = {"A2s": "layer", "A4": "rms", "A7b": "rms", "B": "rms", "F1": "layer", "L1": "rms"}
RUNS |= {"M1": "layer", "Z1": "rms", "Z2": "layer", "Z3": "rms"}

SMALL: dict[str, Any] = {"embedding_size": 6, "state_size": 5, "source_vocab_sizes": (9,), "target_vocab_size": 8}
BASE_AND_HIGH = {"rnn_dec_base_transition_depth": 3, "rnn_dec_high_transition_depth": 2}
DEEP: dict[str, Any] = {"rnn_enc_depth": 2, "rnn_enc_transition_depth": 2, "rnn_dec_depth": 3, **BASE_AND_HIGH}
FACTORS: dict[str, Any] = {"source_vocab_sizes": (8, 4), "dim_per_factor": (4, 2)}
PARTIAL: dict[str, Any] = {"norm": "prms", "embedding_size": 20, "state_size": 20}  # a statistic of two features
TIED, TIED_ENCODER = {"tie_decoder_embeddings": True}, {"tie_encoder_decoder_embeddings": True}
TIED_ALL: dict[str, Any] = {**TIED, **TIED_ENCODER, "source_vocab_sizes": (8,)}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer": {"norm": "layer"},
    "rms": {"norm": "rms"},
    "rms with offset": {"norm": "rms", "norm_offset": True},
    "deep": {"norm": "rms", **DEEP},
    "deep of odd depth": {"norm": "layer", **DEEP, "rnn_enc_depth": 3, "rnn_dec_deep_context": True},
    "deep v0.3": {"norm": "rms", **DEEP, "rnn_dec_deep_context": True, "dialect": "tensorflow-v0.3", "search": "costs"},
    "deep v0.4": {"norm": "layer", **DEEP, "search": "costs"},
    "deep theano": {"norm": "rms", **DEEP, "dialect": "theano"},
    "deep theano with offset": {"norm": "layer", **DEEP, "rnn_dec_deep_context": True, "dialect": "theano"},
    "factors": {"norm": "rms", **FACTORS},
    "tied decoder": {**PARTIAL, **TIED},
    "tied encoder": {**TIED_ENCODER, **FACTORS},
    "tied all": {**TIED_ALL, **FACTORS},
    "relu": {"output_hidden_activation": "relu"},
    "prelu": {"output_hidden_activation": "prelu", "norm": "rms"},
    "linear": {"output_hidden_activation": "linear"},
    "mixture": {"softmax_mixture_size": 3, "norm": "rms"},
    "tied mixture": {"softmax_mixture_size": 2, **TIED},
    "lexical": {"rnn_lexical_model": True, "norm": "layer"},
    "smoothed labels": {"label_smoothing": 0.1},
}
SMALL_TRANSFORMER: dict[str, Any] = {
    **SMALL, "model_type": "transformer", "embedding_size": 8, "state_size": 8, "transformer_ffn_hidden_size": 6,
    **{f"transformer_{part}": 2 for part in ("enc_depth", "dec_depth", "num_heads")},
}  # fmt: skip
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "transformer rms": {"norm": "rms"},
    "transformer layer": {"norm": "layer"},
    "transformer tied decoder": {**PARTIAL, **TIED},
    "transformer tied encoder": {"norm": "rms", **TIED_ENCODER, "source_vocab_sizes": (8,)},
    "transformer tied all": {"norm": "layer", **TIED_ALL},
    "transformer smoothed labels": {"norm": "rms", "label_smoothing": 0.1},
    "transformer factors": {"norm": "rms", "source_vocab_sizes": (8, 4), "dim_per_factor": (5, 3)},
}
OF_ZERO: dict[str, Any] = {
    "dialect": "zero", "search": "zero", "norm": "rms", "eps": 1e-8, "masked_score": -1e8, "translation_maxlen": 4,
}  # fmt: skip
OF_SEARCH = {"beam_size": 3, "normalization_alpha": 0.6, "transformer_enc_depth": 1, "transformer_dec_depth": 1}
SMALL_ZERO: dict[str, Any] = {**SMALL_TRANSFORMER, **OF_ZERO, **OF_SEARCH}
RELA = "zero rela of odd size"
ODD = {"embedding_size": 9, "state_size": 9, "transformer_num_heads": 3, "eps": 1e-3, "label_smoothing": 0.2}
ZERO: dict[str, dict[str, Any]] = {
    "zero rms": {"transformer_enc_depth": 2, **TIED, "label_smoothing": 0.1},
    "zero layer": {"norm": "layer", "beam_temperature": 0.7},
    RELA: {"norm": "layer", "relu_attention": True, **ODD},
    "zero rela tied all": {"relu_attention": True, **TIED_ALL},
}
ZERO_RNN: dict[str, dict[str, Any]] = {
    "zero rnn": {**TIED, "label_smoothing": 0.1, "beam_size": 7, "masked_score": -1e7},
    "zero rnn layer": {"norm": "layer"},
}
TABLES = (
    (SMALL, KINDS),
    (SMALL_TRANSFORMER, {**TRANSFORMERS, "transformer without norms": {"norm": "none"}}),  # which no file has
    (SMALL_ZERO, ZERO),
    ({**SMALL, **OF_ZERO}, ZERO_RNN),
)
CONFIGS = {kind: Config(**{**small, **own}) for small, kinds in TABLES for kind, own in kinds.items()}
WITHOUT_DROPOUT = {f"transformer_dropout_{part}": 0.0 for part in ("embeddings", "residual", "relu", "attn")}


def same(arrays: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Checks that these are the same names, dtypes and bits."""
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        assert array.dtype == wanted[name].dtype
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def reoption(folder: Path, name: str = "model.npz.json", **changes: Any) -> None:
    """The options of a model with other ones; None takes one out."""
    options = {**json.loads((folder / name).read_text()), **changes}
    (folder / name).write_text(json.dumps({key: value for key, value in options.items() if value is not None}))


def refuses(message: str, path: Path, **options: Any) -> None:
    """Checks that ``nematus.load`` refuses the model with such a message."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        nematus.load(path, **options)


def random_parameters(config: Config, dtype: str = "float64", seed: int = 0) -> dict[str, Any]:
    """Matrices whose products are about as large as their inputs; gains about 1, biases about 0.

    A quarter of that in a Transformer without norms, where the sums grow from layer to layer.
    """
    rng, parameters = np.random.default_rng(seed), {}
    size = 0.25 if config.model_type == "transformer" and config.norm == "none" else 1.0
    for row in variables(config):
        value = rng.standard_normal(row.shape)
        if row.name.endswith(("/scale", "/new_std")):
            value = 1 + 0.3 * value
        elif "embedding" in row.name.rpartition("/")[2]:
            value = 0.7 * value
        else:
            value *= 0.4 if len(row.shape) == 1 else 1.5 / np.sqrt(row.shape[0])
        parameters[row.name] = (size * value).astype(dtype)
    return parameters


def batch(config: Config, seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Sentences of several lengths, padded: x, x_mask, y, y_mask."""
    rng = np.random.default_rng(seed)
    source, target = np.array([4, 2, 1]), np.array([2, 4, 3])
    x_mask, y_mask = ((np.arange(4)[:, None] < lengths).astype(np.float64) for lengths in (source, target))
    x = np.stack([rng.integers(1, size, x_mask.shape) for size in config.source_vocab_sizes]) * x_mask.astype(int)
    y = rng.integers(1, config.target_vocab_size, y_mask.shape) * y_mask.astype(int)
    y[target - 1, np.arange(3)] = 2 if config.dialect == "zero" else 0
    return x, x_mask, y, y_mask


@dataclass(frozen=True)
class Reference:
    """A run of Nematus, as an archive in tests/data holds it."""

    norm: Norm
    options: dict[str, Any]
    tensors: dict[str, Any]
    probes: dict[str, Any]
    arrays: dict[str, Any]

    @property
    def sentences(self) -> tuple[Any, Any, Any, Any]:
        """As the models take them: lengths first, and an axis for the factors of the source, which zero has not."""
        x, *others = (self.arrays[name].astype(int) for name in ("x", "x_mask", "y", "y_mask"))
        return (x.T[None], *(array.T for array in others)) if "model_name" in self.options else (x, *others)

    def model(self) -> tuple[Config, dict[str, Any], dict[str, str]]:
        """The config, the parameters by the names of master, and for each of these the name in the run."""
        if "model_name" in self.options:
            scope = scope_of_zero(self.options)
            parameters = {name.removeprefix(f"{scope}/"): tensor for name, tensor in self.tensors.items()}
            sizes = [len(parameters[f"{side}_embedding"]) for side in ("src", "tgt")]
            config = read(self.options, norm=self.norm, source_vocab_sizes=(sizes[0],), target_vocab_size=sizes[1])
            return config, parameters, {name: f"{scope}/{name}" for name in parameters}
        config = read(self.options, norm=self.norm)
        rows = variables(config)
        version = max(range(len(VERSIONS)), key=lambda i: sum(row.names[i] in self.tensors for row in rows))
        own = {row.name: row.names[version] for row in rows}
        assert sorted(own.values()) == sorted(self.tensors)
        return config, {name: self.tensors[name_in_run] for name, name_in_run in own.items()}, own

    def beam(self, name: str) -> tuple[Any, Any]:
        """The sequences and scores of that name, the best first. v0.3 has costs, and pads with -1."""
        sequences, scores = self.arrays[f"{name}_sequences"], self.arrays.get(f"{name}_scores")
        scores = -self.arrays[f"{name}_costs"] if scores is None else scores
        order = np.argsort(-scores, axis=1, kind="stable")
        best = np.take_along_axis(sequences, order[:, :, None], axis=1)
        return np.maximum(best, 0), np.take_along_axis(scores, order, axis=1)


@cache
def reference(name: str) -> Reference:
    """The run of that name in tests/data."""
    with np.load((DATA.with_name("zero") if name.startswith("Z") else DATA) / f"{name}.npz") as archive:
        arrays = dict(archive)
    shapes = json.loads(arrays.pop("names").tobytes())
    flat, tensors = arrays.pop("tensors"), {}
    for name_in_run, shape in shapes.items():
        values, flat = np.split(flat, [int(np.prod(shape))])
        tensors[name_in_run] = values.reshape(shape)
    assert not len(flat)
    probes = dict(zip(shapes, arrays.pop("gradients"), strict=True))
    return Reference(RUNS[name], json.loads(arrays.pop("options").tobytes()), tensors, probes, arrays)
