"""How the parts of a Transformer are named in Nematus and in zero. No array library."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from rmsnorm.nematus.config import Config

Use: TypeAlias = Literal["encoder", "decoder", "softmax"]
Block: TypeAlias = Literal["self_attn", "cross_attn", "ffn", "final"]

ZERO_BIAS: Final = "bias"  # is added to the embeddings of source and target
_NORMS: Final[dict[Block, str]] = {
    "self_attn": "pre_self_attn_sublayer",
    "cross_attn": "pre_cross_attn_sublayer",
    "ffn": "pre_ffn_sublayer",
    "final": "final_transform",
}
_ZERO_BLOCKS: Final[dict[Block, str]] = {
    "self_attn": "self_attention",
    "cross_attn": "cross_attention",
    "ffn": "feed_forward",
}
_ZERO_MAPS: Final = {
    "queries": "q_map",
    "keys": "k_map",
    "values": "v_map",
    "qkv": "qkv_map",
    "context": "o_map",
    "in": "ffn_layer/enlarge",
    "out": "ffn_layer/output",
}


def transformer_table(config: Config, use: Use) -> str:
    """Name of the embeddings of a Transformer for this use; tied embeddings have the name of another use.

    >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 4}
    >>> config = Config(**sizes, model_type="transformer", norm="rms", transformer_num_heads=2)
    >>> transformer_table(config.replace(tie_decoder_embeddings=True), "softmax")
    'transformer_model/decoder_embedding_layer/embedding_table'
    >>> transformer_table(config.replace(dialect="zero"), "encoder")
    'src_embedding'
    """
    if use == "softmax" and config.tie_decoder_embeddings:
        use = "decoder"
    if config.dialect == "zero":
        own = {"encoder": "src_embedding", "decoder": "tgt_embedding", "softmax": "softmax_embedding"}
        return "embedding" if config.tie_encoder_decoder_embeddings else own[use]
    if use == "decoder" and config.tie_encoder_decoder_embeddings:
        use = "encoder"
    layer = "softmax_projection" if use == "softmax" else f"{use}_embedding"
    return f"transformer_model/{layer}_layer/embedding_table"


def transformer_layer(config: Config, stack: str, number: int) -> str:
    """Name of a layer of ``encoder`` or ``decoder``; the first number is 1.

    >>> sizes = {"embedding_size": 4, "state_size": 4, "source_vocab_sizes": (4,), "target_vocab_size": 4}
    >>> [transformer_layer(Config(**sizes, dialect=dialect), "encoder", 1) for dialect in ("tensorflow", "zero")]
    ['transformer_model/encoder/layer_1', 'encoder/layer_0']
    """
    return f"{stack}/layer_{number - 1}" if config.dialect == "zero" else f"transformer_model/{stack}/layer_{number}"


def transformer_norm(config: Config, block: Block) -> tuple[str, str]:
    """Names of the gain and of the offset of the norm of a block, below the name of the layer."""
    scope = _ZERO_BLOCKS[block] if config.dialect == "zero" else _NORMS[block]
    norm = "layer_norm" if config.norm == "layer" else "rms_norm"
    return f"{scope}/{norm}/scale", f"{scope}/{norm}/offset"


def transformer_map(config: Config, block: Block, part: str) -> tuple[str, str | None]:
    """Names of the matrix and of the bias of a linear map of a block, below the name of the layer.

    part: of attention ``queries``, ``keys``, ``values``, ``context``, in zero ``qkv`` for the first three to itself; of
    ``ffn`` ``in`` and ``out``.
    """
    if config.dialect == "zero":
        attention = "" if block == "ffn" else "dot_attention/"
        scope = f"{_ZERO_BLOCKS[block]}/{attention}{_ZERO_MAPS[part]}"
        return f"{scope}/W_0_0", f"{scope}/b_0"
    if block == "ffn":
        scope = {"in": "ff_layer_1", "out": "ff_layer_2"}[part]
        return f"{scope}/dense_layer_weights", f"{scope}/dense_layer_biases"
    return f"{block}_sublayer/{part}_projection/dense_layer_weights", None


def transformer_gate(block: Block) -> tuple[str, str]:
    """Names of the gain and of the gate of the gated RMSNorm after zero's ReLA, below the name of the layer."""
    scope = f"{_ZERO_BLOCKS[block]}/dot_attention/post"
    return f"{scope}/scale", f"{scope}/gate"
