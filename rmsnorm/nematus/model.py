"""Nematus models: TensorFlow checkpoints and Theano archives of any version in, parameters by name out.

And the forms of this package: a safetensors file, which holds the state dict of the model in PyTorch, a file of Keras,
a checkpoint of Orbax for Flax.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.nematus.checkpoints import keras, orbax, safetensors, tensorflow, theano
from rmsnorm.nematus.checkpoints.files import Form, Place, locate, read_options
from rmsnorm.nematus.config import LEGACY, Config, Dialect, Norm, read
from rmsnorm.nematus.names import VERSIONS, is_of_training, match, unused, variables

# Shapes by name, and how to read a tensor.
Reader = Callable[[Path], tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]]

_SMOOTH: Final = "_smooth"


@dataclass(frozen=True)
class Model:
    """A Nematus model as it was read.

    Attributes:
        config: what it is.
        parameters: arrays by the names of Nematus master, in the dtype of the file.
        path: the prefix of the checkpoint, or the file.
        form: whose file it is.
        names: whose names the file has: ``master``, ``v0.3``, ``v0.1`` or ``theano``.
        smoothed: whether the parameters are the averages of exponential smoothing.
        left_out: tensors of the file that are not part of the model: those of the trainer.
        unused: biases of encoder transitions, which v0.3 keeps and never adds.
    """

    config: Config
    parameters: dict[str, np.ndarray[Any, Any]]
    path: Path
    form: Form
    names: str
    smoothed: bool
    left_out: tuple[str, ...]
    unused: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    norm: Norm | None = None,
    dialect: Dialect | None = None,
) -> Model:
    """Read a model that Nematus wrote, in TensorFlow (v0.3, v0.4, master) or Theano, or that was ported from it.

    Every tensor is used once and none is missing; the trainer's are left out. The norm is told from the names of the
    variables, the dialect from the form of the file and from the options.

    Args:
        path: a directory, the prefix of a checkpoint, an archive, or a file of another form.
        config: the options, or the JSON file with them, where they are not in ``<path>.json`` or ``config.json``.
        norm: ``rms`` for a Theano archive of RMSNorm that still adds its offsets: its names are those of LayerNorm.
        dialect: instead of the one that these tell.

    Raises:
        FileNotFoundError: there is no model, or no options.
        ModuleNotFoundError: the framework whose file it is is not installed.
        TypeError: a tensor of the model is not floating-point.
        ValueError: the files are damaged, do not fit each other, or hold NaN; the message says which and where.

    Example:
        >>> import tempfile
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3, norm="rms")
        >>> parameters = {row.name: np.ones(row.shape) for row in variables(config)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     theano.save_theano(f"{directory}/model.npz", config, parameters)
        ...     model = load(directory)
        >>> model.config == config, model.names, model.left_out
        (True, 'theano', ('decoder_c_tt',))
    """
    place = locate(path)
    options = _options(place, config)
    shapes, tensor = _READERS[place.form](place.path)
    of_model = {name for name in shapes if not is_of_training(name) and not name.endswith(_SMOOTH)}
    if dialect is None and place.form == "theano" and not options.get("dialect"):
        dialect = "theano"
    found = read(options, **_told(options, {name: shapes[name] for name in of_model}, norm, dialect))

    rows = variables(found)
    old = "v0.3" if found.search == "costs" else "master"  # which are the same with LayerNorm

    def known(index: int) -> tuple[int, bool]:
        return len(of_model & {row.names[index] for row in rows}), VERSIONS[index] == old

    index = max(range(len(VERSIONS)), key=known)
    wanted = {row.names[index] or row.name: row for row in rows}
    spare = tuple(sorted(of_model & unused(found) - wanted.keys()))
    match("nematus.load", str(place.path), wanted, {name: shapes[name] for name in of_model.difference(spare)})

    smoothed = found.exponential_smoothing > 0
    if smoothed:
        averages = {name + _SMOOTH: row for name, row in wanted.items()}
        match(
            "nematus.load",
            f"{place.path}, smoothed,",
            averages,
            {name: shape for name, shape in shapes.items() if name in averages},
        )
        wanted = averages
    parameters = {row.name: _finite(place.path, name, tensor(name)) for name, row in wanted.items()}
    return Model(
        config=found,
        parameters={row.name: parameters[row.name] for row in rows},
        path=place.path,
        form=place.form,
        names=VERSIONS[index],
        smoothed=smoothed,
        left_out=tuple(sorted(shapes.keys() - wanted.keys() - set(spare))),
        unused=spare,
    )


def _options(place: Place, config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if config is None and place.path.suffix == keras.SUFFIX:
        return keras.read_options(place.path)
    return read_options(place.path, config)


def _told(
    options: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], norm: Norm | None, dialect: Dialect | None
) -> dict[str, Any]:
    """What the names and shapes of the tensors tell of the config."""
    told: dict[str, Any] = {} if dialect is None else {"dialect": dialect}
    ends = ("/new_mean", "/offset", "_lnb", "_ln_b"), ("/new_std", "/scale", "_lns", "_ln_s")
    told["norm_offset"], has_gain = (any(name.endswith(end) for name in shapes) for end in ends)
    names_layer = any(name.endswith("/new_mean") or "/layer_norm/" in name for name in shapes)
    names_rms = any(name.endswith("/scale") and "/layer_norm/" not in name for name in shapes)
    says_rms = options.get("layer_normalization_type") == "rmsnorm"
    if not has_gain:
        told["norm"] = "none"
    elif names_rms or not told["norm_offset"] or (says_rms and not names_layer):
        told["norm"] = "rms"
    else:
        told["norm"] = norm or "layer"
    asking = ("rnn_layer_normalization", *LEGACY["rnn_layer_normalization"])
    asked = next((name for name in asking if options.get(name)), None)
    if asked and norm is None and told["norm"] == "none":
        raise ValueError(
            f"nematus.load: the model has no gains, expected those of the norms that {asked} of its options asks for; "
            "Nematus's own conversion drops those of RMSNorm: load what was converted, or pass norm='none'"
        )
    if norm not in (None, told["norm"]):
        raise errors.out_of_domain(
            "nematus.load", "norm", norm, f"{told['norm']}, as its variables say", "leave it out"
        )
    if options.get("model_type") == "transformer":
        # Until 2020 it was the other option that tied the projection, whatever this one said.
        untied = "transformer_model/softmax_projection_layer/embedding_table" in shapes
        if untied or options.get("tie_decoder_embeddings") or options.get("tie_encoder_decoder_embeddings"):
            told["tie_decoder_embeddings"] = not untied
    return told


_READERS: Final[Mapping[Form, Reader]] = {
    "tensorflow": tensorflow.read,
    "theano": theano.read,
    "safetensors": safetensors.read,
    "keras": keras.read,
    "flax": orbax.read,
}


def _finite(path: Path, name: str, array: Any) -> np.ndarray[Any, Any]:
    if array.dtype.kind != "f":
        raise errors.wrong_dtype("nematus.load", f"{name} in {path}", array.dtype.name, ["float32", "float64"])
    bad = int((~np.isfinite(array)).sum())
    if bad:
        raise ValueError(
            f"nematus.load: {name} in {path} holds {bad} NaN or infinite values of {array.size}, expected finite "
            "weights; take a checkpoint from before training went wrong"
        )
    return array
