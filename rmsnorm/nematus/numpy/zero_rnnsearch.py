"""What zero's RNNSearch does in its own way, in NumPy, the golden: another cell, attention and loss, with gradients.

Sequences are time-major: words (length, batch, features), masks (length, batch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from rmsnorm.nematus.numpy.output import embed
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, identity, project, rows, sigmoid
from rmsnorm.nematus.transformer_names import ZERO_BIAS, Use, transformer_table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config

Memory = tuple[Array, Array, Array, Array]


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array) -> tuple[Array, Callable[[Array], None]]:
    """Logits of the target words. After the end of a sentence the states stay."""
    memory, initial, source_pullback = attend_to(p, config, x, mask)
    words, words_pullback = _embed(p, config, "decoder", y[:-1])
    words = np.concatenate((np.zeros((1, *words.shape[1:])), words))  # a zero vector precedes the first word
    words, drop_pullback = _drop(p, config, words)
    logits, _, decode_pullback = decode(p, config, memory, [initial], words, (y != 0).astype(words.dtype))

    def pullback(dlogits: Array) -> None:
        dwords, dinitial, dcontext, dhidden = decode_pullback(dlogits)
        words_pullback(drop_pullback(dwords)[1:])
        source_pullback(dcontext, dhidden, dinitial)

    return logits, pullback


def attend_to(
    p: Parameters, config: Config, x: Array, mask: Array
) -> tuple[Memory, Array, Callable[[Array, Array, Array], None]]:
    """What the decoder reads of the source, as the fields of _Memory, and the initial state of the decoder.

    The pullback takes the gradients of the context, of its part of the attention's hidden layer, and of the state.
    """
    embeddings, embed_pullback = _embed(p, config, "encoder", x[0])
    words, drop_pullback = _drop(p, config, embeddings)
    forward, forward_pullback = _level(p / "encoder/forward", config, words, mask)
    backward, backward_pullback = _level(p / "encoder/backward", config, words[::-1], mask[::-1])
    backward = backward[::-1]
    context = np.concatenate((forward, backward), axis=-1)
    last = np.concatenate((forward[-1], backward[0]), axis=-1)
    layer, layer_pullback = _linear(p / "decoder_initializer/gru_init", [last])
    hidden, hidden_pullback = _linear(p / "decoder/context_att", [context])
    initial = np.tanh(layer)

    def pullback(dcontext: Array, dhidden: Array, dinitial: Array) -> None:
        dcontext = dcontext + hidden_pullback(dhidden)[0]
        dforward, dbackward = (part.copy() for part in np.split(dcontext, 2, axis=-1))
        first, second = np.split(layer_pullback(dinitial * (1 - initial**2))[0], 2, axis=-1)
        dforward[-1] += first
        dbackward[0] += second
        embed_pullback(drop_pullback(forward_pullback(dforward) + backward_pullback(dbackward[::-1])[::-1]))

    return (context, hidden, embeddings, mask), initial, pullback


def decode(
    p: Parameters, config: Config, memory: Memory, states: list[Array], words: Array, mask: Array | None = None
) -> tuple[Array, list[Array], Callable[[Array], tuple[Array, Array, Array, Array]]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last state.

    The pullback returns the gradients of the words, of the first state, of the context and of its hidden layer.
    """
    decoder, h = p / "decoder", states[0]
    from_words, words_pullback = _fetch(decoder / "fetch_state_gru_lower", words)
    masks = np.ones((*words.shape[:2], 1)) if mask is None else mask[..., None]
    steps, pullbacks = [], []
    for gates, proposal, m in zip(*from_words, masks, strict=True):
        h, attended, step_pullback = _step(decoder, config, memory, h, (gates, proposal), m)
        steps.append((h, attended))
        pullbacks.append(step_pullback)
    top, contexts = (np.stack(arrays) for arrays in zip(*steps, strict=True))
    layer, layer_pullback = _linear(p / "pre_logits", [top, contexts, words])
    feature = np.tanh(layer)
    dropped, drop_pullback = _drop(p, config, feature)
    table = transformer_table(config, "softmax")

    def pullback(dlogits: Array) -> tuple[Array, Array, Array, Array]:
        p.add(table, rows(dlogits).T @ rows(dropped))
        dtop, dcontexts, dwords = layer_pullback(drop_pullback(dlogits @ p[table]) * (1 - feature**2))
        dgates, dproposal = (np.zeros_like(part) for part in from_words)
        dcontext, dhidden, dh = np.zeros_like(memory[0]), np.zeros_like(memory[1]), np.zeros_like(h)
        for t in reversed(range(len(words))):
            dh, dgates[t], dproposal[t], from_context, from_hidden = pullbacks[t](dh + dtop[t], dcontexts[t])
            dcontext += from_context
            dhidden += from_hidden
        return dwords + words_pullback(dgates, dproposal), dh, dcontext, dhidden

    return dropped @ p[table].T, [h], pullback


def _step(
    p: Parameters, config: Config, memory: Memory, h: Array, from_word: tuple[Array, Array], m: Array
) -> tuple[Array, Array, Callable[[Array, Array], tuple[Array, Array, Array, Array, Array]]]:
    """One step of the decoder: the new state and the attended context."""
    s, lower_pullback = _cell(p / "cell_gru_lower", h, from_word, m)
    attended, attend_pullback = _attend(p / "attention", config, s, memory)
    from_context, context_pullback = _fetch(p / "fetch_state_gru_higher", attended)
    new, higher_pullback = _cell(p / "cell_gru_higher", s, from_context, m)

    def pullback(dnew: Array, dattended: Array) -> tuple[Array, Array, Array, Array, Array]:
        ds, *dfrom = higher_pullback(dnew)
        from_query, dcontext, dhidden = attend_pullback(dattended + context_pullback(*dfrom))
        dh, dgates, dproposal = lower_pullback(ds + from_query)
        return dh, dgates, dproposal, dcontext, dhidden

    return new, attended, pullback


