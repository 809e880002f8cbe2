"""What the parameters of the recurrent cells are called in every wing, how large they are, and what drops out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from rmsnorm import errors

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Norm: TypeAlias = Literal["none", "layer", "rms", "prms"]
Bias: TypeAlias = Literal["input", "state", "outside", "none"]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

NORMS: Final = ("none", "layer", "rms", "prms")
EPS: Final = 1e-5  # Nematus's, and that of the authors' layers.py
PARTIAL: Final = 0.0625  # of pRMSNorm in the paper

# No parameter where embeddings stand for it, but it has a dropout of its own.
TIED: Final = "decoder/next_word_predictor/hidden_to_logits/W"

# The authors' names of what Nematus's GRU has too; the gains are s1 to s4, and the offsets of LayerNorm b1 to b4.
_GRU: Final = {
    "W": "gru0/input_to_gates",
    "U": "gru0/state_to_gates",
    "b": "gru0/gates_bias",
    "Wx": "gru0/input_to_proposal",
    "Ux": "gru0/state_to_proposal",
    "bx": "gru0/proposal_bias",
}
_GRU_NORMS: Final = ("gates_x_norm", "proposal_x_norm", "gates_state_norm", "proposal_state_norm")

# Matrices that multiply embeddings, or what is as long as one; the others multiply states.
_OF_WORDS: Final = (
    "encoder/forward-stack/level0/gru0/input_",
    "encoder/backward-stack/level0/gru0/input_",
    "decoder/base/gru0/input_",
    *(f"decoder/next_word_predictor/{part}_to_" for part in ("prev_emb", "hidden", "lexical")),
)


def check_norm(norm: str) -> None:
    """Raise ValueError where a cell cannot have that norm."""
    if norm not in NORMS:
        raise errors.not_a_choice("recurrent", "norm", norm, NORMS)


def leaves(norm: Norm, scope: str = "") -> tuple[str, str]:
    """What Nematus calls gain and offset of the norm below that scope.

    >>> leaves("rms", "gates_x_norm/")
    ('gates_x_norm/scale', 'gates_x_norm/offset')
    """
    gain, offset = ("new_std", "new_mean") if norm == "layer" else ("scale", "offset")
    return scope + gain, scope + offset


def gru_names(norm: Norm) -> dict[str, str]:
    """Nematus's names by those of the authors' GRU, which is the same.

    >>> gru_names("rms")["s3"]
    'gru0/gates_state_norm/scale'
    """
    names = dict(_GRU)
    for index, scope in enumerate(_GRU_NORMS, start=1):
        names[f"s{index}"], names[f"b{index}"] = leaves(norm, f"gru0/{scope}/")
    return names


def nematus_gru_shapes(features: int, state: int, biases: Sequence[Bias], norm: Norm) -> Shapes:
    """Of Nematus's GRU with deep transition; ``biases`` as for nematus_gru.

    >>> nematus_gru_shapes(3, 4, ["none"], "none")["gru0/input_to_gates"]
    (3, 8)

    Raises:
        ValueError: the norm is none of NORMS.
    """
    check_norm(norm)
    shapes: Shapes = {}
    for index, bias in enumerate(biases):
        for part, width in (("gates", 2 * state), ("proposal", state)):
            sides = (("state", "state", state), ("input", "x", features))
            for side, letter, size in sides[: 1 if index else 2]:  # transitions have no input
                shapes[f"gru{index}/{side}_to_{part}"] = (size, width)
                shapes |= _norm_shapes(norm, leaves(norm, f"gru{index}/{part}_{letter}_norm/"), width)
            if bias != "none":
                shapes[f"gru{index}/{part}_bias"] = (width,)
    return shapes


def gru_shapes(features: int, state: int, norm: Norm) -> Shapes:
    """Of the authors' GRU.

    >>> gru_shapes(3, 4, "rms")["s1"]
    (8,)

    Raises:
        ValueError: the norm is none of NORMS.
    """
    given, names = nematus_gru_shapes(features, state, ["input"], norm), gru_names(norm)
    return {name: given[other] for name, other in names.items() if other in given}


def lstm_shapes(features: int, state: int, norm: Norm) -> Shapes:
    """Of the authors' LSTM.

    >>> sorted(lstm_shapes(3, 4, "rms"))
    ['U', 'W', 'b', 's1', 's2', 's3']

    Raises:
        ValueError: the norm is none of NORMS.
    """
    check_norm(norm)
    wide = 4 * state
    shapes: Shapes = {"W": (features, wide), "U": (state, wide), "b": (wide,)}
    for index, width in enumerate((wide, wide, state), start=1):
        shapes |= _norm_shapes(norm, (f"s{index}", f"b{index}"), width)
    return shapes


def _norm_shapes(norm: Norm, names: tuple[str, str], width: int) -> Shapes:
    """Of gain and offset; only LayerNorm has both."""
    return dict.fromkeys(names[: {"none": 0, "layer": 2}.get(norm, 1)], (width,))


def rates(config: Config, names: Iterable[str]) -> dict[str, float]:
    """Of the dropout of what each matrix multiplies, by its name; of words; and of what the lexical model looks at."""
    found = {
        name: config.rnn_dropout_embedding if name.startswith(_OF_WORDS) else config.rnn_dropout_hidden
        for name in (*names, TIED)
    }
    words = {"source words": config.rnn_dropout_source, "target words": config.rnn_dropout_target}
    return found | words | {"decoder/lexical": config.rnn_dropout_embedding}
