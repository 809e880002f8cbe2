"""The configuration of a Nematus model, checked. Loads no array library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from rmsnorm.nematus.dialects import ZERO, Dialect, Rules, rules_of
from rmsnorm.specification import errors

Norm = Literal["none", "layer", "rms", "prms"]
BEAM: Final = 5  # hypotheses that Nematus's translate keeps
RMS: Final[tuple[Norm, ...]] = ("rms", "prms")
Activation = Literal["tanh", "relu", "prelu", "linear"]
Bias = Literal["input", "state", "outside", "none"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a Nematus model: its sizes, its parts, and the version whose rules it follows.

    ValueError if a value is out of its domain, or if two values contradict each other. Attributes that are not here are
    options of Nematus master, under its names; ``rmsnorm.nematus.dialects`` has zero's names.

    Attributes:
        dialect: ``tensorflow`` for Nematus master and v0.4, ``tensorflow-v0.3``, ``theano``, or ``zero`` for the
            authors' toolkit of that name; ``rmsnorm.nematus.dialects`` says in what they differ.
        norm: read from the variable names, because no version of Nematus writes it down reliably. ``prms``, over the
            first 6.25 % of the features, has the names of ``rms``; this package writes it down.
        norm_offset: whether the norms add a learned offset. LayerNorm does; RMSNorm does in Theano, and where it was
            made from LayerNorm.
        search: ``sampler`` of master, ``costs`` of v0.3 and v0.4, or ``zero``: see rmsnorm.nematus.beam.
        translation_maxlen: in the dialect ``zero``, how many words more than its source a translation may have.
        eps: of the norms, under the root.
        masked_score: what is added to the scores of attention to padding and to later words.
        relu_attention: whether attention is zero's ReLA: relu in place of softmax, then a gated RMSNorm.
        beam_size, normalization_alpha, beam_temperature: what ``translate`` does where nothing else is asked for; the
            last one is of zero's search alone.
        options: the content of the JSON file.
        folder: of the model that was read. What is saved gets the dictionaries that lie there; in no file.

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
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    folder: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if get_origin(kind) is tuple and isinstance(getattr(self, name), list):  # JSON has lists
                object.__setattr__(self, name, tuple(getattr(self, name)))
        refused = [*_refused_values(self)]
        if refused:
            raise together(refused)
        if self.norm == "layer":
            object.__setattr__(self, "norm_offset", True)
        if self.rules.is_zero and self.tie_encoder_decoder_embeddings:
            object.__setattr__(self, "tie_decoder_embeddings", True)
        if not self.dim_per_factor:
            object.__setattr__(self, "dim_per_factor", (self.embedding_size,))
        against = [(name, want) for is_against, name, want in self._contradictions() if is_against]
        if against:
            raise together([wrong(name, getattr(self, name), want) for name, want in against])

    def _contradictions(self) -> Iterator[tuple[Any, str, str]]:
        """Whether other fields contradict a field, which field it is, and what they make of it."""
        sizes, state, tied = self.source_vocab_sizes, self.state_size, self.tie_encoder_decoder_embeddings
        own, is_rnn, is_mixed = self.rules, self.model_type == "rnn", self.softmax_mixture_size > 1
        yield len(self.dim_per_factor) != len(sizes), "dim_per_factor", f"one size for each of {sizes}"
        want = f"sizes that add up to {self.embedding_size}"
        yield sum(self.dim_per_factor) != self.embedding_size, "dim_per_factor", want
        yield is_mixed and self.rnn_lexical_model, "rnn_lexical_model", "False where softmax_mixture_size is above 1"
        first = next(iter(sizes), 0)
        yield tied and first != self.target_vocab_size, "target_vocab_size", f"{first} of the tied source"
        want = "False where the decoder shares the embeddings of one of several factors"
        yield self.rnn_lexical_model and self.target_embedding_size != self.embedding_size, "rnn_lexical_model", want
        want = "False but in a Transformer of the dialect zero"
        yield self.relu_attention and (is_rnn or not own.is_zero), "relu_attention", want
        yield self.search not in own.searches, "search", "zero in the dialect zero, and only there"
        of_others = "transformer_" if is_rnn else "rnn_"
        for option in fields(self) if own.is_zero else ():
            has = option.name in (*ZERO, *_TOLD) or option.name.startswith(of_others)
            is_other = not has and getattr(self, option.name) != option.default
            yield is_other, option.name, f"{option.default!r}, as zero has no such option"
        want = "one factor in zero, and where a Transformer ties encoder and decoder"
        yield len(sizes) > 1 and (own.is_zero or (tied and not is_rnn)), "source_vocab_sizes", want
        if not is_rnn:
            yield self.embedding_size != state, "embedding_size", f"the state_size of {state}"
            want = "an even number >= 4, for the sines and cosines of positions"
            yield state < 4 or (state % 2 and not own.is_zero), "state_size", want
            yield state % self.transformer_num_heads, "transformer_num_heads", f"a divisor of {state}"
            yield is_mixed, "model_type", "rnn where there is a mixture of softmaxes"

    @property
    def rules(self) -> Rules:
        """The rules of the dialect."""
        return rules_of(self.dialect)

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
        """Where GRU number ``index`` of a level adds its bias: inside a norm, outside of both, or nowhere."""
        transition = self.rules.transition_bias
        if stack == "high" and transition == "none":
            return "state"
        if index == 0:
            return "input"
        return "state" if stack == "base" else transition

    def replace(self, **changes: Any) -> Config:
        """A copy with other values, checked like a new config."""
        return replace(self, **changes)


FIX: Final = "the options describe another model"
_KINDS: Final = get_type_hints(Config)  # the types of the fields
# Fields that follow from the tensors of a model of zero, or from its name.
_TOLD: Final = (
    *("dialect", "search", "model_type", "relu_attention", "norm", "norm_offset"),
    *("source_vocab_sizes", "target_vocab_size", "dim_per_factor", "options", "folder"),
)
# Lowest values; those of other sizes are 1, of other numbers 0.
_LEAST: Final = {
    "rnn_dec_base_transition_depth": 2,  # one GRU before the attention, at least one after it
    "beam_temperature": 1e-9,
    "normalization_alpha": -1e9,
    "masked_score": -1e38,
}


def _refused_values(config: Config) -> Iterator[ValueError]:
    """The error of every field whose value is not of its type, or out of its domain."""
    for name, kind in _KINDS.items():
        value, least, choices = getattr(config, name), _LEAST.get(name, 0 if kind is float else 1), get_args(kind)
        if get_origin(kind) is Literal:
            if value not in choices:
                yield errors.not_a_choice("Config", name, value, choices)
            continue
        if kind is bool:
            is_right, want = value in (False, True), "true or false"  # 0 and 1 are equal to these
        elif kind is float:
            is_rate = name.endswith("_smoothing") or "_drop" in name
            is_right = isinstance(value, int | float) and least <= value < (1 if is_rate else math.inf)
            want = "a number in [0, 1)" if is_rate else f"a number >= {least:g}"
        elif kind is int or get_origin(kind) is tuple:
            sizes = (value,) if kind is int else value
            is_right = isinstance(sizes, tuple) and all(type(size) is int and size >= least for size in sizes)
            want = f"integers >= {least}"
        else:
            is_right = isinstance(value, str if kind is str else Mapping)
            want = "a path" if kind is str else "the content of a JSON object"
        if not is_right:
            yield wrong(name, value, want)


def together(refused: list[ValueError]) -> ValueError:
    """One error that says all that is refused, so that nobody mends the options one by one."""
    *others, last = map(str, refused)
    texts = [*(text.removesuffix(f"; {FIX}") for text in others), last]
    return errors.InputValueError("; and ".join((texts[0], *(text.removeprefix("Config: ") for text in texts[1:]))))


def wrong(name: str, got: Any, want: str) -> ValueError:
    return errors.out_of_domain("Config", name, got, want, FIX)