def _attend(
    p: Parameters, config: Config, s: Array, memory: Memory
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """sum_t w_t context_t, w = softmax over the words of v tanh(hidden_t + norm(s W) + b), padding masked."""
    context, of_context, _, mask = memory
    query, query_pullback = _linear(p / "feed_query", [s])
    hidden = np.tanh(of_context + query)
    feed = p / "feed_logits"
    scores = (hidden @ feed["W_0_0"])[..., 0] + feed["b_0"] + (1 - mask) * config.masked_score
    weights = np.exp(scores - scores.max(axis=0))
    weights /= weights.sum(axis=0)

    def pullback(dattended: Array) -> tuple[Array, Array, Array]:
        dweights = (context * dattended).sum(axis=-1)
        dscores = weights * (dweights - (weights * dweights).sum(axis=0))
        feed.add("W_0_0", np.einsum("sbh,sb->h", hidden, dscores)[:, None])
        feed.add("b_0", dscores.sum(keepdims=True)[0])
        dhidden = dscores[..., None] * feed["W_0_0"][:, 0] * (1 - hidden**2)
        return query_pullback(dhidden.sum(axis=0))[0], weights[..., None] * dattended, dhidden

    return (context * weights[..., None]).sum(axis=0), pullback


def _level(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Array, Pullback]:
    """A GRU over a sequence, from zeros; the states of masked words are those before them."""
    from_words, words_pullback = _fetch(p / "fetch_state_gru", x)
    h = np.zeros((x.shape[1], config.state_size), x.dtype)
    states, pullbacks = [], []
    for gates, proposal, m in zip(*from_words, mask[..., None], strict=True):
        h, cell_pullback = _cell(p / "cell_gru", h, (gates, proposal), m)
        states.append(h)
        pullbacks.append(cell_pullback)

    def pullback(dstates: Array) -> Array:
        dgates, dproposal = (np.zeros_like(part) for part in from_words)
        dh = np.zeros_like(h)
        for t in reversed(range(len(x))):
            dh, dgates[t], dproposal[t] = pullbacks[t](dh + dstates[t])
        return words_pullback(dgates, dproposal)

    return np.stack(states), pullback


def _fetch(p: Parameters, x: Array) -> tuple[tuple[Array, Array], Callable[[Array, Array], Array]]:
    """What the input of a GRU adds to its gates and to its proposal, for any number of steps at once."""
    gates, gates_pullback = _linear(p / "gate_x", [x])
    proposal, proposal_pullback = _linear(p / "hide_x", [x])
    return (gates, proposal), lambda dgates, dproposal: gates_pullback(dgates)[0] + proposal_pullback(dproposal)[0]


def _cell(
    p: Parameters, h: Array, from_input: tuple[Array, Array], m: Array
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """One step of a GRU; its pullback returns the gradients of h and of both parts of ``from_input``.

    z, r = sigmoid(norm(h U) + b + gates);   h' = z h + (1 - z) tanh(norm((r h) Ux) + bx + proposal);   m h' + (1 - m) h
    """
    gates, gates_pullback = _linear(p / "gate_h", [h])
    z, r = np.split(sigmoid(from_input[0] + gates), 2, axis=-1)
    proposal, proposal_pullback = _linear(p / "hide_h", [r * h])
    n = np.tanh(from_input[1] + proposal)

    def pullback(dout: Array) -> tuple[Array, Array, Array]:
        dnew = m * dout
        dproposal = dnew * (1 - z) * (1 - n**2)
        dreset = proposal_pullback(dproposal)[0]
        dgates = np.concatenate((dnew * (h - n) * z * (1 - z), dreset * h * r * (1 - r)), axis=-1)
        dh = (1 - m) * dout + dnew * z + dreset * r + gates_pullback(dgates)[0]
        return dh, dgates, dproposal

    return m * (z * h + (1 - z) * n) + (1 - m) * h, pullback


def _linear(p: Parameters, xs: list[Array]) -> tuple[Array, Callable[[Array], list[Array]]]:
    """sum_i norm(x_i W_i), plus a bias where there is one."""
    norms = [(f"ln_0_{i}/scale", f"ln_0_{i}/offset") for i in range(len(xs))]
    products = [project(p, x, f"W_0_{i}", None, norms[i]) for i, x in enumerate(xs)]
    y = np.sum([product for product, _ in products], axis=0)
    if "b_0" in p:
        y = y + p["b_0"]

    def pullback(dy: Array) -> list[Array]:
        if "b_0" in p:
            p.add("b_0", rows(dy).sum(axis=0))
        return [product_pullback(dy) for _, product_pullback in products]

    return y, pullback


def _embed(p: Parameters, config: Config, use: Use, ids: Array) -> tuple[Array, Callable[[Array], None]]:
    """Embeddings of words, plus the bias."""
    words, words_pullback = embed(p, transformer_table(config, use), ids)

    def pullback(dwords: Array) -> None:
        words_pullback(dwords)
        p.add(ZERO_BIAS, rows(dwords).sum(axis=0))

    return words + p[ZERO_BIAS], pullback


def _drop(p: Parameters, config: Config, x: Array) -> tuple[Array, Pullback]:
    """In training, drop each feature of each word on its own."""
    if p.dropout is None:
        return x, identity
    keep = 1 - config.rnn_dropout_embedding
    mask = (p.dropout.rng.random(x.shape) < keep) / keep
    return x * mask, lambda dy: dy * mask
