"""A description of a model for people, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rmsnorm import errors
from rmsnorm.nematus import zero
from rmsnorm.nematus.config import Config
from rmsnorm.nematus.model import Model
from rmsnorm.nematus.names import is_of_training
from rmsnorm.nematus.vocabulary import dictionaries, read_vocabulary

_DEPTHS = (
    ("rnn_enc_depth", 1, "encoder depth {}"),
    ("rnn_enc_transition_depth", 1, "encoder transitions {}"),
    ("rnn_dec_depth", 1, "decoder depth {}"),
    ("rnn_dec_base_transition_depth", 2, "base transitions {}"),
    ("rnn_dec_high_transition_depth", 1, "high transitions {}"),
    ("rnn_dec_deep_context", False, "deep context"),
    ("tie_decoder_embeddings", False, "tied decoder embeddings"),
    ("tie_encoder_decoder_embeddings", False, "tied encoder embeddings"),
    ("output_hidden_activation", "tanh", "output activation {}"),
    ("softmax_mixture_size", 1, "mixture of {} softmaxes"),
    ("rnn_lexical_model", False, "lexical model"),
    ("label_smoothing", 0.0, "label smoothing {}"),
)  # fmt: skip


def facts(model: Model) -> Iterator[tuple[str, str]]:
    """Rows (topic, text) that describe a model that ``nematus.load`` returned.

    >>> import tempfile
    >>> import numpy as np
    >>> from rmsnorm import nematus
    >>> from rmsnorm.nematus.names import variables
    >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3, norm="rms")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ones = {row.name: np.ones(row.shape) for row in variables(config)}
    ...     nematus.save_theano(f"{folder}/model.npz", config, ones)
    ...     dict(facts(nematus.load(folder)))["norm"]
    'RMSNorm, without offsets'
    """
    config = model.config
    yield "model", f"{model.path}: {'RNNSearch' if config.model_type == 'rnn' else 'Transformer'}"
    yield "framework", _framework(model)
    yield "version", _version(model)
    offsets = "with" if config.norm_offset else "without"
    rms = f"{'p' if config.norm == 'prms' else ''}RMSNorm, {offsets} offsets"
    yield "norm", {"none": "none", "layer": "LayerNorm"}.get(config.norm, rms)
    factors = f", in factors of {_joined(config.dim_per_factor)}" if len(config.dim_per_factor) > 1 else ""
    yield "sizes", f"embedding {config.embedding_size}{factors}, state {config.state_size}, " + _parts(config)
    yield "vocabulary", f"source {_joined(config.source_vocab_sizes)}, target {config.target_vocab_size}"
    for path, size in zip(dictionaries(model), (*config.source_vocab_sizes, config.target_vocab_size), strict=False):
        yield "", _dictionary(model, str(path), size)
    if config.dialect == "zero":
        yield "search", f"beam {config.beam_size}, alpha {config.normalization_alpha}, " + _search(model)
    count = sum(math.prod(array.shape) for array in model.parameters.values())
    dtypes = _joined(sorted({array.dtype.name for array in model.parameters.values()}))
    averages = ", averages of exponential smoothing" if model.smoothed else ""
    yield "parameters", f"{count:,} in {len(model.parameters)} tensors, {dtypes}{averages}"
    for why, names in _left_out(model):
        yield "left out", f"{_some(names)}: {why}"


def _search(model: Model) -> str:
    config = model.config
    noise = ", with noise" if config.beam_noise else ""
    return f"{config.translation_maxlen} words more than the source, temperature {config.beam_temperature}{noise}"


def _framework(model: Model) -> str:
    return {
        "tensorflow": "TensorFlow",
        "theano": "Theano",
        "safetensors": "PyTorch or none: a safetensors file of rmsnorm",
        "keras": "Keras: a file of rmsnorm",
        "flax": "Flax: a checkpoint of rmsnorm",
    }[model.form]


def _version(model: Model) -> str:
    """The version whose rules the model follows, and the version of the names in its file if that is another one."""
    if model.config.dialect == "zero":
        return f"zero, scope {zero.scope(model.config.options)}, eps {model.config.eps:g}"
    rules = {"tensorflow": "master", "tensorflow-v0.3": "v0.3", "theano": "Theano"}[model.config.dialect]
    if rules == "master" and model.config.search == "costs":
        rules = "v0.4"
    names = {"v0.1": "version 0.1", "theano": "Theano"}.get(model.names)
    return f"Nematus {rules}" + (f", under the names of {names}" if names not in (None, rules) else "")


def _parts(config: Config) -> str:
    if config.model_type == "transformer":
        depths = f"{config.transformer_enc_depth} + {config.transformer_dec_depth} layers"
        parts = ["ReLA"] * config.relu_attention + [
            depths,
            f"{config.transformer_num_heads} heads",
            f"hidden {config.transformer_ffn_hidden_size}",
        ]
    else:
        depths = f"encoder depth {config.rnn_enc_depth}"
        parts = [depths, f"decoder depth {config.rnn_dec_depth}"]
    for name, usual, words in _DEPTHS:
        value = getattr(config, name)
        if value != usual and not words.endswith("depth {}"):
            parts.append(words.format(value))
    return ", ".join(parts)


def _dictionary(model: Model, path: str, size: int) -> str:
    try:
        vocabulary = read_vocabulary(path, size, 0, model.config.dialect)
    except (errors.InputError, OSError) as error:
        return str(error).removeprefix("vocabulary: ")
    return f"{path}: {len(vocabulary.ids)} words"


def _left_out(model: Model) -> Iterator[tuple[str, list[str]]]:
    """Reasons for leaving tensors out, with the names of these tensors."""
    constant = [name for name in model.left_out if name == "decoder_c_tt"]
    names = [name for name in model.left_out if name not in constant]
    trainer = [name for name in names if is_of_training(name.replace("_smooth", "")) or name.startswith("/")]
    others = [name for name in model.left_out if name not in trainer and name not in constant]
    for why, names in (
        ("of the trainer", trainer),
        ("it is added to every score of attention, and has no effect", constant),
        ("the averages are taken" if model.smoothed else "its options ask for no averages", others),
        ("biases of encoder transitions, which Nematus keeps but never adds", list(model.unused)),
    ):
        if names:
            yield why, names


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _joined(values: object) -> str:
    return ", ".join(map(str, values))  # type: ignore[call-overload]
