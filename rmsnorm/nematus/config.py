"""The configuration of a Nematus model: the options of any version under the names of the newest, checked.

Loads no array library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from rmsnorm.nematus import zero
from rmsnorm.nematus.rules import Dialect, rules_of
from rmsnorm.specification import errors

Norm = Literal["none", "layer", "rms", "prms"]
BEAM: Final = 5  # hypotheses that Nematus's translate keeps
RMS: Final[tuple[Norm, ...]] = ("rms", "prms")
Activation = Literal["tanh", "relu", "prelu", "linear"]
Bias = Literal["input", "state", "outside", "none"]

# Other names of the options of Nematus master: in v0.3, in Theano, and before v0.4.
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
    **{f"rnn_{name}": (name,) for name in ("use_dropout", "dropout_embedding", "dropout_hidden")},
    **{f"rnn_{name}": (name,) for name in ("dropout_source", "dropout_target")},
}

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
        beam_size, normalization_alpha, beam_temperature, beam_noise, beam_seed: what ``translate`` does where nothing
            else is asked for; the last three are of zero's search alone.
        options: the content of the JSON file.
        folder: of the model that was read. What is saved gets the dictionaries that lie there; in no file.

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
    beam_seed: int = 1234
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    folder: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if get_origin(kind) is tuple and isinstance(getattr(self, name), list):  # JSON has lists
                object.__setattr__(self, name, tuple(getattr(self, name)))
        refused = [*_refused_values(self)]
        if refused:
            raise _together(refused)
        if self.norm == "layer":
            object.__setattr__(self, "norm_offset", True)
        if rules_of(self.dialect).ties_all and self.tie_encoder_decoder_embeddings:
            object.__setattr__(self, "tie_decoder_embeddings", True)
        if not self.dim_per_factor:
            object.__setattr__(self, "dim_per_factor", (self.embedding_size,))
        wrong = [(name, want) for is_wrong, name, want in self._contradictions() if is_wrong]
        if wrong:
            raise _together([_wrong(name, getattr(self, name), want) for name, want in wrong])

    def _contradictions(self) -> Iterator[tuple[Any, str, str]]:
        """Whether other fields contradict a field, which field it is, and what they make of it."""
        sizes, state, tied = self.source_vocab_sizes, self.state_size, self.tie_encoder_decoder_embeddings
        own, is_rnn, is_mixed = rules_of(self.dialect), self.model_type == "rnn", self.softmax_mixture_size > 1
        yield len(self.dim_per_factor) != len(sizes), "dim_per_factor", f"one size for each of {sizes}"
        want = f"sizes that add up to {self.embedding_size}"
        yield sum(self.dim_per_factor) != self.embedding_size, "dim_per_factor", want
        yield is_mixed and self.rnn_lexical_model, "rnn_lexical_model", "False where softmax_mixture_size is above 1"
        first = next(iter(sizes), 0)
        yield tied and first != self.target_vocab_size, "target_vocab_size", f"{first} of the tied source"
        want = "False where the decoder shares the embeddings of one of several factors"
        yield self.rnn_lexical_model and self.target_embedding_size != self.embedding_size, "rnn_lexical_model", want
        want = "False but in a Transformer of the dialect zero"
        yield self.relu_attention and (is_rnn or not own.has_relu_attention), "relu_attention", want
        yield self.search not in own.searches, "search", "zero in the dialect zero, and only there"
        for option in fields(self) if own.own_options else ():
            is_other = not zero.has(option.name, self.model_type) and getattr(self, option.name) != option.default
            yield is_other, option.name, f"{option.default!r}, as zero has no such option"
        want = "one factor in zero, and where a Transformer ties encoder and decoder"
        yield len(sizes) > 1 and (not own.has_factors or (tied and not is_rnn)), "source_vocab_sizes", want
        if not is_rnn:
            yield self.embedding_size != state, "embedding_size", f"the state_size of {state}"
            want = "an even number >= 4, for the sines and cosines of positions"
            yield state < 4 or (state % 2 and not own.has_odd_states), "state_size", want
            yield state % self.transformer_num_heads, "transformer_num_heads", f"a divisor of {state}"
            yield is_mixed, "model_type", "rnn where there is a mixture of softmaxes"

    @property
    def layers(self) -> int:
        """How many GRUs and softmaxes there are, or layers of a transformer. Each has variables of its own."""
        if self.model_type == "transformer":
            return self.transformer_enc_depth + self.transformer_dec_depth
        decoder = self.rnn_dec_base_transition_depth + (self.rnn_dec_depth - 1) * self.rnn_dec_high_transition_depth
        return 2 * self.rnn_enc_depth * self.rnn_enc_transition_depth + decoder + self.softmax_mixture_size

    @property
    def target_embedding_size(self) -> int:
        """The size of the target embeddings: that of the first source factor if the decoder shares its embeddings."""
        return self.dim_per_factor[0] if self.tie_encoder_decoder_embeddings else self.embedding_size

    def gru_bias(self, stack: Literal["encoder", "base", "high"], index: int) -> Bias:
        """Where GRU number ``index`` of a level adds its bias.

        ``input``: inside the norm of the projected input. ``state``: inside the norm of the projected state.
        ``outside``: outside of both norms. ``none``: the encoder transitions of TensorFlow have no bias.

        >>> config = Config(embedding_size=12, state_size=16, source_vocab_sizes=(37,), target_vocab_size=41)
        >>> [config.gru_bias("base", 0), config.gru_bias("base", 1), config.gru_bias("encoder", 1)]
        ['input', 'state', 'none']
        """
        transition = rules_of(self.dialect).transition_bias
        if stack == "high" and transition == "none":
            return "state"
        if index == 0:
            return "input"
        return "state" if stack == "base" else transition

    def replace(self, **changes: Any) -> Config:
        """A copy with other values, checked like a new config.

        >>> config = Config(embedding_size=12, state_size=16, source_vocab_sizes=(37,), target_vocab_size=41)
        >>> config.replace(norm="rms").norm
        'rms'
        """
        return replace(self, **changes)


_FIX: Final = "the options describe another model"
_KINDS: Final = get_type_hints(Config)  # the types of the fields
# Lowest values; those of other sizes are 1, of other numbers 0.
_LEAST: Final = {
    "beam_seed": 0,
    "rnn_dec_base_transition_depth": 2,  # one GRU before the attention, at least one after it
    "beam_temperature": 1e-9,
    "normalization_alpha": -1e9,
    "masked_score": -1e38,
}


def _refused_values(config: Config) -> Iterator[ValueError]:
    """The error of every field whose value is not of its type, or out of its domain."""
    for name, kind in _KINDS.items():
        try:
            _check(name, kind, getattr(config, name))
        except errors.InputValueError as error:
            yield error


def _together(refused: list[ValueError]) -> ValueError:
    """One error that says all that is refused, so that nobody mends the options one by one."""
    *others, last = map(str, refused)
    texts = [*(text.removesuffix(f"; {_FIX}") for text in others), last]
    return errors.InputValueError("; and ".join((texts[0], *(text.removeprefix("Config: ") for text in texts[1:]))))


def _check(name: str, kind: Any, value: Any) -> None:
    """Raise ValueError if a value is not of the type of its field, or out of its domain."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise errors.not_a_choice("Config", name, value, get_args(kind))
    elif kind is bool:
        if value not in (False, True):  # 0 and 1 are equal to these
            raise _wrong(name, value, "true or false")
    elif kind is float:
        is_rate, least = name.endswith("_smoothing") or "_drop" in name, _LEAST.get(name, 0.0)
        if not isinstance(value, int | float) or not least <= value < (1 if is_rate else math.inf):
            raise _wrong(name, value, "a number in [0, 1)" if is_rate else f"a number >= {least:g}")
    elif kind is int or get_origin(kind) is tuple:
        sizes, least = (value,) if kind is int else value, _LEAST.get(name, 1)
        if not isinstance(sizes, tuple) or not all(type(size) is int and size >= least for size in sizes):
            raise _wrong(name, value, f"integers >= {least}")
    elif kind is str:
        if not isinstance(value, str):
            raise _wrong(name, value, "a path")
    elif not isinstance(value, Mapping):
        raise _wrong(name, value, "the content of a JSON object")


