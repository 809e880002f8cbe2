"""The tables of the programs: the rules of each dialect, and the names of options. Loads no array library."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

Dialect = Literal["tensorflow", "tensorflow-v0.3", "theano", "zero"]

NOTHING: Final = -1  # the id that stands for a vector of zeros
ZERO_BIAS: Final = "bias"  # zero adds it to the embeddings of source and target


class Rules(NamedTuple):
    """The rules of a dialect. The defaults are those of Nematus master."""

    version: str = "master"  # what ``port info`` calls it
    system: Literal["nematus", "zero"] = "nematus"  # the program, and the command that converts it
    masking: Literal["zero", "carry"] = "zero"  # what a masked word does to states of the encoder: zeros, or nothing
    transition_bias: Literal["none", "outside"] = "none"  # where the encoder's transitions, and high levels, add a bias
    # Deep decoders score with states that begin with zeros, and no residual connection around the first high level.
    scores_otherwise: bool = False
    go: int = 1  # the id that precedes the first word of a Transformer
    end: int = 0  # the id that ends a sentence
    unknown: int = 1  # the id of unknown words in a translation
    searches: tuple[str, ...] = ("sampler", "costs")
    old_search: str = "costs"  # the search of a model whose options have no translation_strategy
    ambiguous_norm: bool = False  # LayerNorm and RMSNorm with offsets have the same names
    average: str = "_smooth"  # how the names of averages end
    checkpoint: str = "model.npz"  # the name of a converted checkpoint

    @property
    def is_zero(self) -> bool:
        """Whether models, searches and files are those of zero: what differs is said where it is used."""
        return self.system == "zero"


RULES: Final[dict[Dialect, Rules]] = {
    "tensorflow": Rules(unknown=2),
    "tensorflow-v0.3": Rules("v0.3", scores_otherwise=True),
    "theano": Rules(
        "Theano", masking="carry", transition_bias="outside", old_search="sampler", ambiguous_norm=True
    ),
    "zero": Rules(
        "zero", "zero", go=NOTHING, end=2, searches=("zero",), average="/ExponentialMovingAverage", checkpoint="model-0"
    ),
}  # fmt: skip


def rules_of(dialect: object) -> Rules:
    """The rules of this name, which may be anything in a file; those of master for another one, refused by Config."""
    return next((own for name, own in RULES.items() if name == dialect), Rules())


# Other names of the options of Nematus master, which are the fields of Config: in v0.3, in Theano, and before v0.4.
LEGACY: Final[dict[str, tuple[str, ...]]] = {
    "embedding_size": ("dim_word",),
    "state_size": ("dim",),
    "target_vocab_size": ("n_words",),
    "source_vocab_sizes": ("source_vocab_size", "n_words_src"),
    "rnn_enc_transition_depth": ("enc_recurrence_transition_depth",),
    "rnn_dec_base_transition_depth": ("dec_base_recurrence_transition_depth",),
    "rnn_dec_high_transition_depth": ("dec_high_recurrence_transition_depth",),
    "rnn_layer_normalization": ("use_layer_norm", "layer_normalisation"),
    "transformer_enc_depth": ("transformer_encoder_layers",),
    "transformer_dec_depth": ("transformer_decoder_layers",),
    **{f"rnn_{name}": (name,) for name in ("enc_depth", "dec_depth", "dec_deep_context", "lexical_model")},
    **{f"rnn_dropout_{part}": (f"dropout_{part}",) for part in ("embedding", "hidden", "source", "target")},
    "rnn_use_dropout": ("use_dropout",),
}

# zero's options by the fields of Config, with zero's defaults.
ZERO: Final[dict[str, tuple[str, Any]]] = {
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

# Options whose other values make other models: the values that this package supports, and the program's default.
PORTED: Final[dict[str, dict[str, tuple[tuple[Any, ...], Any]]]] = {
    "Theano Nematus": {
        "encoder": (("gru",), "gru"),
        "decoder": (("gru_cond",), "gru_cond"),
        "decoder_deep": (("gru",), "gru"),
        "weight_normalisation": ((False,), False),
        "deep_fusion_lm": ((None, "", False), None),
        "concatenate_lm_decoder": ((False,), False),
    },
    "zero": {
        "model_name": (("transformer", "transformer_rela", "rnnsearch"), None),
        "default_dtype": (("float32", "float64"), "float32"),
        "search_mode": (("cache", "dev"), "cache"),
        "enable_noise_beam_search": ((False,), False),
    },
    "rnnsearch": {"cell": (("gru",), "atr"), "caencoder": ((False,), True), "layer_norm": ((True,), False)},
}
