"""The options of zero, the authors' toolkit (bzhangGo/zero, TensorFlow 1), as fields of Config and back.

Loads no array library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rmsnorm.specification import errors

# zero's options by the fields of Config, with zero's defaults.
_OPTIONS: Final = {
    "embedding_size": ("embed_size", 620),
    "state_size": ("hidden_size", 1000),
    "label_smoothing": ("label_smooth", 0.1),
    "exponential_smoothing": ("ema_decay", -1.0),
    "tie_encoder_decoder_embeddings": ("shared_source_target_embedding", False),
    "tie_decoder_embeddings": ("shared_target_softmax_embedding", True),
    "translation_maxlen": ("decode_length", 50),
    "eps": ("dtype_epsilon", 1e-8),
    "masked_score": ("dtype_inf", 1e8),
    "beam_size": ("beam_size", 4),
    "normalization_alpha": ("decode_alpha", 0.6),
    "beam_temperature": ("beam_search_temperature", 1.0),
    "beam_noise": ("enable_noise_beam_search", False),
    "beam_seed": ("random_seed", 1234),
    "rnn_dropout_embedding": ("dropout", 0.1),
    "transformer_enc_depth": ("num_encoder_layer", 6),
    "transformer_dec_depth": ("num_decoder_layer", 6),
    "transformer_ffn_hidden_size": ("filter_size", 2048),
    "transformer_num_heads": ("num_heads", 8),
    "transformer_dropout_embeddings": ("dropout", 0.1),
    "transformer_dropout_residual": ("residual_dropout", 0.1),
    "transformer_dropout_relu": ("relu_dropout", 0.1),
    "transformer_dropout_attn": ("attention_dropout", 0.1),
}
# Fields that follow from the tensors, or from the name of the model.
_TOLD: Final = (
    *("dialect", "search", "model_type", "relu_attention", "norm", "norm_offset"),
    *("source_vocab_sizes", "target_vocab_size", "dim_per_factor", "options", "folder"),
)
_MODELS: Final = ("transformer", "transformer_rela", "rnnsearch")
# What the options of a model must be for this package, with zero's default.
_PORTED: Final = {"default_dtype": (("float32", "float64"), "float32"), "search_mode": (("cache", "dev"), "cache")}
_PORTED_RNN: Final = {"cell": (("gru",), "atr"), "caencoder": ((False,), True), "layer_norm": ((True,), False)}


def is_zero(options: Mapping[str, Any]) -> bool:
    """Whether these are options of zero."""
    return "model_name" in options


def fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Config that zero's options say; sizes of vocabularies and the norm are in none of them."""
    model = options["model_name"]
    if model not in _MODELS:
        raise errors.not_a_choice("Config", "model_name", model, _MODELS)
    values = {name: options.get(option, default) for name, (option, default) in _table(model).items()}
    for name, value in values.items():
        if name == "masked_score":
            values[name] = -value if isinstance(value, int | float) else None
        elif name.endswith("_smoothing") or "_drop" in name:  # zero smooths, averages and drops only in (0, 1)
            is_off = value is None or (isinstance(value, int | float) and not 0 < value < 1)
            values[name] = 0.0 if is_off else value
    kind = "rnn" if model == "rnnsearch" else "transformer"
    rela = model == "transformer_rela"
    return {"dialect": "zero", "search": "zero", "model_type": kind, "relu_attention": rela, **values}


def refused(options: Mapping[str, Any]) -> Iterator[ValueError]:
    """An error for every option of a model whose value this package does not support."""
    of_model = _PORTED_RNN if options["model_name"] == "rnnsearch" else {}
    for name, (choices, default) in (_PORTED | of_model).items():
        got, want = options.get(name, default), " or ".join(map(repr, choices))
        if got not in choices:
            yield errors.out_of_domain("Config", name, got, want, "this part of zero is not ported")


def options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a model under zero's names: those of its file, with what the fields of its Config say."""
    model = "transformer_rela" if fields["relu_attention"] else fields["model_type"].replace("rnn", "rnnsearch")
    own = {option: fields[name] for name, (option, _) in _table(model).items()}
    own |= {"model_name": model, "dtype_inf": -fields["masked_score"], "ema_decay": own["ema_decay"] or -1.0}
    required = {name: choices[0] for name, (choices, _) in _PORTED_RNN.items()} if model == "rnnsearch" else {}
    kept = {name: value for name, value in fields["options"].items() if name != "norm"}
    return {"scope_name": model} | required | kept | own | untold_norm(fields["norm"], has_offset=fields["norm_offset"])


def has(field: str, model_type: str) -> bool:
    """Whether zero can have any value in a field of Config, or the field is of models of the other kind."""
    of_others = "transformer_" if model_type == "rnn" else "rnn_"
    return field in _OPTIONS or field in _TOLD or field.startswith(of_others)


def _table(model: str) -> dict[str, tuple[str, Any]]:
    """The rows of the options that a model has."""
    others = "transformer_" if model == "rnnsearch" else "rnn_"
    return {name: row for name, row in _OPTIONS.items() if not name.startswith(others)}


def untold_norm(norm: str, *, has_offset: bool) -> dict[str, str]:
    """The option of this package for a norm that the names of the variables may not show, in Nematus's files, too."""
    return {"norm": norm} if norm == "prms" or (norm == "rms" and has_offset) else {}


def scope(options: Mapping[str, Any]) -> str:
    """The scope of the variables, which begins all of their names."""
    return options.get("scope_name", "rnnsearch") or "model"


def recurrent_maps(e: int, d: int) -> Iterator[tuple[str, tuple[int, ...], int, bool]]:
    """The linear maps of zero's RNNSearch: name, sizes of the inputs, size of the result, whether it has a bias."""
    cells = (("encoder/forward", "gru", e), ("encoder/backward", "gru", e))
    for scope, cell, size in (*cells, ("decoder", "gru_lower", e), ("decoder", "gru_higher", 2 * d)):
        for part, width in (("gate", 2 * d), ("hide", d)):
            yield f"{scope}/fetch_state_{cell}/{part}_x", (size,), width, False
            yield f"{scope}/cell_{cell}/{part}_h", (d,), width, True
    yield "decoder_initializer/gru_init", (2 * d,), d, True
    yield "decoder/context_att", (2 * d,), 2 * d, False
    yield "decoder/attention/feed_query", (d,), 2 * d, True
    yield "decoder/attention/feed_logits", (2 * d,), 1, True
    yield "pre_logits", (d, 2 * d, e), e, True