def _wrong(name: str, got: Any, want: str) -> ValueError:
    return errors.out_of_domain("Config", name, got, want, _FIX)


# The fields that Nematus has no option for, or whose option is not read. This package writes down what is not usual.
_UNTOLD: Final = (
    *("search", "eps", "masked_score"),
    *("beam_size", "normalization_alpha", "beam_temperature", "beam_noise", "beam_seed"),
)
_OTHERS: Final = ("dialect", "norm", "norm_offset", "options", "folder", "relu_attention", *_UNTOLD)
_OPTIONS: Final = tuple(name for name in _KINDS if name not in _OTHERS)
_OWN: Final = "rmsnorm"  # the option with what Nematus's options cannot say


def option_of(options: Mapping[str, Any], name: str, otherwise: Any = None) -> Any:
    """What the options of any version of Nematus say of an option of master; None is nothing."""
    values = (options.get(spelling) for spelling in (name, *LEGACY.get(name, ())))
    return next((value for value in values if value is not None), otherwise)


def read(options: Mapping[str, Any], **known: Any) -> Config:
    """The config for the options of any version of Nematus, or of zero, in a JSON file.

    known: fields of Config that are known from another source, such as ``norm`` from the variable names.
    """
    own = rules_of(dialect_of(options))
    if own.own_options:
        values = zero.fields(options)
        return _config([*zero.refused(options)], {**values, **known}, options)
    refused = [*_refused_of_theano(options)]
    drops = option_of(options, "rnn_use_dropout", True)  # else the rates in the file have no effect
    names = [name for name in _OPTIONS if drops or not name.startswith("rnn_dropout_")]
    values = {name: value for name in names if (value := option_of(options, name)) is not None}
    sizes, dims = values.get("source_vocab_sizes", ()), values.get("dim_per_factor", ())
    values["dim_per_factor"] = dims = (dims,) if isinstance(dims, int) else dims
    factors, most = options.get("factors") or 1, max(1, len(dims)) if isinstance(dims, list | tuple) else 1
    if not isinstance(factors, int) or factors > most:
        refused.append(_wrong("factors", factors, f"{most}, as many as dim_per_factor has sizes"))
        factors = most
    values["source_vocab_sizes"] = (sizes,) * factors if isinstance(sizes, int) else sizes
    values["dialect"] = dialect_of(options)
    if "translation_strategy" not in options:
        values["search"] = own.old_search
    untold = options.get(_OWN, {})
    if not isinstance(untold, Mapping) or not untold.keys() <= set(_UNTOLD):
        refused.append(_wrong(_OWN, untold, f"an object with some of {', '.join(_UNTOLD)}"))
        untold = {}
    values |= {**untold, **known}
    for name in ("embedding_size", "state_size", "source_vocab_sizes", "target_vocab_size"):
        if not values.get(name):
            refused.append(
                errors.InputValueError(
                    f"Config: {' or '.join((name, *LEGACY[name]))} is missing, expected in the options of a Nematus "
                    "model; add it"
                )
            )
            values[name] = (1,) if name == "source_vocab_sizes" else 1  # so that the others are read
    return _config(refused, values, options)


