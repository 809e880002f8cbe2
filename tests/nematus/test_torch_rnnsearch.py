"""Nematus's models in PyTorch: against runs of Nematus, against the golden, and as modules."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nematus_models import (
    KINDS,
    TRANSFORMERS,
    batch,
    check_beams,
    check_gradients,
    config_of,
    random_parameters,
    reference,
    transformer_of,
)

torch = pytest.importorskip("torch")

from rmsnorm.nematus.names import variables  # noqa: E402
from rmsnorm.nematus.numpy import rnnsearch, transformer  # noqa: E402
from rmsnorm.nematus.numpy.output import log_softmax  # noqa: E402
from rmsnorm.nematus.torch import parameters as torch_parameters  # noqa: E402
from rmsnorm.nematus.torch.rnnsearch import RNNSearch  # noqa: E402
from rmsnorm.nematus.torch.transformer import Transformer  # noqa: E402

# Two computations of one thing in another order: logits are below 10, and so are some hundred roundings in a row.
EXACT = {"float64": 1e-12, "float32": 2e-5}
# Relative to the norm of a gradient, which adds up numbers of both signs.
GRADIENT = {"float64": 1e-10, "float32": 1e-4}
QUIET = dict.fromkeys([f"transformer_dropout_{part}" for part in ("embeddings", "residual", "relu", "attn")], 0.0)
RATES = {f"rnn_dropout_{part}": 0.3 for part in ("embedding", "hidden", "source", "target")}


def pair(kind: str, dtype: str = "float64") -> tuple[Any, Any]:
    """The golden and its mirror; a Transformer in training, where it smooths labels, and without dropout."""
    if kind.startswith("transformer "):
        config = transformer_of(kind.removeprefix("transformer ")).replace(**QUIET)
        given = random_parameters(config, dtype)
        return transformer.Transformer(config, given), Transformer(config, given).train()
    config = config_of(kind)
    given = random_parameters(config, dtype)
    return rnnsearch.RNNSearch(config, given), RNNSearch(config, given)


def check_all_gradients(model: Any, loss: Any, wanted: dict[str, Any], bound: float) -> None:
    loss.mean().backward()
    found = model.by_name()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = np.linalg.norm(found[name].grad.double().numpy() - gradient)
        assert error <= bound * np.linalg.norm(gradient), name


@pytest.mark.parametrize(("name", "norm"), [("A2s", "layer"), ("A4", "rms"), ("A7b", "rms"), ("B", "rms")])
def test_what_nematus_computed(name: str, norm: str) -> None:
    """float32 of TensorFlow: logits to 2e-5, gradients to 1e-4 of their norm, translations token for token."""
    run = reference(name)
    config, given, own = run.model(norm)
    model: Any = (Transformer if name == "A7b" else RNNSearch)(config, given)
    x, x_mask, y, y_mask = run.sentences
    words = y_mask.T > 0 if name == "A7b" else y_mask > 0
    logits = model.logits(x, x_mask, y)
    assert logits.dtype == torch.float32
    assert abs(logits.detach().numpy() - run.arrays["logits"])[words].max() <= 2e-5
    loss = model.loss(x, x_mask, y, y_mask)
    np.testing.assert_allclose(loss.detach().numpy(), run.arrays["loss_per_sentence"], rtol=1e-5)
    loss.mean().backward()
    check_gradients({name: value.grad.numpy() for name, value in model.by_name().items()}, own, run.probes)
    assert check_beams(run, model, 2e-5) == (2 if name == "B" else 4)


def test_what_theano_nematus_computed() -> None:
    """float64 of Theano, with the weights of a v0.3 checkpoint."""
    run = reference("B")
    config, given, _ = run.model("rms")
    x, x_mask, y, y_mask = run.sentences
    for dialect in ("theano", "tensorflow-v0.3"):
        model = RNNSearch(config.replace(dialect=dialect), given).double()
        error = abs(model.logits(x, x_mask, y).detach().numpy() - run.arrays["theano_logits"])[y_mask > 0].max()
        assert error <= 1e-12
        losses = model.loss(x, x_mask, y, y_mask).detach().numpy()
        np.testing.assert_allclose(losses, run.arrays["theano_loss"], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", [*KINDS, *(f"transformer {kind}" for kind in TRANSFORMERS)])
def test_everything_is_the_goldens(kind: str, dtype: str) -> None:
    golden, model = pair(kind, dtype)
    x, x_mask, y, y_mask = batch(golden.config)
    training = {"training": True} if kind.startswith("transformer ") else {}

    def close(found: Any, wanted: Any) -> None:
        assert found.dtype == getattr(torch, dtype)
        scale = max(1.0, abs(wanted).max())
        np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=0, atol=EXACT[dtype] * scale)

    close(model.encode(x, x_mask), golden.encode(x, x_mask))
    close(model.logits(x, x_mask, y), golden.logits(x, x_mask, y))
    if not training:
        close(model.logits(x, x_mask, y, stepwise=True), golden.logits(x, x_mask, y, stepwise=True))
    loss = model.loss(x, x_mask, y, y_mask)
    close(loss, golden.loss(x, x_mask, y, y_mask, **training))
    check_all_gradients(model, loss, golden.gradients(x, x_mask, y, y_mask, **training), GRADIENT[dtype])
    for beam_size, alpha in ((1, 0.0), (3, 0.5)) if dtype == "float64" else ():
        found = model.translate(x, x_mask, beam_size, 6, normalization_alpha=alpha)
        wanted = golden.translate(x, x_mask, beam_size, 6, normalization_alpha=alpha)
        np.testing.assert_array_equal(found.sequences, wanted.sequences)
        np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-12)


@pytest.mark.parametrize("kind", ["deep", "tied all", "transformer tied all"])
def test_a_state_dict_has_the_names_of_nematus_and_comes_back(kind: str) -> None:
    golden, model = pair(kind, "float32")
    state = model.state_dict()
    assert sorted(state) == sorted(row.name.replace("/", ".") for row in variables(golden.config))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    zeros = {row.name: np.zeros(row.shape, np.float32) for row in variables(golden.config)}
    fresh = type(model)(golden.config, zeros)
    fresh.load_state_dict(torch.load(file))
    x, x_mask, y, _ = batch(golden.config)
    torch.testing.assert_close(fresh.logits(x, x_mask, y), model.eval().logits(x, x_mask, y), rtol=0, atol=0)
    for name, value in fresh.by_name().items():
        np.testing.assert_array_equal(value.detach().numpy(), golden.parameters[name].astype(np.float32), err_msg=name)


def test_a_model_does_not_share_memory_with_what_it_is_made_of() -> None:
    config = config_of("plain")
    for given in (random_parameters(config), {k: torch.tensor(v) for k, v in random_parameters(config).items()}):
        before = {name: np.asarray(value).copy() for name, value in given.items()}
        model = RNNSearch(config, given)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(1)
        for name, value in given.items():
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("kind", ["deep of odd depth", "transformer rms"])
def test_training_makes_the_loss_fall(kind: str) -> None:
    """To half in some steps, with the state of the optimizer where torch puts it; and by a graph without slack."""
    _, model = pair(kind, "float32")
    sentences = tuple(torch.as_tensor(each) for each in batch(model.config))
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(*sentences).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("kind", ["rms", "transformer rms"])
def test_the_loss_compiles_in_one_piece(kind: str) -> None:
    """In training too: as long as the sentences are, so short ones here."""
    _, model = pair(kind, "float32")
    x, x_mask, y, y_mask = (torch.as_tensor(each) for each in batch(model.config))
    sentences = (x[:, :1], x_mask[:1], y[:2], y_mask[:2])
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(*sentences)
    loss.mean().backward()
    found = {name: value.grad for name, value in model.by_name().items()}
    model.zero_grad(set_to_none=True)
    wanted = model.loss(*sentences)
    torch.testing.assert_close(loss, wanted)
    wanted.mean().backward()
    for name, value in model.by_name().items():
        torch.testing.assert_close(found[name], value.grad)


def test_gradients_by_torch_func() -> None:
    _, model = pair("rms")
    sentences = tuple(torch.as_tensor(each) for each in batch(model.config))
    given = dict(model.named_parameters())
    gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, sentences).mean())(given)
    model.loss(*sentences).mean().backward()
    for name, value in given.items():
        torch.testing.assert_close(gradients[name], value.grad)


@pytest.mark.parametrize("kind", ["mixture", "transformer rms"])
def test_a_model_in_bfloat16(kind: str) -> None:
    """Within some roundings of 2^-9 of logits below 10; losses are of float32."""
    golden, model = pair(kind, "float32")
    x, x_mask, y, y_mask = batch(golden.config)
    model = model.bfloat16().eval()
    logits = model.logits(x, torch.tensor(x_mask).bfloat16(), y)
    wanted = golden.logits(x, x_mask, y)
    assert logits.dtype in (torch.bfloat16, torch.float32)  # of a mixture log-probabilities
    assert abs(logits.detach().float().numpy() - wanted).max() <= 0.02 * abs(wanted).max() + 0.1
    assert model.loss(x, x_mask, y, y_mask).dtype == torch.float32
    assert np.isfinite(model.translate(x, x_mask, 2, 4).scores).all()


# What Nematus drops, read from its rnn_model.py and layers.py.
OF_WORDS = [
    "decoder/base/gru0/input_to_gates",
    "decoder/base/gru0/input_to_proposal",
    "decoder/lexical",
    "decoder/next_word_predictor/hidden_to_logits/W",
    "decoder/next_word_predictor/lexical_to_logits/W",
    "decoder/next_word_predictor/prev_emb_to_hidden/W",
    *(
        f"encoder/{stack}-stack/level0/gru0/input_to_{part}"
        for stack in ("backward", "forward")
        for part in ("gates", "proposal")
    ),
]


def dropping(monkeypatch: pytest.MonkeyPatch, config: Any, dtype: str = "float64") -> tuple[Any, Callable[[], Any]]:
    """A model in training, and the masks of its last call."""
    made: list[Any] = []
    original = torch_parameters.Dropout.__init__

    def record(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(torch_parameters.Dropout, "__init__", record)
    model = RNNSearch(config, random_parameters(config, dtype)).train()
    return model, lambda: made[-1].masks


def test_what_is_dropped_with_which_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every matrix the input, with a mask of its own; scores of the attention stay."""
    config = config_of("deep").replace(rnn_lexical_model=True)
    matrices = {row.name for row in variables(config) if len(row.shape) == 2}
    matrices -= {name for name in matrices if "/embedding/" in name or name.endswith("hidden_to_score")}
    wanted = {
        "embedding": set(OF_WORDS),
        "hidden": matrices - set(OF_WORDS),
        "source": {"source words"},
        "target": {"target words"},
    }
    for part, names in wanted.items():
        model, masks = dropping(monkeypatch, config.replace(**{f"rnn_dropout_{part}": 0.3}))
        torch.manual_seed(0)
        loss = model.loss(*batch(config))
        assert set(masks()) == names
        for name, mask in masks().items():
            assert set(mask.ravel().tolist()) <= {0.0, 1 / 0.7}, name
        assert (loss - model.eval().loss(*batch(config))).abs().min() > 1e-6


