"""The variables of a Nematus model: names in four versions of Nematus, and shapes, as one table. No array library.

Each row is a variable. The columns are its names in Nematus master, in v0.3 and v0.4, in models of version 0.1 (and in
TensorFlow checkpoints converted from Theano), and in Theano archives. Any two columns are a map in either direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from rmsnorm.nematus.config import Bias, Config, Norm
from rmsnorm.nematus.dialects import ZERO_BIAS
from rmsnorm.specification import errors

Use: TypeAlias = Literal["encoder", "decoder", "softmax"]
Block: TypeAlias = Literal["self_attn", "cross_attn", "ffn", "final"]

# Where the norm of a block is in Nematus, and where all of a block is where scopes are nested.
_BLOCKS: Final[dict[Block, tuple[str, str]]] = {
    "self_attn": ("pre_self_attn_sublayer", "self_attention"),
    "cross_attn": ("pre_cross_attn_sublayer", "cross_attention"),
    "ffn": ("pre_ffn_sublayer", "feed_forward"),
    "final": ("final_transform", ""),
}
# Linear maps of attention where scopes are nested, and those of a feed-forward block, in Nematus and nested.
_ATTENTION: Final = {"queries": "q_map", "keys": "k_map", "values": "v_map", "qkv": "qkv_map", "context": "o_map"}
_FEED_FORWARD: Final = {"in": ("ff_layer_1", "ffn_layer/enlarge"), "out": ("ff_layer_2", "ffn_layer/output")}


class Variable(NamedTuple):
    """A row of the table; ``theano`` is None if Theano Nematus has no such variable.

    Of a gain, ``normalised`` are the matrix and the bias, if it has one, whose result its norm normalises.
    """

    name: str
    shape: tuple[int, ...]
    v03: str
    v01: str
    theano: str | None
    normalised: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str | None, ...]:
        """The names, in the order of VERSIONS."""
        return (self.name, self.v03, self.v01, self.theano)


class GRUVariable(NamedTuple):
    """A variable of a GRU."""

    name: str
    theano: str  # in Theano Nematus, and in the authors' code
    theano_after_attention: str
    norm: str  # the scope of the norm of its product, empty if there is none

    def shape(self, features: int, state: int) -> tuple[int, ...]:
        """The shape for inputs and states of these sizes."""
        width = 2 * state if "gates" in self.name else state
        return {"s": (state, width), "i": (features, width)}.get(self.name[0], (width,))  # of the state, the input


GRU: Final = (
    GRUVariable("state_to_gates", "U", "U_nl", "gates_state_norm"),
    GRUVariable("input_to_gates", "W", "Wc", "gates_x_norm"),
    GRUVariable("gates_bias", "b", "b_nl", ""),
    GRUVariable("state_to_proposal", "Ux", "Ux_nl", "proposal_state_norm"),
    GRUVariable("input_to_proposal", "Wx", "Wcx", "proposal_x_norm"),
    GRUVariable("proposal_bias", "bx", "bx_nl", ""),
)


def leaves(norm: Norm, scope: str = "") -> tuple[str, str]:
    """Nematus's names of the gain and the offset of a norm, below a scope."""
    gain, offset = ("new_std", "new_mean") if norm == "layer" else ("scale", "offset")
    return scope + gain, scope + offset


VERSIONS: Final = ("master", "v0.3", "v0.1", "theano")

# How the names of variables begin in models of version 0.1, and what is added to the first part. Deeper levels have no
# older names.
_V01: Final = (
    ("encoder/forward-stack/level0/gru0/", "encoder/forwardEncoder/", ""),
    ("encoder/backward-stack/level0/gru0/", "encoder/backwardEncoder/", ""),
    ("decoder/base/gru0/", "decoder/", ""),
    ("decoder/base/attention/", "decoder/", ""),
    ("decoder/base/gru1/", "decoder/", "_1"),
    ("decoder/embedding/", "decoder/y_embeddings_layer/", ""),
)

# Tensors of the trainer: they are in a checkpoint, but not part of the model.
_TRAINING: Final = ("time", "beta1_power", "beta2_power", "uidx", "history_errs", "zipped_params", "global_step")
_SLOTS: Final = ("/Adam", "/Adam_1", "/CTrainOpReplica", "/CTrainOpBackUpReplica")
_PREFIXES: Final = ("adam", "accum", "prior/", "loss/prior/")  # Theano's slots, sums of gradients, MAP training
_CONSTANT: Final = "decoder_c_tt"  # added to every score before the softmax, where it has no effect


