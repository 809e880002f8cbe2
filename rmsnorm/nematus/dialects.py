"""What the models of each dialect do in their own way, as one table of differences. No array library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config, Dialect

NOTHING: Final = -1  # the id that stands for a vector of zeros


class Rules(NamedTuple):
    """The rules of a dialect. The defaults are those of Nematus master.

    Attributes:
        masking: what a GRU of the encoder does at a masked word: its state becomes ``zero``, or it stays (``carry``).
        scores_otherwise: whether scoring differs from decoding in deep decoders: their states begin with zeros, and
            there is no residual connection around the first high level.
        own_recurrent: whether its RNNSearch has cells, attention and maps of its own.
        go: the id that precedes the first word of a Transformer.
        embedding_bias: the name of what is added to the embeddings of source and target, if there is such a thing.
        post_norm: whether the norms of a Transformer follow the sums; else they precede the blocks, and one more is at
            the end of each stack.
        joint_maps: whether one map makes queries, keys and values of attention to itself.
        drops_hidden: whether the dropout of a feed-forward block is of its hidden layer; else it is of its input.
        mean_loss: whether the loss is a mean over the words of a sentence, and not their sum.
        pads_with_zero: whether the id 0 is padding: places that are padding in all sentences are left out, words that
            are 0 do not count in the loss, and a search that chose 0 for all sentences begins anew.
    """

    masking: Literal["zero", "carry"] = "zero"
    scores_otherwise: bool = False
    own_recurrent: bool = False
    go: int = 1
    embedding_bias: str = ""
    post_norm: bool = False
    joint_maps: bool = False
    drops_hidden: bool = False
    mean_loss: bool = False
    pads_with_zero: bool = False


RULES: Final[dict[Dialect, Rules]] = {
    "tensorflow": Rules(),
    "tensorflow-v0.3": Rules(scores_otherwise=True),
    "theano": Rules(masking="carry"),
    "zero": Rules(
        own_recurrent=True, go=NOTHING, embedding_bias="bias", post_norm=True, joint_maps=True, drops_hidden=True,
        mean_loss=True, pads_with_zero=True,
    ),
}  # fmt: skip


def rules(config: Config) -> Rules:
    """The rules that a model follows."""
    return RULES[config.dialect]


def first_word(config: Config) -> int:
    """The id that precedes the first word of the target."""
    return rules(config).go if config.model_type == "transformer" else NOTHING