@pytest.mark.parametrize("kind", ["deep", "mixture", "factors"])
def test_a_dropped_input_is_a_dropped_row_of_the_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which holds for one sentence, and only if all steps have the same mask; words are dropped as their embeddings."""
    config = config_of(kind).replace(**RATES)
    model, masks = dropping(monkeypatch, config)
    words = np.array([1, 2, 3, 0])
    x, y = np.stack([words] * len(config.source_vocab_sizes))[..., None], words[:, None]
    sentences = (x, np.ones((4, 1)), y, np.ones((4, 1)))
    torch.manual_seed(8)
    loss = model.loss(*sentences)
    found = masks()
    assert all({0.0} < set(found[f"{side} words"].ravel().tolist()) for side in ("source", "target"))
    state = {name: value.detach().clone() for name, value in model.by_name().items()}
    for name, mask in found.items():
        if name in state:
            state[name] *= mask.T
    for table, ids, mask in (
        *((f"encoder/embedding/embeddings{f'_{i}' if i else ''}", each, "source words") for i, each in enumerate(x)),
        ("decoder/embedding/embeddings", y[:-1], "target words"),
    ):
        for word, factor in zip(ids[:, 0], found[mask][:, 0, 0], strict=True):
            state[table][word] *= factor
    same = RNNSearch(config, state)
    torch.testing.assert_close(same.loss(*sentences), loss, rtol=1e-12, atol=1e-12)


def test_dropout_only_in_training() -> None:
    config = config_of("rms").replace(**RATES)
    model = RNNSearch(config, random_parameters(config))
    quiet = RNNSearch(config_of("rms"), random_parameters(config))
    x, x_mask, y, y_mask = batch(config)
    wanted = quiet.loss(x, x_mask, y, y_mask)
    translations = quiet.translate(x, x_mask, 3, 6)
    torch.testing.assert_close(model.loss(x, x_mask, y, y_mask), wanted, rtol=0, atol=0)
    model.train()
    assert (model.loss(x, x_mask, y, y_mask) - wanted).abs().min() > 1e-3
    np.testing.assert_array_equal(model.translate(x, x_mask, 3, 6).scores, translations.scores)


def test_dropout_of_the_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dropout that halves: what is dropped is what a matrix, halved, is multiplied with or gives."""
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p: x * (1 - p))
    plain = transformer_of("rms").replace(**QUIET)
    given = random_parameters(plain)
    x, x_mask, y, _ = batch(plain)
    halved = {
        "transformer_dropout_residual": ("context_projection/dense_layer_weights", "ff_layer_2/dense_layer_weights"),
        "transformer_dropout_relu": ("ff_layer_1/dense_layer_weights",),
        "transformer_drophead": ("context_projection/dense_layer_weights",),
    }
    for rate, ends in halved.items():
        config = plain.replace(**{rate: 0.5})
        same = {name: value / 2 if name.endswith(ends) else value for name, value in given.items()}
        if rate == "transformer_dropout_residual":
            same |= {name: same[name] / 2 for name in same if name.endswith("ff_layer_2/dense_layer_biases")}
        model, wanted = Transformer(config, given).train(), Transformer(plain, same)
        torch.testing.assert_close(model.logits(x, x_mask, y), wanted.logits(x, x_mask, y), rtol=1e-12, atol=1e-12)
        undropped = Transformer(plain, given).logits(x, x_mask, y)
        assert (model.logits(x, x_mask, y) - undropped).abs().max() > 0.1
        torch.testing.assert_close(model.eval().logits(x, x_mask, y), undropped, rtol=0, atol=0)

    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, p: x * (p == 0))
    model = Transformer(plain.replace(transformer_dropout_embeddings=0.5), given).train()
    logits = model.logits(x, x_mask, y)  # nothing is left of words and places
    torch.testing.assert_close(logits, logits[:1, :1].expand_as(logits))
    assert (model.eval().logits(x, x_mask, y).std((0, 1)) > 0.01).all()

    rates: list[float] = []
    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, bias, rate: attention(q, k, v, bias, rates.append(rate) or 0.0),
    )
    model = Transformer(plain.replace(transformer_dropout_attn=0.25), given)
    model.train().logits(x, x_mask, y)
    model.translate(x, x_mask, 1, 2)
    assert rates == [0.25] * 6 + [0.0] * 6


