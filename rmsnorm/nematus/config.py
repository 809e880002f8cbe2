"""The configuration of a Nematus model: the options of any version under the names of the newest, checked.

Loads no array library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from rmsnorm import errors
from rmsnorm.nematus import zero

Dialect = Literal["tensorflow", "tensorflow-v0.3", "theano", "zero"]
Norm = Literal["none", "layer", "rms", "prms"]
BEAM: Final = 5  # hypotheses that Nematus's translate keeps
RMS: Final[tuple[Norm, ...]] = ("rms", "prms")
Activation = Literal["tanh", "relu", "prelu", "linear"]
Bias = Literal["input", "state", "outside", "none"]

# Other names of the options of Nematus master: in v0.3, in Theano, and before v0.4.
LEGACY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "embedding_size": ("dim_word",),
        "state_size": ("dim",),
        "target_vocab_size": ("n_words",),
        "source_vocab_sizes": ("source_vocab_size", "n_words_src"),
        "rnn_enc_depth": ("enc_depth",),
        "rnn_enc_transition_depth": ("enc_recurrence_transition_depth",),
        "rnn_dec_depth": ("dec_depth",),
        "rnn_dec_base_transition_depth": ("dec_base_recurrence_transition_depth",),
        "rnn_dec_high_transition_depth": ("dec_high_recurrence_transition_depth",),
        "rnn_dec_deep_context": ("dec_deep_context",),
        "rnn_layer_normalization": ("use_layer_norm", "layer_normalisation"),
        "rnn_lexical_model": ("lexical_model",),
        "rnn_use_dropout": ("use_dropout",),
        "rnn_dropout_embedding": ("dropout_embedding",),
        "rnn_dropout_hidden": ("dropout_hidden",),
        "rnn_dropout_source": ("dropout_source",),
        "rnn_dropout_target": ("dropout_target",),
        "transformer_enc_depth": ("transformer_encoder_layers",),
        "transformer_dec_depth": ("transformer_decoder_layers",),
    }
)

# Options of Theano Nematus, with the values that this package supports. Other values make another model.
_THEANO_ONLY: Final = {
    "encoder": ("gru",),
    "decoder": ("gru_cond",),
    "decoder_deep": ("gru",),
    "weight_normalisation": (False,),
    "deep_fusion_lm": (None, "", False),
    "concatenate_lm_decoder": (False,),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a Nematus model: its sizes, its parts, and the version whose rules it follows.

    Attributes:
        dialect: ``tensorflow`` for Nematus master and v0.4; ``tensorflow-v0.3``, which scores with deep decoders in
            another way than it decodes with them; ``theano``, where masked steps carry the state and the bias of
            transitions is added outside the norm; ``zero`` for the authors' toolkit of that name.
        norm: read from the variable names, because no version of Nematus writes it down reliably. ``prms``, over the
            first 6.25 % of the features, has the names of ``rms``; this package writes it down.
        norm_offset: whether the norms add a learned offset. LayerNorm does; RMSNorm does in Theano, and where it was
            made from LayerNorm.
        search: ``sampler`` of master, ``costs`` of v0.3 and v0.4, or ``zero``: beam searches with different rules for
            the hypotheses that they keep.
        translation_maxlen: in the dialect ``zero``, how many words more than its source a translation may have.
        eps: of the norms, under the root.
        masked_score: what is added to the scores of attention to padding and to later words.
        relu_attention: whether attention is zero's ReLA: relu in place of softmax, then a gated RMSNorm.
        beam_size, normalization_alpha, beam_temperature, beam_noise: what ``translate`` does where nothing else is
            asked for; the last two are of zero's search alone.
        options: the content of the JSON file.

    The other attributes are options of Nematus master, under its names; ``rmsnorm.nematus.zero`` has zero's names.

    Raises:
        ValueError: a value is out of its domain, or two values contradict each other.

    Example:
        >>> Config(embedding_size=12, state_size=16, source_vocab_sizes=(37,), target_vocab_size=41).dim_per_factor
        (12,)
    """

    embedding_size: int
    state_size: int
    source_vocab_sizes: tuple[int, ...]
    target_vocab_size: int
    dialect: Dialect = "tensorflow"
    norm: Norm = "none"
    norm_offset: bool = False
    search: Literal["sampler", "costs", "zero"] = "sampler"
    model_type: Literal["rnn", "transformer"] = "rnn"
    dim_per_factor: tuple[int, ...] = ()
    tie_decoder_embeddings: bool = False
    tie_encoder_decoder_embeddings: bool = False
    output_hidden_activation: Activation = "tanh"
    softmax_mixture_size: int = 1
    label_smoothing: float = 0.0
    exponential_smoothing: float = 0.0
    translation_maxlen: int = 200
    rnn_enc_depth: int = 1
    rnn_enc_transition_depth: int = 1
    rnn_dec_depth: int = 1
    rnn_dec_base_transition_depth: int = 2
    rnn_dec_high_transition_depth: int = 1
    rnn_dec_deep_context: bool = False
    rnn_lexical_model: bool = False
    rnn_dropout_embedding: float = 0.0
    rnn_dropout_hidden: float = 0.0
    rnn_dropout_source: float = 0.0
    rnn_dropout_target: float = 0.0
    transformer_enc_depth: int = 6
    transformer_dec_depth: int = 6
    transformer_ffn_hidden_size: int = 2048
    transformer_num_heads: int = 8
    transformer_dropout_embeddings: float = 0.1
    transformer_dropout_residual: float = 0.1
    transformer_dropout_relu: float = 0.1
    transformer_dropout_attn: float = 0.1
    transformer_drophead: float = 0.0
    eps: float = 1e-5
    masked_score: float = -1e9
    relu_attention: bool = False
    beam_size: int = BEAM
    normalization_alpha: float = 0.0
    beam_temperature: float = 1.0
    beam_noise: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping):
            raise _wrong("options", self.options, "the content of a JSON object")
        for name in ("source_vocab_sizes", "dim_per_factor"):  # JSON has lists
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise errors.not_a_choice("Config", name, getattr(self, name), choices)
        for name, least in _LEAST.items():
            for value in _as_tuple(getattr(self, name)):
                if not isinstance(value, int) or isinstance(value, bool) or value < least:
                    raise _wrong(name, getattr(self, name), f"integers >= {least}")
        for name, default in ((option.name, option.default) for option in fields(self)):
            if isinstance(default, bool) and getattr(self, name) not in (False, True):  # 0 and 1 are equal to these
                raise _wrong(name, getattr(self, name), "true or false")
            if name.endswith("_smoothing") or "_drop" in name:
                rate = getattr(self, name)
                if not isinstance(rate, int | float) or not 0 <= rate < 1:
                    raise _wrong(name, rate, "a number in [0, 1)")
        for name, lowest in _LOWEST.items():
            number = getattr(self, name)
            if not isinstance(number, int | float) or not lowest <= number < math.inf:
                raise _wrong(name, number, f"a number >= {lowest:g}")
        if self.norm == "layer":
            object.__setattr__(self, "norm_offset", True)
        if not self.dim_per_factor:
            object.__setattr__(self, "dim_per_factor", (self.embedding_size,))
        if len(self.dim_per_factor) != len(self.source_vocab_sizes):
            raise _wrong("dim_per_factor", self.dim_per_factor, f"one size for each of {self.source_vocab_sizes}")
        if sum(self.dim_per_factor) != self.embedding_size:
            raise _wrong("dim_per_factor", self.dim_per_factor, f"sizes that add up to {self.embedding_size}")
        if self.softmax_mixture_size > 1 and self.rnn_lexical_model:
            raise _wrong("rnn_lexical_model", True, "False where softmax_mixture_size is above 1")
        if self.tie_encoder_decoder_embeddings and self.source_vocab_sizes[0] != self.target_vocab_size:
            raise _wrong(
                "target_vocab_size", self.target_vocab_size, f"{self.source_vocab_sizes[0]} of the tied source"
            )
        if self.model_type == "transformer":
            self._check_transformer()

    def _check_transformer(self) -> None:
        if self.embedding_size != self.state_size:
            raise _wrong("embedding_size", self.embedding_size, f"the state_size of {self.state_size}")
        if self.state_size % 2 > (self.dialect == "zero") or self.state_size < 4:
            raise _wrong("state_size", self.state_size, "an even number >= 4, for the sines and cosines of positions")
        if self.state_size % self.transformer_num_heads:
            raise _wrong("transformer_num_heads", self.transformer_num_heads, f"a divisor of {self.state_size}")
        if len(self.source_vocab_sizes) > 1 or self.softmax_mixture_size > 1:
            raise _wrong("model_type", "transformer", "rnn where there are source factors or a mixture of softmaxes")

    @property
    def layers(self) -> int:
        """How many GRUs and softmaxes there are, or layers of a transformer. Each has variables of its own."""
        if self.model_type == "transformer":
            return self.transformer_enc_depth + self.transformer_dec_depth
        decoder = self.rnn_dec_base_transition_depth + (self.rnn_dec_depth - 1) * self.rnn_dec_high_transition_depth
        return 2 * self.rnn_enc_depth * self.rnn_enc_transition_depth + decoder + self.softmax_mixture_size

    @property
    def target_embedding_size(self) -> int:
        """The size of the target embeddings: that of the first source factor if the decoder shares its embeddings.

        >>> Config(
        ...     embedding_size=12, state_size=16, source_vocab_sizes=(41, 11), target_vocab_size=41,
        ...     dim_per_factor=(9, 3), tie_encoder_decoder_embeddings=True,
        ... ).target_embedding_size
        9
        """  # fmt: skip
        return self.dim_per_factor[0] if self.tie_encoder_decoder_embeddings else self.embedding_size

    def gru_bias(self, stack: Literal["encoder", "base", "high"], index: int) -> Bias:
        """Where GRU number ``index`` of a level adds its bias.

        ``input``: inside the norm of the projected input. ``state``: inside the norm of the projected state.
        ``outside``: outside of both norms. ``none``: the encoder transitions of TensorFlow have no bias.

        >>> config = Config(embedding_size=12, state_size=16, source_vocab_sizes=(37,), target_vocab_size=41)
        >>> [config.gru_bias("base", 0), config.gru_bias("base", 1), config.gru_bias("encoder", 1)]
        ['input', 'state', 'none']
        """
        if stack == "base":
            return "input" if index == 0 else "state"
        if self.dialect == "theano":
            return "input" if index == 0 else "outside"
        if stack == "high":
            return "state"
        return "input" if index == 0 else "none"

    def replace(self, **changes: Any) -> Config:
        """A copy with other values, checked like a new config.

        >>> config = Config(embedding_size=12, state_size=16, source_vocab_sizes=(37,), target_vocab_size=41)
        >>> config.replace(norm="rms").norm
        'rms'
        """
        return replace(self, **changes)


