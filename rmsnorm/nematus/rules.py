"""The table of the dialects: what the models of each do in their own way, and what their files are like."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Dialect = Literal["tensorflow", "tensorflow-v0.3", "theano", "zero"]

NOTHING: Final = -1  # the id that stands for a vector of zeros
ZERO_BIAS: Final = "bias"  # is added to the embeddings of source and target


class Rules(NamedTuple):
    """The rules of a dialect. The defaults are those of Nematus master."""

    # What the model computes.
    masking: Literal["zero", "carry"] = "zero"  # what a masked word does to states of the encoder: zeros, or nothing
    version: str = "master"  # what ``port info`` calls it
    # Deep decoders score with states that begin with zeros, and no residual connection around the first high level.
    scores_otherwise: bool = False
    own_recurrent: bool = False  # RNNSearch has cells, attention and maps of its own
    go: int = 1  # the id that precedes the first word of a Transformer
    embedding_bias: str = ""  # the name of what is added to the embeddings of source and target, if anything is
    # The norms of a Transformer follow the sums; else they precede the blocks, and one more ends each stack.
    post_norm: bool = False
    joint_maps: bool = False  # one map makes queries, keys and values of attention to itself
    drops_hidden: bool = False  # dropout of a feed-forward block is of its hidden layer; else it is of its input
    mean_loss: bool = False  # the loss is a mean over the words of a sentence, and not their sum
    # The id 0 is padding: places that are padding in all sentences are left out, words that are 0 do not count in the
    # loss, and a search that chose 0 for all sentences begins anew.
    pads_with_zero: bool = False
    transition_bias: Literal["none", "outside"] = "none"  # where the encoder's transitions, and high levels, add a bias
    smooths_from_zero: bool = False  # an RNNSearch with smoothed labels subtracts the smallest loss that is possible
    has_relu_attention: bool = False  # a Transformer may have ReLA
    ties_all: bool = False  # embeddings that encoder and decoder share serve the output, too
    has_factors: bool = True  # a source may have several factors
    has_odd_states: bool = False  # the size of a Transformer may be odd
    has_rms_offsets: bool = True  # RMSNorm may have offsets; else they become parts of biases
    scores_smoothed: bool = True  # a score has the label smoothing of the options
    # How it searches.
    wide_beams: bool = False  # the beam may be wider than the vocabulary of the target
    searches: tuple[str, ...] = ("sampler", "costs")
    old_search: str = "costs"  # the search of a model whose options have no translation_strategy
    source_lengthens: bool = False  # a translation may have so many words more than its source; else so many at all
    end: int = 0  # the id that ends a sentence
    unknown: int = 1  # the id of unknown words in a translation
    drops_empty: bool = False  # an empty line gets an empty translation, without the model
    leaves_small_batches: bool = False  # batches that are too small wait for more lines
    space_at_end: bool = True  # a translation that has ended is followed by a space
    # What its files are like.
    system: Literal["nematus", "zero"] = "nematus"  # the command that converts it
    own_options: bool = False  # names of options, the file they are in and the dictionaries are those of zero.py
    average: str = "_smooth"  # how the names of averages end
    nested: bool = False  # variables of a block have a scope of the block, and embeddings have none
    names_norm: bool = False  # the names of all norms say which one it is
    ambiguous_norm: bool = False  # LayerNorm and RMSNorm with offsets have the same names
    checkpoint: str = "model.npz"  # the name of a converted checkpoint
    has_theano: bool = True  # Theano Nematus has such models


RULES: Final[dict[Dialect, Rules]] = {
    "tensorflow": Rules(unknown=2),
    "tensorflow-v0.3": Rules(version="v0.3", scores_otherwise=True),
    "theano": Rules(
        version="Theano", masking="carry", transition_bias="outside", old_search="sampler", ambiguous_norm=True
    ),
    "zero": Rules(
        own_recurrent=True, go=NOTHING, embedding_bias=ZERO_BIAS, post_norm=True, joint_maps=True, drops_hidden=True,
        mean_loss=True, pads_with_zero=True, smooths_from_zero=True, has_relu_attention=True, has_factors=False,
        ties_all=True, has_odd_states=True, has_rms_offsets=False, scores_smoothed=False,
        searches=("zero",), source_lengthens=True, wide_beams=True, end=2, drops_empty=True,
        leaves_small_batches=True, space_at_end=False,
        version="zero", system="zero", own_options=True, average="/ExponentialMovingAverage",
        nested=True, names_norm=True, checkpoint="model-0", has_theano=False,
    ),
}  # fmt: skip


def rules_of(dialect: object) -> Rules:
    """The rules of this name, which may be anything in a file; those of master for another one, refused by Config."""
    return next((own for name, own in RULES.items() if name == dialect), Rules())
