"""RNNSearch as Nematus computes it: what encode, logits, loss and translate of a model compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from rmsnorm.nematus.dialects import NOTHING
from rmsnorm.nematus.models import zero_rnnsearch
from rmsnorm.nematus.models.operations import Array, Arrays
from rmsnorm.nematus.models.parameters import Parameters, embed, feed_forward, losses, masked_scores, project, softmax
from rmsnorm.nematus.names import table

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Bias, Config

Memory = zero_rnnsearch.Memory

# Where the output embeddings are tied there is no parameter of this name, but there is a dropout mask.
TIED: Final = "decoder/next_word_predictor/hidden_to_logits/W"
# Matrices that multiply embeddings, or vectors of the size of embeddings; all others multiply states.
_MULTIPLY_EMBEDDINGS: Final = (
    "encoder/forward-stack/level0/gru0/input_",
    "encoder/backward-stack/level0/gru0/input_",
    "decoder/base/gru0/input_",
    *(f"decoder/next_word_predictor/{part}_to_" for part in ("prev_emb", "hidden", "lexical")),
)


def encode(p: Parameters, config: Config, x: Array, mask: Array) -> Array:
    """What the decoder attends to."""
    draw_masks(p, config, x)
    return attend_to(p, config, x, mask)[0][0]


def score(p: Parameters, config: Config, x: Array, mask: Array, y: Array, *, stepwise: bool = False) -> Array:
    """Logits of the target words."""
    ops, (length, batch) = p.ops, p.ops.shape(y)
    draw_masks(p, config, x, length)
    memory, initial = attend_to(p, config, x, mask)
    words = embed(p, config, "decoder", ops.concatenated((ops.filled((1, batch), NOTHING, y), y[:-1]), 0)[None])
    if config.rules.is_zero:
        return zero_rnnsearch.decode(p, config, memory, [initial], words, ops.cast(y != 0, words))[0]
    old = config.rules.scores_otherwise and not stepwise
    high = ops.filled(ops.shape(initial), 0.0, initial) if old else initial
    states = [initial, *[high] * (config.rnn_dec_depth - 1)]
    return decode(p, config, memory, states, p.drop("target words", words), old=old)[0]


def loss(p: Parameters, config: Config, x: Array, mask: Array, y: Array, y_mask: Array, *, training: bool) -> Array:
    """The loss of each sentence."""
    return losses(p, config, score(p, config, x, mask, y), y, y_mask, 0, training=training)


def begin(
    p: Parameters, config: Config, x: Array, mask: Array, *, beam_size: int, length: int
) -> tuple[Memory, list[Array]]:
    """Memory and states before the first word, beam_size rows for every sentence."""
    memory, initial = attend_to(p, config, x, mask)
    context, hidden, embeddings, scores = (p.ops.repeated(array, beam_size, 1) for array in memory)
    return (context, hidden, embeddings, scores), [p.ops.repeated(initial, beam_size, 0)] * config.rnn_dec_depth


def step(
    p: Parameters, config: Config, memory: Memory, states: list[Array], previous: Array, start: Any
) -> tuple[Array, list[Array]]:
    """Log-probabilities of the word after the previous one, and the new states."""
    words = embed(p, config, "decoder", previous[None])[None]
    own = zero_rnnsearch.decode if config.rules.is_zero else decode
    logits, states = own(p, config, memory, states, words)
    return p.ops.log_softmax(logits[0]), states


def draw_masks(p: Parameters, config: Config, x: Array, target_length: Any = 0) -> None:
    """In training, the masks of dropout, of the shapes that they are used for.

    They are of the inputs of matrices, of words, and of what the lexical model reads.
    """
    if p.random is None or config.rules.is_zero:
        return
    ops, (_, length, batch) = p.ops, p.ops.shape(x)
    sizes = {name: value.shape[0] for name, value in p.values.items() if len(value.shape) == 2}
    sizes = {name: size for name, size in sizes.items() if "/embedding/" not in name and "to_score" not in name}
    if config.tie_decoder_embeddings:
        sizes[TIED] = config.target_embedding_size
    if config.rnn_lexical_model:
        sizes["decoder/lexical"] = config.embedding_size
    embedding, hidden = config.rnn_dropout_embedding, config.rnn_dropout_hidden
    rates = {name: embedding if name.startswith(_MULTIPLY_EMBEDDINGS) else hidden for name in sizes}
    rates["decoder/lexical"] = embedding
    shapes: dict[str, tuple[Any, ...]] = {name: (batch, size) for name, size in sizes.items()}
    for name, size, rate in (
        ("source words", length, config.rnn_dropout_source), ("target words", target_length, config.rnn_dropout_target),
    ):  # fmt: skip
        shapes[name], rates[name] = (size, batch, 1), rate
    for name, shape in shapes.items():
        if rates[name]:
            p.masks[name] = p.dropout(ops.filled(shape, 1.0, p[table(config, "decoder")]), rates[name])


def attend_to(p: Parameters, config: Config, x: Array, mask: Array) -> tuple[Memory, Array]:
    """The encoder, and what the decoder needs before its first step: memory and initial state."""
    if config.rules.is_zero:
        return zero_rnnsearch.attend_to(p, config, x, mask)
    ops, attention = p.ops, p / "decoder/base/attention"
    embeddings = p.drop("source words", embed(p, config, "encoder", x))
    # The stack whose last level reads from left to right comes first.
    stacks = ("forward", "backward") if config.rnn_enc_depth % 2 else ("backward", "forward")
    context = ops.concatenated([_encoder_stack(p, config, stack, embeddings, mask) for stack in stacks], -1)
    hidden = project(attention, context, "context_to_hidden", "hidden_bias", "hidden_context_norm/")
    share = (mask / ops.sum(mask, 0))[..., None]
    initial = ops.tanh(feed_forward(p / "decoder/initial_state_constructor", ops.sum(context * share, 0)))
    return (context, hidden, embeddings, masked_scores(p, config, mask)), initial


def _encoder_stack(p: Parameters, config: Config, stack: str, x: Array, mask: Array) -> Array:
    """Levels that read in alternating directions, with residual connections from the second level on."""
    biases = [config.gru_bias("encoder", index) for index in range(config.rnn_enc_transition_depth)]
    h0 = p.ops.filled((p.ops.shape(x)[1], config.state_size), 0.0, x)
    masking = config.rules.masking
    for level in range(config.rnn_enc_depth):
        reverse = (level % 2 == 1) != (stack == "backward")
        # Where masked states become zero, those after the end have no effect.
        own = mask if reverse or masking == "carry" else None
        q = p / f"encoder/{stack}-stack/level{level}"
        states = nematus_level(q, x, h0, own, biases=biases, masking=masking, reverse=reverse)
        x = states + x if level else states
    return x


def decode(
    p: Parameters, config: Config, memory: Memory, states: list[Array], words: Array, *, old: bool = False
) -> tuple[Array, list[Array]]:
    """Logits of any number of steps, given the embeddings of the words before them, and the last states.

    old: the rules by which v0.3 scores: no residual connection around the first high level.
    """
    ops, q, (base, *highs) = p.ops, p / "decoder/base", states
    biases = [config.gru_bias("base", index) for index in range(config.rnn_dec_base_transition_depth)]

    def step(state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """One step of the conditional GRU with attention; also what it attends to."""
        gates, proposal = inputs
        h = nematus_step(q / "gru0", state[0], (gates, proposal), biases[0])
        attended = _attend(q / "attention", h, memory, sources)
        h = nematus_deep_step(q, h, nematus_input(q / "gru1", attended[0], biases[1]), biases[1:], first=1)
        return (h,), attended

    context, _, embeddings, _ = memory
    sources = (context, p.drop("decoder/lexical", embeddings))[: 1 + config.rnn_lexical_model]
    others = tuple(source[0] for source in sources)
    (top,), (attended, *lexical) = ops.scan(step, (base,), nematus_input(q / "gru0", words, biases[0]), others)
    new = [top[-1]]
    biases = [config.gru_bias("high", index) for index in range(config.rnn_dec_high_transition_depth)]
    for level, high in enumerate(highs):
        below = ops.concatenated((top, attended), -1) if config.rnn_dec_deep_context else top
        high = nematus_level(p / f"decoder/high/level{level}", below, high, biases=biases)
        new.append(high[-1])
        top = high if old and level == 0 else top + high
    return _predict(p, config, words, top, attended, lexical), new


def _attend(p: Parameters, state: Array, memory: Memory, sources: Sequence[Array]) -> tuple[Array, ...]:
    """sum_t w_t source_t, w = softmax over the words of tanh(hidden_t + norm(state W)) v."""
    (_, hidden, _, masked), from_state = memory, project(p, state, "state_to_hidden", None, "hidden_state_norm/")
    scores = p.ops.matmul(p.ops.tanh(hidden + from_state), p["hidden_to_score"])[..., 0]
    weights = softmax(p, scores + masked, 0)[..., None]
    return tuple(p.ops.sum(source * weights, 0) for source in sources)


def _predict(
    p: Parameters, config: Config, previous: Array, state: Array, attended: Array, lexical: Sequence[Array]
) -> Array:
    """Logits: activation(sum of the normalised projections of the three) W + b, plus those of the lexical model.

    lexical: the embeddings that are attended to, if there is that model, which Nguyen & Chiang describe:
    tanh(norm(e W + b)) + e, e = tanh(attended embeddings).
    """
    q = p / "decoder/next_word_predictor"
    hidden = feed_forward(q / "prev_emb_to_hidden", previous) + feed_forward(q / "state_to_hidden", state)
    hidden = _activate(q, config, hidden + feed_forward(q / "attended_context_to_hidden", attended))
    logits = (_mixture if config.softmax_mixture_size > 1 else _logits)(p, config, hidden)
    for e in map(p.ops.tanh, lexical):
        deep = p.ops.tanh(feed_forward(p / "decoder/lexical", e)) + e
        logits = logits + feed_forward(q / "lexical_to_logits", deep, norm=False)
    return logits


def _activate(q: Parameters, config: Config, x: Array) -> Array:
    if config.output_hidden_activation == "linear":
        return x
    if config.output_hidden_activation == "prelu":
        return q.ops.relu(x) - q["hidden_prelu/slope"] * q.ops.relu(-x)
    return (q.ops.tanh if config.output_hidden_activation == "tanh" else q.ops.relu)(x)


def _logits(p: Parameters, config: Config, hidden: Array) -> Array:
    """hidden W + b; if the embeddings are tied, W is their transpose."""
    q = p / "decoder/next_word_predictor/hidden_to_logits"
    if not config.tie_decoder_embeddings:
        return feed_forward(q, hidden, norm=False)
    return p.ops.matmul(q.drop("W", hidden), p.ops.transposed(p[table(config, "softmax")])) + q["b"]


def _mixture(p: Parameters, config: Config, hidden: Array) -> Array:
    """log sum_k pi_k softmax(logits of tanh(norm(hidden W_k + b_k))), pi = softmax(hidden W + b)."""
    q, ops = p / "decoder/next_word_predictor", p.ops
    log_pi = ops.log_softmax(feed_forward(q / "hidden_to_pi_logits", hidden, norm=False))
    components = []
    for k in range(config.softmax_mixture_size):
        deep = ops.tanh(feed_forward(q / f"hidden_to_mos_hidden_{k}", hidden))
        components.append((log_pi[..., k, None] + ops.log_softmax(_logits(p, config, deep)))[None])
    return ops.logsumexp(ops.concatenated(components, 0), 0)


# Nematus's GRU with deep transition, over whole sequences and in single steps.


def nematus_input(p: Parameters, x: Array, bias: Bias) -> tuple[Array, Array]:
    """What the input of a Nematus GRU adds to its gates and to its proposal, for any number of steps at once."""
    gates_bias, proposal_bias = ("gates_bias", "proposal_bias") if bias == "input" else (None, None)
    gates = project(p, x, "input_to_gates", gates_bias, "gates_x_norm/")
    return gates, project(p, x, "input_to_proposal", proposal_bias, "proposal_x_norm/")


def nematus_step(p: Parameters, h: Array, from_input: tuple[Array, Array] | None, bias: Bias) -> Array:
    """One step of a Nematus GRU.

    r, u = sigmoid(norm(h U) + gates of the input);   h' = u h + (1 - u) tanh(r norm(h Ux) + proposal of the input)
    """
    gates_bias, proposal_bias = ("gates_bias", "proposal_bias") if bias == "state" else (None, None)
    gates = project(p, h, "state_to_gates", gates_bias, "gates_state_norm/")
    proposal = project(p, h, "state_to_proposal", proposal_bias, "proposal_state_norm/")
    terms = [] if from_input is None else [from_input]
    if bias == "outside":
        terms.append((p["gates_bias"], p["proposal_bias"]))
    r, u = p.ops.split(p.ops.sigmoid(sum((of_gates for of_gates, _ in terms), gates)), 2)
    candidate = p.ops.tanh(sum((of_proposal for _, of_proposal in terms), r * proposal))
    return u * h + (1 - u) * candidate


def nematus_deep_step(
    p: Parameters, h: Array, from_input: tuple[Array, Array], biases: Sequence[Bias], first: int = 0
) -> Array:
    """One step of gru<first> with the projected input, then one step of each GRU after it, which have no input."""
    h = nematus_step(p / f"gru{first}", h, from_input, biases[0])
    for index, bias in enumerate(biases[1:], start=first + 1):
        h = nematus_step(p / f"gru{index}", h, None, bias)
    return h


def nematus_level(
    p: Parameters,
    x: Array,
    h0: Array,
    mask: Array | None = None,
    *,
    biases: Sequence[Bias],
    masking: Literal["zero", "carry"] = "zero",
    reverse: bool = False,
) -> Array:
    """The states of a level of GRUs over a sequence.

    biases: of each GRU. masking: whether the state of a masked word becomes zero, or is that before it.
    """

    def step(state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        gates, proposal, *own = inputs
        new = nematus_deep_step(p, state[0], (gates, proposal), biases)
        for m in own:
            new = m * new + (1 - m) * state[0] if masking == "carry" else m * new
        return (new,), ()

    inputs = (*nematus_input(p / "gru0", x, biases[0]), *masks_of(p, mask, x))
    return p.ops.scan(step, (h0,), inputs, reverse=reverse)[0][0]


def masks_of(p: Parameters, mask: Array | None, x: Array) -> list[Array]:
    """The mask as columns for the steps of a sequence; nothing for no mask."""
    return [] if mask is None else [p.ops.cast(mask, x)[..., None]]
