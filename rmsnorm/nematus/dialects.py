"""What follows from the rules of a dialect for one model, and its names in a Transformer. No array library."""

from __future__ import annotations

import math
from typing import Final, Literal, TypeAlias

from rmsnorm.nematus.config import Config
from rmsnorm.nematus.rules import NOTHING, RULES, Rules

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


def rules(config: Config) -> Rules:
    """The rules that a model follows."""
    return RULES[config.dialect]


def first_word(config: Config) -> int:
    """The id that precedes the first word of the target."""
    return rules(config).go if config.model_type == "transformer" else NOTHING


def label_target(config: Config, *, training: bool) -> tuple[float, float, float]:
    """The target of label smoothing at the right word and at others, and what is subtracted from the loss of a word.

    A Transformer smooths in training only. All but Nematus's RNNSearch subtract the smallest loss that is possible.
    """
    rate, size = config.label_smoothing, config.target_vocab_size
    if config.model_type == "rnn" and not rules(config).smooths_from_zero:
        wrong = rate / size
        return 1 - rate + wrong, wrong, 0.0
    if config.model_type == "transformer" and not training:
        rate = 0.0
    right, wrong = 1.0 - rate, rate / (size - 1)
    return right, wrong, -right * math.log(right) - rate * math.log(wrong + 1e-20) if rate else 0.0


def table(config: Config, use: Use, factor: int = 0) -> str:
    """Name of the embeddings for this use, of a factor of the source; tied embeddings have the name of another use."""
    if use == "softmax" and config.tie_decoder_embeddings:
        use = "decoder"
    if rules(config).nested:
        own = {"encoder": "src_embedding", "decoder": "tgt_embedding", "softmax": "softmax_embedding"}
        return "embedding" if config.tie_encoder_decoder_embeddings else own[use]
    if use == "decoder" and config.tie_encoder_decoder_embeddings:
        use = "encoder"
    layer = "softmax_projection" if use == "softmax" else f"{use}_embedding"
    of_transformer, of_rnn = f"transformer_model/{layer}_layer/embedding_table", f"{use}/embedding/embeddings"
    return (of_rnn if config.model_type == "rnn" else of_transformer) + (f"_{factor}" if factor else "")


def layer(config: Config, stack: str, number: int) -> str:
    """Name of a layer of ``encoder`` or ``decoder``; the first number is 1."""
    return f"{stack}/layer_{number - 1}" if rules(config).nested else f"transformer_model/{stack}/layer_{number}"


def norm(config: Config, block: Block) -> tuple[str, str]:
    """Names of the gain and of the offset of the norm of a block, below the name of the layer."""
    scope = f"{_BLOCKS[block][rules(config).nested]}/{'layer' if config.norm == 'layer' else 'rms'}_norm"
    return f"{scope}/scale", f"{scope}/offset"


def linear(config: Config, block: Block, part: str) -> tuple[str, str | None]:
    """Names of the matrix and of the bias of a linear map of a block, below that of the layer."""
    if rules(config).nested:
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
