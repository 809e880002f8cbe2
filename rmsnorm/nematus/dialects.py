"""The table of the dialects: what the models of each do in their own way. Loads no array library."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

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