_CHOICES: Final = {
    "dialect": get_args(Dialect),
    "norm": get_args(Norm),
    "search": ("sampler", "costs", "zero"),
    "model_type": ("rnn", "transformer"),
    "output_hidden_activation": get_args(Activation),
}
_LEAST: Final = {
    **dict.fromkeys(("embedding_size", "state_size", "source_vocab_sizes", "target_vocab_size", "dim_per_factor"), 1),
    **dict.fromkeys(("softmax_mixture_size", "translation_maxlen", "beam_size"), 1),
    **dict.fromkeys(("rnn_enc_depth", "rnn_enc_transition_depth", "rnn_dec_depth", "rnn_dec_high_transition_depth"), 1),
    "rnn_dec_base_transition_depth": 2,  # one GRU before the attention, at least one after it
    **dict.fromkeys(("transformer_enc_depth", "transformer_dec_depth"), 1),
    **dict.fromkeys(("transformer_ffn_hidden_size", "transformer_num_heads"), 1),
}
_LOWEST: Final = {"eps": 0.0, "beam_temperature": 1e-9, "normalization_alpha": -1e9, "masked_score": -1e38}


def read(options: Mapping[str, Any], **known: Any) -> Config:
    """The config for the options of any version of Nematus, or of zero.

    Args:
        options: the content of the JSON file.
        known: fields of Config that are known from another source, such as ``norm`` from the variable names.

    Raises:
        ValueError: an option is missing, is out of its domain, or describes a model that this package does not support.

    Example:
        >>> options = {"dim_word": 12, "dim": 16, "n_words_src": 37, "n_words": 41, "enc_depth": 2}
        >>> config = read(options, norm="rms")
        >>> config.dialect, config.rnn_enc_depth
        ('theano', 2)
    """
    if zero.is_zero(options):
        return Config(**{**zero.fields(options), **known}, options=dict(options))
    _check_theano(options)
    values: dict[str, Any] = {}
    for name in _READ:
        spellings = (name, *LEGACY.get(name, ()))
        spelling = next((spelling for spelling in spellings if options.get(spelling) is not None), None)
        if spelling is not None:
            values[name] = options[spelling]
    if not values.pop("rnn_use_dropout", True):  # then the rates in the file have no effect
        values.update({name: 0.0 for name in values if name.startswith("rnn_dropout_")})
    for name in ("source_vocab_sizes", "dim_per_factor"):
        if not isinstance(values.get(name, ()), int | list | tuple):
            raise _wrong(name, values[name], "a list of integers")
    dims = values["dim_per_factor"] = _as_tuple(values.get("dim_per_factor", ()))
    factors, sizes = options.get("factors") or 1, values.get("source_vocab_sizes", ())
    if not isinstance(factors, int) or factors > max(1, len(dims)):
        raise _wrong("factors", factors, f"{max(1, len(dims))}, as many as dim_per_factor has sizes")
    values["source_vocab_sizes"] = (sizes,) * factors if isinstance(sizes, int) else tuple(sizes)
    values["dialect"] = dialect_of(options)
    if options and "translation_strategy" not in options and values["dialect"] != "theano":
        values["search"] = "costs"
    values.update(known)
    for name in ("embedding_size", "state_size", "source_vocab_sizes", "target_vocab_size"):
        if not values.get(name):
            spellings = (name, *LEGACY[name])
            raise errors.InputValueError(
                f"Config: {' or '.join(spellings)} is missing, expected in the options of a Nematus model; add it"
            )
    return Config(**values, options=dict(options))