def test_smoothed_labels_of_the_transformer_only_in_training() -> None:
    golden, model = pair("transformer smoothed labels")
    sentences = batch(golden.config)
    for mode in (True, False):
        wanted = golden.loss(*sentences, training=mode)
        np.testing.assert_allclose(model.train(mode).loss(*sentences).detach().numpy(), wanted, rtol=1e-12)


def test_a_mixture_is_of_probabilities() -> None:
    _, model = pair("mixture")
    x, x_mask, y, _ = batch(model.config)
    logits = model.logits(x, x_mask, y).detach().numpy()
    np.testing.assert_allclose(log_softmax(logits), logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["factors", "transformer rms"])
def test_errors(kind: str) -> None:
    """As the golden's, for tensors as for arrays."""
    _, model = pair(kind)
    x, x_mask, y, y_mask = (torch.as_tensor(each) for each in batch(model.config))
    with pytest.raises(ValueError, match=r"encode: x is \(4, 3\), expected the shape \((1|2), length, batch\)"):
        model.encode(x[0], x_mask)
    with pytest.raises(TypeError, match=r"logits: x is dtype\('float64'\).*expected an array of integers"):
        model.logits(x.float(), x_mask, y)
    with pytest.raises(ValueError, match=r"loss: an id of x is 9, expected 0 to (7|8), the vocabulary"):
        model.loss(torch.where(x == x.max(), 9, x), x_mask, y, y_mask)
    with pytest.raises(ValueError, match=r"loss: an id of y is -1, expected 0 to 7, the vocabulary"):
        model.loss(x, x_mask, y - 1, y_mask)
    with pytest.raises(ValueError, match=r"translate: x_mask has shape \(3, 3\), expected \(4, 3\)"):
        model.translate(x, x_mask[1:])
    with pytest.raises(ValueError, match=r"loss: y_mask has shape \(2, 3\), expected \(4, 3\) to match y"):
        model.loss(x, x_mask, y, y_mask[:2])
    with pytest.raises(ValueError, match=r"logits: y is \(4, 2\), expected the shape \(length, 3\)"):
        model.logits(x, x_mask, y[:, :2])
    with pytest.raises(ValueError, match=r"translate: beam_size is 0, expected an integer >= 1"):
        model.translate(x, x_mask, 0)
    with pytest.raises(ValueError, match=r"translate: beam_size is 9, expected at most 8, the target vocabulary"):
        model.translate(x, x_mask, 9)