def _config(refused: list[ValueError], values: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
    """The config of these values; an error that says all that is refused."""
    try:
        config = Config(**values, options=dict(options))
    except errors.InputValueError as error:
        raise _together([*refused, error]) from None
    if refused:
        raise _together(refused)
    return config


def write(config: Config, *, theano: bool = False) -> dict[str, Any]:
    """The options for the JSON file beside a model, under the names that the Nematus version of the model uses.

    Options of the original file stay, unless they are another name of an option that is written here.

    theano: whether Theano Nematus will read the file. If the model has another dialect, the file says so.
    """
    if rules_of(config.dialect).own_options:
        return zero.options(vars(config))
    version: Dialect = "theano" if theano else config.dialect
    values = {
        **vars(config),
        "rnn_use_dropout": any(value for name, value in vars(config).items() if name.startswith("rnn_dropout")),
        "rnn_layer_normalization": config.model_type == "rnn" and config.norm != "none",
        "dim_per_factor": list(config.dim_per_factor),
        "source_vocab_sizes": list(config.source_vocab_sizes),
    }
    names = (*_OPTIONS, "rnn_use_dropout", "rnn_layer_normalization")
    own = {_written(name, version): values[name] for name in names}
    if version == "theano":
        own["n_words_src"] = config.source_vocab_sizes[0]
        own["dialect"] = config.dialect
        if len(set(config.source_vocab_sizes)) > 1:  # Theano Nematus has no option for different sizes
            own["source_vocab_sizes"] = values["source_vocab_sizes"]
    spellings = {"norm", *LEGACY, *(spelling for names in LEGACY.values() for spelling in names)}
    options = {
        "factors": len(config.dim_per_factor),
        **{name: value for name, value in config.options.items() if name not in spellings},
        **own,
        "model_version": 0.1 if version == "theano" else 0.2,
        "layer_normalization_type": "rmsnorm" if config.norm in RMS else "layernorm",
        **zero.untold_norm(config.norm, has_offset=config.norm_offset),
    }
    if config.search == "sampler":
        options.setdefault("translation_strategy", "beam_search")
    else:
        options.pop("translation_strategy", None)
    options.pop(_OWN, None)
    again = read(options, norm=config.norm)
    untold = {name: values[name] for name in _UNTOLD if getattr(again, name) != values[name]}
    return options | ({_OWN: untold} if untold else {})


def _written(name: str, version: Dialect) -> str:
    """The name that an option of master has in the files of a version."""
    spellings = (name, *LEGACY.get(name, ()))
    if version == "theano":
        return spellings[-1]
    return spellings[version == "tensorflow-v0.3" and name.startswith("rnn_")]


def dialect_of(options: Mapping[str, Any]) -> Dialect:
    """The dialect that the options of a model tell."""
    if zero.is_zero(options):
        return "zero"
    if options.get("dialect") is not None:  # written by this package where the names of the options do not show it
        return options["dialect"]
    if "embedding_size" not in options or options.get("theano_compat"):
        return "theano"
    new = {name for name in LEGACY if name.startswith("rnn_")}
    old = {spelling for name in new for spelling in LEGACY[name]}
    return "tensorflow-v0.3" if old & options.keys() and not new & options.keys() else "tensorflow"


def _refused_of_theano(options: Mapping[str, Any]) -> Iterator[ValueError]:
    """An error for every option of a model of Theano Nematus that this package does not support."""
    for name, values in _THEANO_ONLY.items():
        if name in options and options[name] not in values:
            fix = "this part of Theano Nematus is not ported"
            yield errors.out_of_domain("Config", name, options[name], repr(values[0]), fix)
    depth, both = options.get("enc_depth") or 1, options.get("enc_depth_bidirectional")
    if both is not None and both != depth:
        yield _wrong("enc_depth_bidirectional", both, f"the enc_depth of {depth}")
    version = options.get("model_version")
    if "embedding_size" not in options and options.get("use_dropout") and not version:
        want = "0.1 or later where use_dropout is set (older models rescale at test time)"
        yield _wrong("model_version", version, want)