_READ: Final = (
    *(
        option.name
        for option in fields(Config)
        if option.name not in ("dialect", "norm", "norm_offset", "search", "options", *zero.OWN_FIELDS)
    ),
    "rnn_use_dropout",
)


def write(config: Config, *, theano: bool = False) -> dict[str, Any]:
    """The options for the JSON file beside a model, under the names that the Nematus version of the model uses.

    Options of the original file stay, unless they are another name of an option that is written here.

    Args:
        theano: whether Theano Nematus will read the file. If the model has another dialect, the file says so.

    >>> config = Config(embedding_size=12, state_size=16, source_vocab_sizes=(37,), target_vocab_size=41, norm="rms")
    >>> write(config)["layer_normalization_type"], write(config, theano=True)["dim_word"]
    ('rmsnorm', 12)
    """
    if config.dialect == "zero":
        return zero.options(vars(config))
    theano = theano or config.dialect == "theano"
    own = {
        **{name: getattr(config, name) for name in _READ if name != "rnn_use_dropout"},
        "rnn_use_dropout": any(value for name, value in vars(config).items() if name.startswith("rnn_dropout")),
        "rnn_layer_normalization": config.model_type == "rnn" and config.norm != "none",
    }
    own = {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    if theano:
        sizes = own["source_vocab_sizes"]
        own = {LEGACY.get(name, (name,))[-1]: value for name, value in own.items()} | {"n_words_src": sizes[0]}
        if len(set(sizes)) > 1:  # Theano Nematus has no option for different sizes
            own["source_vocab_sizes"] = sizes
    elif config.dialect == "tensorflow-v0.3":
        old = {name: LEGACY[name][0] for name in LEGACY if name.startswith("rnn_")}
        own = {old.get(name, name): value for name, value in own.items()}
    spellings = {"norm", *(spelling for name, names in LEGACY.items() for spelling in (name, *names))}
    options = {
        "factors": len(config.dim_per_factor),
        **{name: value for name, value in config.options.items() if name not in spellings},
        **own,
        "model_version": 0.1 if theano else 0.2,
        "layer_normalization_type": "rmsnorm" if config.norm in RMS else "layernorm",
        **zero.untold_norm(config.norm, has_offset=config.norm_offset),
    }
    if config.search == "sampler":
        options.setdefault("translation_strategy", "beam_search")
    else:
        options.pop("translation_strategy", None)
    if theano:
        options["dialect"] = config.dialect
    return options


def dialect_of(options: Mapping[str, Any]) -> Dialect:
    """The dialect that the options of a model tell.

    >>> dialect_of({"dim_word": 12}), dialect_of({"embedding_size": 12}), dialect_of({"model_name": "transformer"})
    ('theano', 'tensorflow', 'zero')
    """
    if zero.is_zero(options):
        return "zero"
    if options.get("dialect") is not None:  # written by this package where the names of the options do not show it
        return options["dialect"]
    if "embedding_size" not in options or options.get("theano_compat"):
        return "theano"
    names = {name for name in LEGACY if name.startswith("rnn_")}
    old = {spelling for name in names for spelling in LEGACY[name]}
    return "tensorflow-v0.3" if old & options.keys() and not names & options.keys() else "tensorflow"


def _check_theano(options: Mapping[str, Any]) -> None:
    for name, values in _THEANO_ONLY.items():
        if name in options and options[name] not in values:
            raise errors.out_of_domain(
                "Config", name, options[name], f"{values[0]!r}", "this part of Theano Nematus is not ported"
            )
    depth = options.get("enc_depth") or 1
    both = options.get("enc_depth_bidirectional")
    if both is not None and both != depth:
        raise _wrong("enc_depth_bidirectional", both, f"the enc_depth of {depth}")
    if "embedding_size" not in options and options.get("use_dropout") and not options.get("model_version"):
        raise _wrong(
            "model_version",
            options.get("model_version"),
            "0.1 or later where use_dropout is set (older models rescale at test time)",
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _wrong(name: str, got: Any, want: str) -> ValueError:
    return errors.out_of_domain("Config", name, got, want, "the options describe another model")
