"""The parameters of the recurrent cells: their names, their shapes and their dropout rates. No array library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from rmsnorm.nematus.config import Bias, Config, Norm
from rmsnorm.specification import errors

CellNorm: TypeAlias = Norm
Shapes: TypeAlias = dict[str, tuple[int, ...]]
Initial: TypeAlias = Literal["zeros", "ones", "normal", "orthogonal"]

NORMS: Final = get_args(Norm)
EPS: Final = 1e-5  # of Nematus and of the authors' layers.py
PARTIAL: Final = 0.0625  # of pRMSNorm in the paper

# Where the output embeddings are tied there is no parameter of this name, but there is a dropout mask.
TIED: Final = "decoder/next_word_predictor/hidden_to_logits/W"


class GRUVariable(NamedTuple):
    """A variable of a GRU."""

    name: str
    theano: str  # in Theano Nematus, and in the authors' code
    theano_after_attention: str
    norm: str  # the scope of the norm of its product, empty if there is none

    def shape(self, features: int, state: int) -> tuple[int, ...]:
        """The shape for inputs and states of these sizes."""
        width = 2 * state if "gates" in self.name else state
        side = self.name.partition("_")[0]
        return {"state": (state, width), "input": (features, width)}.get(side, (width,))


GRU: Final = (
    GRUVariable("state_to_gates", "U", "U_nl", "gates_state_norm"),
    GRUVariable("input_to_gates", "W", "Wc", "gates_x_norm"),
    GRUVariable("gates_bias", "b", "b_nl", ""),
    GRUVariable("state_to_proposal", "Ux", "Ux_nl", "proposal_state_norm"),
    GRUVariable("input_to_proposal", "Wx", "Wcx", "proposal_x_norm"),
    GRUVariable("proposal_bias", "bx", "bx_nl", ""),
)


def gru_rows(bias: Bias, *, has_input: bool) -> Iterator[GRUVariable]:
    """The variables of a GRU: a transition has no input, and the transitions of some encoders have no bias."""
    for row in GRU:
        if (has_input or not row.name.startswith("input")) and (bias != "none" or not row.name.endswith("bias")):
            yield row


# The authors' orders: of the parameters, and of the norms that the gains s1 to s4 and the offsets b1 to b4 belong to.
_AUTHORS_ORDER: Final = ("W", "U", "b", "Wx", "Ux", "bx")
_AUTHORS_NORMS: Final = ("W", "Wx", "U", "Ux")

# Matrices that multiply embeddings, or vectors of the size of embeddings; all others multiply states.
_MULTIPLY_EMBEDDINGS: Final = (
    "encoder/forward-stack/level0/gru0/input_",
    "encoder/backward-stack/level0/gru0/input_",
    "decoder/base/gru0/input_",
    *(f"decoder/next_word_predictor/{part}_to_" for part in ("prev_emb", "hidden", "lexical")),
)


def check_norm(norm: str) -> None:
    """Raise ValueError if a cell cannot have this norm."""
    if norm not in NORMS:
        raise errors.not_a_choice("recurrent", "norm", norm, NORMS)


def leaves(norm: CellNorm, scope: str = "") -> tuple[str, str]:
    """Nematus's names of the gain and the offset of a norm, below a scope."""
    gain, offset = ("new_std", "new_mean") if norm == "layer" else ("scale", "offset")
    return scope + gain, scope + offset


def dotted(name: str) -> str:
    """A name with dots for slashes, as in the state dict of a module of PyTorch, which has an attribute ``forward``."""
    return ".".join("forward_" if part == "forward" else part for part in name.split("/"))


def slashed(name: str) -> str:
    """The way back of dotted."""
    return "/".join("forward" if part == "forward_" else part for part in name.split("."))


def initial(name: str) -> Initial:
    """What a parameter of a new cell is, as in Nematus: numbers, normal ones of size 0.01, or orthogonal squares."""
    leaf = name.rpartition("/")[2]
    if leaf.startswith(("U", "state")):
        return "orthogonal"
    if leaf.startswith(("W", "input")):
        return "normal"
    return "ones" if leaf[0] == "s" or leaf == "new_std" else "zeros"


def authors_gru(parameters: Mapping[str, Any], norm: CellNorm) -> dict[str, Any]:
    """The parameters of the authors' GRU under Nematus's names; it is the same cell."""
    names = _gru_names(norm)
    return {names[name]: value for name, value in parameters.items()}


def _gru_names(norm: CellNorm) -> dict[str, str]:
    rows = {row.theano: row for row in GRU}
    names = {name: f"gru0/{rows[name].name}" for name in _AUTHORS_ORDER}
    for index, name in enumerate(_AUTHORS_NORMS, start=1):
        names[f"s{index}"], names[f"b{index}"] = leaves(norm, f"gru0/{rows[name].norm}/")
    return names


def nematus_gru_shapes(features: int, state: int, biases: Sequence[Bias], norm: CellNorm) -> Shapes:
    """Shapes of the parameters of Nematus's GRU with deep transition; ``biases`` as for nematus_gru."""
    check_norm(norm)
    shapes: Shapes = {}
    for index, bias in enumerate(biases):
        for row in gru_rows(bias, has_input=index == 0):
            shape = shapes[f"gru{index}/{row.name}"] = row.shape(features, state)
            if row.norm:
                shapes |= _norm_shapes(norm, leaves(norm, f"gru{index}/{row.norm}/"), shape[-1])
    return shapes


def gru_shapes(features: int, state: int, norm: CellNorm) -> Shapes:
    """Shapes of the parameters of the authors' GRU."""
    shapes = nematus_gru_shapes(features, state, ["input"], norm)
    return {name: shapes[nematus] for name, nematus in _gru_names(norm).items() if nematus in shapes}


def lstm_shapes(features: int, state: int, norm: CellNorm) -> Shapes:
    """Shapes of the parameters of the authors' LSTM."""
    check_norm(norm)
    width = 4 * state
    shapes: Shapes = {"W": (features, width), "U": (state, width), "b": (width,)}
    for index, size in enumerate((width, width, state), start=1):
        shapes |= _norm_shapes(norm, (f"s{index}", f"b{index}"), size)
    return shapes


def _norm_shapes(norm: CellNorm, names: tuple[str, str], width: int) -> Shapes:
    """Shapes of gain and offset; only LayerNorm has both."""
    return dict.fromkeys(names[: {"none": 0, "layer": 2}.get(norm, 1)], (width,))


def rates(config: Config, names: Iterable[str]) -> dict[str, float]:
    """Dropout rates by the names of the masks: of inputs of matrices, of words, and of what the lexical model reads."""
    embedding, hidden = config.rnn_dropout_embedding, config.rnn_dropout_hidden
    of_matrices = {name: embedding if name.startswith(_MULTIPLY_EMBEDDINGS) else hidden for name in (*names, TIED)}
    of_words = {"source words": config.rnn_dropout_source, "target words": config.rnn_dropout_target}
    return of_matrices | of_words | {"decoder/lexical": embedding}
