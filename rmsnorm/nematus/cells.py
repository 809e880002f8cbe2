"""The GRU and the LSTM of the authors' Theano programs, over the operations of any framework, and their parameters.

The module of each framework has ``gru`` and ``lstm``, which are these functions with its operations; PyTorch, Keras and
Flax have a layer of them, too: ``Recurrent``. Sequences are time-major, and keep their dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from rmsnorm.nematus.config import Norm
from rmsnorm.nematus.models.operations import Array, Arrays, Operations
from rmsnorm.nematus.models.parameters import PARTIAL, Parameters, check_norm, normalise, project
from rmsnorm.nematus.models.rnnsearch import masks_of, nematus_level
from rmsnorm.nematus.names import GRU, leaves
from rmsnorm.specification import errors

Kind: TypeAlias = Literal["gru", "lstm"]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

# The authors' names in the GRU of Nematus, which is the same cell, and the matrices of the gains s1 to s4.
_OF_NEMATUS: Final = {row.theano: row for row in GRU}
_NORMALISED: Final = ("W", "Wx", "U", "Ux")


def gru(
    ops: Operations, x: Array, h0: Array, parameters: Mapping[str, Array], *, mask: Array | None = None,
    norm: Norm = "none", partial: float = PARTIAL,
) -> Array:  # fmt: skip
    """The GRU of the authors' Theano code: ``gru``, ``lngru``, ``rlngru``.

        r, u = sigmoid(norm(h U; s3) + norm(x W + b; s1))
        h' = u h + (1 - u) tanh(r norm(h Ux; s4) + norm(x Wx + bx; s2)),    then m h' + (1 - m) h

    Args:
        ops: the operations of the framework, which its own function has already.
        x: (length, batch, features).
        h0: (batch, state).
        parameters: W, U, b, Wx, Ux, bx; with a norm the gains s1 to s4; with LayerNorm also the offsets b1 to b4.
        mask: m, (length, batch), any numbers.
        norm: ``none``, ``layer``, ``rms``, or ``prms`` over the first ``partial`` of the features.

    Returns:
        The states, (length, batch, state).

    Raises:
        ValueError: norm is none of these.
        KeyError: a parameter is missing.

    Source: Zhang & Sennrich 2019, layers.py.

    Example:
        >>> import numpy as np
        >>> from rmsnorm.nematus.numpy_models import gru
        >>> weights = {"W": np.ones((1, 2)), "U": np.ones((1, 2)), "b": np.zeros(2)}
        >>> weights |= {"Wx": np.ones((1, 1)), "Ux": np.ones((1, 1)), "bx": np.zeros(1)}
        >>> gru(np.zeros((2, 1, 1)), np.ones((1, 1)), weights, mask=np.array([[1.0], [0.0]])).round(4).ravel()
        array([0.8988, 0.8988])
    """
    check_norm(norm)
    own = {_nematus_name(name, norm): value for name, value in parameters.items()}
    p = Parameters(ops, own, norm, partial=partial)
    return nematus_level(p, x, h0, mask, biases=("input",), masking="carry")


def lstm(
    ops: Operations, x: Array, h0: Array, c0: Array, parameters: Mapping[str, Array], *, mask: Array | None = None,
    norm: Norm = "none", partial: float = PARTIAL,
) -> tuple[Array, Array]:  # fmt: skip
    """The LSTM of the authors' Theano code: ``lstm``, ``lnlstm``, ``rlnlstm``.

        i, f, o, g = norm(x W + b; s1) + norm(h U; s2) + b,    sigmoid of i, f, o and tanh of g
        c' = f c + i g,    then m c' + (1 - m) c;    h' = o tanh(norm(c'; s3)),    then m h' + (1 - m) h

    b is added twice, as in the authors' code. Arguments and errors are those of gru, but for:

    Args:
        h0, c0: (batch, state).
        parameters: W, U, b; with a norm the gains s1 to s3; with LayerNorm also the offsets b1 to b3.

    Returns:
        (h, c), both (length, batch, state).
    """
    check_norm(norm)
    p = Parameters(ops, parameters, norm, partial=partial)

    def step(state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        (h, c), (below, *own) = state, inputs
        i, f, o, g = ops.split(below + project(p, h, "U", None, ("s2", "b2")) + p["b"], 4)
        new_c = ops.sigmoid(f) * c + ops.sigmoid(i) * ops.tanh(g)
        for m in own:
            new_c = m * new_c + (1 - m) * c
        new_h = ops.sigmoid(o) * ops.tanh(normalise(p, new_c, "s3", "b3"))
        for m in own:
            new_h = m * new_h + (1 - m) * h
        return (new_h, new_c), ()

    h, c = ops.scan(step, (h0, c0), (project(p, x, "W", "b", ("s1", "b1")), *masks_of(p, mask, x)))[0]
    return h, c


def _nematus_name(name: str, norm: Norm) -> str:
    """The name that Nematus's GRU has for a parameter of the authors'."""
    if name in _OF_NEMATUS:
        return f"gru0/{_OF_NEMATUS[name].name}"
    row = _OF_NEMATUS[_NORMALISED[int(name[1]) - 1]]
    return f"gru0/{row.norm}/{leaves(norm)[name[0] == 'b']}"


def cell_shapes(kind: Kind, features: int, state: int, norm: Norm) -> Shapes:
    """The shapes of the parameters of a cell."""
    check_norm(norm)
    if kind not in ("gru", "lstm"):
        raise errors.not_a_choice("Recurrent", "kind", kind, ("gru", "lstm"))
    if kind == "gru":
        shapes = {row.theano: row.shape(features, state) for row in GRU}
        widths = [shapes[name][1] for name in _NORMALISED]
    else:
        shapes = {"W": (features, 4 * state), "U": (state, 4 * state), "b": (4 * state,)}
        widths = [4 * state, 4 * state, state]
    for letter in "sb"[: {"none": 0, "layer": 2}.get(norm, 1)]:
        shapes |= {f"{letter}{number}": (width,) for number, width in enumerate(widths, start=1)}
    return shapes


def new_parameters(kind: Kind, features: int, state: int, norm: Norm, seed: int) -> dict[str, Any]:
    """As Nematus begins: orthogonal squares for the state, numbers of size 0.01 for the input, gains 1, all else 0."""
    rng = np.random.default_rng(seed)

    def new(letter: str, shape: tuple[int, ...]) -> Any:
        if letter == "U":
            squares = [np.linalg.qr(rng.standard_normal((state, state))) for _ in range(shape[1] // state)]
            return np.hstack([q * np.sign(np.diag(r)) for q, r in squares])  # each is as likely as another
        return 0.01 * rng.standard_normal(shape) if letter == "W" else np.full(shape, float(letter == "s"))

    return {name: new(name[0], shape) for name, shape in cell_shapes(kind, features, state, norm).items()}


def first_states(kind: Kind, states: tuple[Any, ...], zeros: Any) -> tuple[Any, ...]:
    """The first states of a layer, or zeros where there are none."""
    return states or (zeros,) * (2 if kind == "lstm" else 1)