def variables(config: Config) -> list[Variable]:
    """All variables of the model, sorted by name."""
    rnn = _rnn_of_zero if config.rules.is_zero else _rnn
    return sorted(_transformer(config) if config.model_type == "transformer" else rnn(config))


def check(op: str, config: Config, parameters: Mapping[str, Any]) -> list[Variable]:
    """The variables of the model, after a check that the parameters have exactly these names and shapes."""
    rows = variables(config)
    match(op, "the model", {row.name: row for row in rows}, {name: array.shape for name, array in parameters.items()})
    return rows


def match(op: str, source: str, wanted: Mapping[str, Variable], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if names or shapes are not as wanted."""
    missing, extra = sorted(wanted.keys() - shapes.keys()), sorted(shapes.keys() - wanted.keys())
    different = [name for name, row in wanted.items() if name in shapes and tuple(shapes[name]) != row.shape]
    fix, wrong = "is it the config of another model?", ""
    if missing:
        row, fix = wanted[missing[0]], f"it holds {_some(extra)} instead" if extra else fix
        wrong = f"{source} lacks {_some(missing)}, expected by the config as {row.name} {row.shape}"
    elif extra:
        wrong = f"{source} holds {_some(extra)} {tuple(shapes[extra[0]])}, and the config has no such variable"
    elif different:
        name, row = different[0], wanted[different[0]]
        wrong = f"{name} in {source} has shape {tuple(shapes[name])}, expected {row.shape} of {row.name} by the config"
    if wrong:
        raise errors.InputValueError(f"{op}: {wrong}; {fix}")


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def dotted(name: str) -> str:
    """A name with dots for slashes, as in the state dict of a module of PyTorch, which has an attribute ``forward``."""
    return ".".join("forward_" if part == "forward" else part for part in name.split("/"))


def slashed(name: str) -> str:
    """The way back of dotted."""
    return "/".join("forward" if part == "forward_" else part for part in name.split("."))


def is_of_training(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to the trainer and not to the model."""
    return name in _TRAINING or name == _CONSTANT or name.endswith(_SLOTS) or name.startswith(_PREFIXES)


def unused(config: Config) -> frozenset[str]:
    """Names of the biases of the encoder's transitions, which some versions keep in a checkpoint but never add."""
    if config.model_type == "transformer" or config.rules.is_zero:
        return frozenset()
    own = {row.name for row in variables(config)}
    rows = [row for row in variables(config.replace(dialect="theano")) if row.name not in own]
    return frozenset(name for row in rows for name in row.names if name is not None)


def _rnn(config: Config) -> Iterator[Variable]:
    s, e, v = config.state_size, config.target_embedding_size, config.target_vocab_size
    yield from _tables(config)
    for stack, odd in (("forward", "backward"), ("backward", "forward")):
        for level in range(config.rnn_enc_depth):
            # Theano names a level after its reading direction. In a stack the direction alternates.
            prefix = {"forward": "encoder_", "backward": "encoder_r_"}[odd if level % 2 else stack]
            prefix += f"{level + 1}_" if level else ""
            for j in range(config.rnn_enc_transition_depth):
                scope = f"encoder/{stack}-stack/level{level}/gru{j}/"
                size = 0 if j else s if level else config.embedding_size
                yield from _gru(config, scope, size, config.gru_bias("encoder", j), prefix, j)
    yield from _feed_forward(config, "decoder/initial_state_constructor", 2 * s, s, "ff_state")
    yield from _gru(config, "decoder/base/gru0/", e, config.gru_bias("base", 0), "decoder_", 0)
    for j in range(1, config.rnn_dec_base_transition_depth):  # after the attention
        scope, size = f"decoder/base/gru{j}/", 2 * s if j == 1 else 0
        yield from _gru(config, scope, size, config.gru_bias("base", j), "decoder_", j - 1, after_attention=True)
    scope = "decoder/base/attention/"
    for leaf, shape, theano, norm, bias in (
        ("state_to_hidden", (s, 2 * s), "decoder_W_comb_att", "hidden_state_norm", ()),
        ("context_to_hidden", (2 * s, 2 * s), "decoder_Wc_att", "hidden_context_norm", (f"{scope}hidden_bias",)),
        ("hidden_bias", (2 * s,), "decoder_b_att", "", ()),
        ("hidden_to_score", (2 * s, 1), "decoder_U_att", "", ()),
    ):
        yield _row(scope + leaf, shape, theano)
        if norm:
            yield from _norm(config, scope + norm, 2 * s, f"{theano}_ln", (scope + leaf, *bias))
    for level in range(config.rnn_dec_depth - 1):
        for j in range(config.rnn_dec_high_transition_depth):
            size = 0 if j else s + 2 * s * config.rnn_dec_deep_context
            scope = f"decoder/high/level{level}/gru{j}/"
            yield from _gru(config, scope, size, config.gru_bias("high", j), f"decoder_{level + 2}_", j)
    scope = "decoder/next_word_predictor/"
    for part, size, theano in (("prev_emb", e, "prev"), ("state", s, "lstm"), ("attended_context", 2 * s, "ctx")):
        yield from _feed_forward(config, f"{scope}{part}_to_hidden", size, e, f"ff_logit_{theano}")
    if config.output_hidden_activation == "prelu":
        yield _row(f"{scope}hidden_prelu/slope", (e,))
    logits = list(_feed_forward(config, f"{scope}hidden_to_logits", e, v, "ff_logit", norm=False))
    yield from logits[config.tie_decoder_embeddings :]  # if tied, W is the embeddings and only b is a variable
    if config.softmax_mixture_size > 1:
        yield from _feed_forward(config, f"{scope}hidden_to_pi_logits", e, config.softmax_mixture_size, norm=False)
        for k in range(config.softmax_mixture_size):
            yield from _feed_forward(config, f"{scope}hidden_to_mos_hidden_{k}", e, e)
    if config.rnn_lexical_model:
        yield from _feed_forward(config, "decoder/lexical", config.embedding_size, config.embedding_size)
        yield from _feed_forward(config, f"{scope}lexical_to_logits", e, v, norm=False)


def _gru(
    config: Config, scope: str, size: int, bias: Bias, prefix: str, index: int, *, after_attention: bool = False
) -> Iterator[Variable]:
    for row in GRU:  # a transition has no input, and the transitions of some encoders have no bias
        if (not size and row.name.startswith("input")) or (bias == "none" and row.name.endswith("bias")):
            continue
        theano = prefix + (row.theano_after_attention if after_attention else row.theano)
        theano += f"_drt_{index}" if index else ""
        shape = row.shape(size, config.state_size)
        yield _row(scope + row.name, shape, theano)
        if row.norm:
            side, _, part = row.name.partition("_to_")
            normalised = (scope + row.name, *([f"{scope}{part}_bias"] if bias == side else []))
            yield from _norm(config, scope + row.norm, shape[-1], theano + "_ln", normalised)


def _feed_forward(
    config: Config, scope: str, size: int, width: int, theano: str | None = None, *, norm: bool = True
) -> Iterator[Variable]:
    yield _row(f"{scope}/W", (size, width), theano and theano + "_W")
    yield _row(f"{scope}/b", (width,), theano and theano + "_b")
    if norm:
        yield from _norm(config, scope, width, theano and theano + "_ln_", (f"{scope}/W", f"{scope}/b"))


def _norm(
    config: Config, scope: str, width: int, theano: str | None, normalised: tuple[str, ...]
) -> Iterator[Variable]:
    """Gain and offset of a norm; in v0.3 they have the names that LayerNorm has everywhere."""
    names = zip(leaves(config.norm), leaves("layer"), ("s", "b"), strict=True)
    for name, old, letter in list(names)[: _norm_variables(config)]:
        row = _row(f"{scope}/{name}", (width,), theano and theano + letter, v03=f"{scope}/{old}")
        yield row._replace(normalised=normalised if letter == "s" else ())


def _norm_variables(config: Config) -> int:
    """How many variables a norm has: a gain, or a gain and an offset."""
    return 0 if config.norm == "none" else 1 + config.norm_offset


def _row(name: str, shape: tuple[int, ...], theano: str | None = None, *, v03: str | None = None) -> Variable:
    old = oldest = v03 or name
    for prefix, older, suffix in _V01:
        if old.startswith(prefix):
            first, slash, rest = old.removeprefix(prefix).partition("/")
            oldest = f"{older}{first}{suffix}{slash}{rest}"
    return Variable(name, shape, old, oldest, theano)


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


def _rnn_of_zero(config: Config) -> Iterator[Variable]:
    yield from _tables(config)
    for scope, inputs, width, has_bias in recurrent_maps(config.embedding_size, config.state_size):
        norms = 0 if scope.endswith("feed_logits") else _norm_variables(config)
        for i, size in enumerate(inputs):
            yield _row(f"{scope}/W_0_{i}", (size, width))
            for name in ("scale", "offset")[:norms]:
                yield _row(f"{scope}/ln_0_{i}/{name}", (width,))
        if has_bias:
            yield _row(f"{scope}/b_0", (width,))


def _tables(config: Config) -> Iterator[Variable]:
    """Embeddings; tied ones have one name for two uses. An RNNSearch of Nematus has other variables for the output."""
    has_theano = config.model_type == "rnn" and not config.rules.is_zero
    sizes = {
        table(config, "encoder", factor): (*size, f"Wemb{factor or ''}")
        for factor, size in enumerate(zip(config.source_vocab_sizes, config.dim_per_factor, strict=True))
    }
    of_target = (config.target_vocab_size, config.target_embedding_size, "Wemb_dec")
    sizes.setdefault(table(config, "decoder"), of_target)
    if not has_theano:
        sizes.setdefault(table(config, "softmax"), of_target)
    for name, (size, width, theano) in sizes.items():
        yield _row(name, (size, width), theano if has_theano else None)
    if config.rules.is_zero:
        yield _row(ZERO_BIAS, (config.embedding_size,))


def _transformer(config: Config) -> Iterator[Variable]:
    d, hidden = config.state_size, config.transformer_ffn_hidden_size
    attention = dict.fromkeys(("queries", "keys", "values", "context"), (d, d))
    of_itself = {"qkv": (d, 3 * d), "context": (d, d)} if config.rules.is_zero else attention
    blocks: dict[Block, Mapping[str, tuple[int, int]]] = {"self_attn": of_itself, "cross_attn": attention}
    blocks |= {"ffn": {"in": (d, hidden), "out": (hidden, d)}, "final": {}}
    yield from _tables(config)
    for stack, depth in (("encoder", config.transformer_enc_depth), ("decoder", config.transformer_dec_depth)):
        for number in range(1, depth + 1):
            for block, maps in blocks.items():
                is_last = number == depth and not config.rules.is_zero
                if (block == "cross_attn" and stack == "encoder") or (block == "final" and not is_last):
                    continue
                names = norm_of_block(config, block)[: _norm_variables(config)]
                names += gate(block) if config.relu_attention and block != "ffn" else ()
                shapes: dict[str | None, tuple[int, ...]] = dict.fromkeys(names, (d,))
                for part, shape in maps.items():
                    weight, bias = linear(config, block, part)
                    shapes |= {weight: shape, bias: shape[1:]}
                scope = layer(config, stack, number)
                yield from (_row(f"{scope}/{name}", shape) for name, shape in shapes.items() if name is not None)


def table(config: Config, use: Use, factor: int = 0) -> str:
    """Name of the embeddings for this use, of a factor of the source; tied embeddings have the name of another use."""
    if use == "softmax" and config.tie_decoder_embeddings:
        use = "decoder"
    if config.rules.is_zero:
        own = {"encoder": "src_embedding", "decoder": "tgt_embedding", "softmax": "softmax_embedding"}
        return "embedding" if config.tie_encoder_decoder_embeddings else own[use]
    if use == "decoder" and config.tie_encoder_decoder_embeddings:
        use = "encoder"
    layer = "softmax_projection" if use == "softmax" else f"{use}_embedding"
    of_transformer, of_rnn = f"transformer_model/{layer}_layer/embedding_table", f"{use}/embedding/embeddings"
    return (of_rnn if config.model_type == "rnn" else of_transformer) + (f"_{factor}" if factor else "")


def layer(config: Config, stack: str, number: int) -> str:
    """Name of a layer of ``encoder`` or ``decoder``; the first number is 1."""
    return f"{stack}/layer_{number - 1}" if config.rules.is_zero else f"transformer_model/{stack}/layer_{number}"


def norm_of_block(config: Config, block: Block) -> tuple[str, str]:
    """Names of the gain and of the offset of the norm of a block, below the name of the layer."""
    scope = f"{_BLOCKS[block][config.rules.is_zero]}/{'layer' if config.norm == 'layer' else 'rms'}_norm"
    return f"{scope}/scale", f"{scope}/offset"


def linear(config: Config, block: Block, part: str) -> tuple[str, str | None]:
    """Names of the matrix and of the bias of a linear map of a block, below that of the layer."""
    if config.rules.is_zero:
        scope = _FEED_FORWARD[part][1] if block == "ffn" else f"dot_attention/{_ATTENTION[part]}"
        return f"{_BLOCKS[block][1]}/{scope}/W_0_0", f"{_BLOCKS[block][1]}/{scope}/b_0"
    if block == "ffn":
        scope = _FEED_FORWARD[part][0]
        return f"{scope}/dense_layer_weights", f"{scope}/dense_layer_biases"
    return f"{block}_sublayer/{part}_projection/dense_layer_weights", None


def gate(block: Block) -> tuple[str, str]:
    """Names of the gain and of the gate of the gated RMSNorm after zero's ReLA, below the name of the layer."""
    scope = f"{_BLOCKS[block][1]}/dot_attention/post"
    return f"{scope}/scale", f"{scope}/gate"
