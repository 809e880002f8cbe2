"""Nematus's names, options and Theano archives, with NumPy alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import rewrite, save
from nematus_models import FACTORS, KINDS, TRANSFORMERS, batch, config_of, random_parameters, refuses, reoption, same

from rmsnorm import nematus
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.config import LEGACY, Config, read, write
from rmsnorm.nematus.convert import TARGETS
from rmsnorm.nematus.names import check, variables
from rmsnorm.nematus.numpy import RNNSearch

GAINS = [str(row.theano) for row in variables(config_of("rms")) if row.name.endswith("/scale")]
OTHER_NUMBERS = "Theano Nematus will compute other numbers"


def test_names_that_nematus_wrote() -> None:
    """Names as its converters know them; those of the runs in tests/data are compared where the runs are read."""
    rows = variables(config_of("deep theano with offset").replace(norm_offset=True))
    known = {row.name: row for row in rows}
    expected = {
        "encoder/forward-stack/level0/gru0/gates_bias": ("encoder/forwardEncoder/gates_bias", "encoder_b"),
        "encoder/backward-stack/level0/gru1/proposal_bias": (None, "encoder_r_bx_drt_1"),
        "encoder/forward-stack/level1/gru0/state_to_gates": (None, "encoder_r_2_U"),
        "encoder/backward-stack/level1/gru1/gates_state_norm/new_std": (None, "encoder_2_U_drt_1_lns"),
        "decoder/base/gru1/gates_x_norm/new_std": ("decoder/gates_x_norm_1/new_std", "decoder_Wc_lns"),
        "decoder/base/gru1/gates_bias": ("decoder/gates_bias_1", "decoder_b_nl"),
        "decoder/base/gru2/proposal_state_norm/new_mean": (None, "decoder_Ux_nl_drt_1_lnb"),
        "decoder/base/attention/hidden_context_norm/new_mean": (
            "decoder/hidden_context_norm/new_mean",
            "decoder_Wc_att_lnb",
        ),
        "decoder/high/level1/gru1/state_to_proposal": (None, "decoder_3_Ux_drt_1"),
        "decoder/embedding/embeddings": ("decoder/y_embeddings_layer/embeddings", "Wemb_dec"),
        "decoder/next_word_predictor/state_to_hidden/new_std": (None, "ff_logit_lstm_ln_s"),
    }
    for name, (v01, theano) in expected.items():
        assert (known[name].v01, known[name].theano) == (v01 or name, theano)
    assert {row.theano for row in variables(config_of("factors"))} >= {"Wemb", "Wemb1"}


def test_what_the_names_do_not_tell_is_asked(tmp_path: Path) -> None:
    """Theano Nematus has the same names for LayerNorm and for RMSNorm with offsets, and its options do not tell."""
    for kind in ("rms with offset", "deep theano with offset"):
        config, _ = save(tmp_path, kind)
        assert nematus.load(tmp_path).config.norm == config.norm, "this package writes it down"
        reoption(tmp_path, layer_normalization_type=None, norm=None, dialect=None)
        refuses(r"norm is None, expected 'layer' or 'rms', as the .* pass norm=, .*-source", tmp_path)
        for norm in ("layer", "rms", "prms"):
            said = nematus.load(tmp_path, norm=norm).config  # type: ignore[arg-type]
            assert (said.norm, said.norm_offset, said.dialect) == (norm, True, "theano")
    save(tmp_path, "rms")
    refuses(r"norm is 'layer', expected rms or prms, as its variables say", tmp_path, norm="layer")
    rewrite(tmp_path, **dict.fromkeys(GAINS))  # Nematus's own conversion drops them
    refuses(r"no gains, expected those of the norms, because its option layer_normalisat", tmp_path)
    assert nematus.load(tmp_path, norm="none").config.norm == "none"

    config, _ = save(tmp_path, "layer", "numpy")  # whose names tell, and not its options
    reoption(tmp_path, "model.safetensors.json", layer_normalization_type="rmsnorm")
    path = tmp_path / "model.safetensors"
    assert nematus.load(path).config == config
    assert nematus.load(path, norm="rms").config == config.replace(norm="rms")


@pytest.mark.parametrize("kind", ["rms", "transformer rms", "deep theano", "deep v0.3", "zero rms", "zero rnn"])
@pytest.mark.parametrize("norm", ["rms", "prms", "layer"])
@pytest.mark.parametrize("norm_offset", [True, False])
@pytest.mark.filterwarnings(f"ignore:.*{OTHER_NUMBERS}:UserWarning")
def test_every_form_says_which_norm_it_was(kind: str, norm: Any, norm_offset: bool, tmp_path: Path) -> None:
    config = config_of(kind).replace(norm=norm, norm_offset=norm_offset)
    of_theano = config.model_type == "rnn" and config.dialect != "zero"
    for form in ("numpy", "theano")[: 1 + of_theano]:
        save(tmp_path, config, form)
        assert nematus.load(tmp_path / TARGETS[form].file).config == config


def test_prmsnorm_is_in_the_options_as_its_names_are_those_of_rmsnorm(tmp_path: Path) -> None:
    config, _ = save(tmp_path, "tied decoder")
    zero = config_of("zero rms")
    for other in (config.replace(norm="rms"), zero.replace(options=write(zero.replace(norm="prms")))):
        assert "norm" not in write(other)
    reoption(tmp_path, norm=None)
    assert nematus.load(tmp_path).config.norm == "rms"
    assert nematus.load(tmp_path, norm="prms").config.norm == "prms"


def test_options_of_every_version() -> None:
    old = {
        "embedding_size": 12, "state_size": 16, "source_vocab_sizes": [37], "target_vocab_size": 41, "enc_depth": 2,
        "dec_depth": 3, "use_layer_norm": True, "use_dropout": False, "dropout_hidden": 0.2, "saveto": "model.npz",
        "dec_base_recurrence_transition_depth": 4, "tie_decoder_embeddings": True,
    }  # fmt: skip
    config = read(old, norm="rms")
    assert (config.dialect, config.search) == ("tensorflow-v0.3", "costs")
    depths = (config.rnn_enc_depth, config.rnn_dec_depth, config.rnn_dec_base_transition_depth)
    assert (*depths, config.tie_decoder_embeddings, config.rnn_dropout_hidden) == (2, 3, 4, True, 0.0)
    assert [config.gru_bias("high", index) for index in (0, 1)] == ["state", "state"], "as in master"
    written = write(config)
    assert (written["saveto"], written["enc_depth"], written.get("rnn_enc_depth")) == ("model.npz", 2, None)

    theano = {"dim_word": 12, "dim": 16, "n_words_src": 37, "n_words": 41, "factors": 2, "dim_per_factor": [10, 2]}
    factors = read(theano)
    assert (factors.dialect, factors.source_vocab_sizes) == ("theano", (37, 37))
    assert read({**theano, "dialect": "tensorflow"}).dialect == "tensorflow"

    v04 = {"rnn_enc_depth": 2, **{name: old[name] for name in ("embedding_size", "state_size", "target_vocab_size")}}
    first = {**v04, "embedding_size": 16, "model_type": "transformer", "transformer_encoder_layers": 3}
    transformer = read({**first, "source_vocab_sizes": [37], "transformer_decoder_layers": 4}, norm="layer")
    assert (transformer.transformer_enc_depth, transformer.transformer_dec_depth) == (3, 4)
    for strategy, search in (({}, "costs"), ({"translation_strategy": "beam_search"}, "sampler")):
        config = read({**v04, "source_vocab_size": 37, **strategy})
        assert (config.dialect, config.search) == ("tensorflow", search)
    for config in (factors, read(old, norm="rms"), *map(config_of, (*KINDS, *TRANSFORMERS))):
        assert read(write(config), norm=config.norm, norm_offset=config.norm_offset) == config
    assert max(Counter([*LEGACY, *(name for names in LEGACY.values() for name in names)]).values()) == 1
    unusual = {"eps": 1e-3, "masked_score": -1e4, "beam_size": 3, "normalization_alpha": 0.6, "search": "costs"}
    for dialect in ("tensorflow", "tensorflow-v0.3", "theano"):
        config = config_of("rms").replace(dialect=dialect, **unusual)
        assert read(write(config), norm="rms") == config, "of what Nematus has no option for, too"
    assert "rmsnorm" not in write(config_of("rms").replace(options=write(config))), "where all is usual"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("tied encoder", {"rnn_lexical_model": True}, "rnn_lexical_model is True, expected False where the decoder sh"),
        ("rms", {"relu_attention": True}, "relu_attention is True, expected False but in a Transformer of the dialect"),
        ("rms", {"search": "zero"}, "search is 'zero', expected zero in the dialect zero, and only there"),
        ("zero rnn", {"rnn_dec_depth": 2}, "rnn_dec_depth is 2, expected 1, as zero has no such option"),
        ("zero rnn", FACTORS, r"source_vocab_sizes is \(8, 4\), expected one factor in zero"),
        ("transformer rms", {"softmax_mixture_size": 2}, "model_type is 'transformer', expected rnn where there is a"),
    ],
)
def test_fields_that_contradict_each_other(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(kind).replace(**changes)


def test_what_a_training_run_of_theano_leaves(tmp_path: Path) -> None:
    """Numbers of the trainer, also as pickled objects, and averages, which are taken where the options ask for them."""
    config, parameters = save(tmp_path)
    averages = {f"{row.theano}_smooth": 2 * parameters[row.name] for row in variables(config)}
    slots = {"adam_t": np.ones(3), "accum3": np.ones(2), "loss/prior/encoder_W": np.ones(2), "uidx": np.int64(3)}
    pickled = dict.fromkeys(("history_errs", "zipped_params"), np.array([[1.0], None], object))
    rewrite(tmp_path, **averages, **slots, **pickled)
    plain = nematus.load(tmp_path)
    assert plain.left_out == tuple(sorted([*averages, *slots, "decoder_c_tt"]))
    assert (plain.config, plain.smoothed) == (config, False)
    same(plain.parameters, parameters)
    reoption(tmp_path, exponential_smoothing=1e-4)
    smooth = nematus.load(tmp_path)
    assert smooth.smoothed
    same(smooth.parameters, {name: 2 * array for name, array in parameters.items()})
    nematus.save_theano(tmp_path / "again.npz", smooth.config, smooth.parameters)
    again = nematus.load(tmp_path / "again.npz")
    assert not again.smoothed
    assert again.config == smooth.config.replace(exponential_smoothing=0.0)
    rewrite(tmp_path, ff_state_b_smooth=None)
    refuses(r"smoothed, lacks ff_state_b_smooth, expected by the config as decoder/initial", tmp_path / "model.npz")


def test_where_models_are_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    missing = {"error": FileNotFoundError}
    refuses(r"holds no model, expected a checkpoint \(\*.index\), an archive", tmp_path, **missing)
    refuses(r"nothing.npz is neither a directory, nor a file, nor the prefix", tmp_path / "nothing.npz", **missing)
    config, _ = save(tmp_path)
    assert nematus.load(tmp_path).config == nematus.load(path).config == config
    elsewhere = (tmp_path / "model.npz.json").rename(tmp_path / "options.json")
    refuses(r"the options of .*model.npz are missing, expected in .*model.npz.json", path, **missing)
    for options in (elsewhere, write(config, theano=True)):
        assert nematus.load(path, config=options).config == config
    for name in ("one.npz", "two.npz"):
        nematus.save_theano(tmp_path / name, config, random_parameters(config))
    refuses(r"holds 2 models, expected one; name one of one.npz, two.npz", tmp_path)


@pytest.mark.parametrize(
    "name", ["model.npz-1000", "model.iter1000.npz", "model.npz.best-valid-script", "model.npz.best_bleu", "model.npz"]
)
def test_checkpoints_from_the_midst_of_training(name: str, tmp_path: Path) -> None:
    """They may have no options of their own; other numbers in a name mean nothing."""
    config, _ = save(tmp_path)
    path = (tmp_path / "model.npz").rename(tmp_path / name)
    assert nematus.load(path).config == config
    (tmp_path / "model.npz.json").rename(tmp_path / "model-2.npz.json")
    refuses(r"the options of .* are missing", path, error=FileNotFoundError)
    (tmp_path / "model-2.npz.json").rename(tmp_path / "config.json")
    assert nematus.load(path).config == config
    np.savez(tmp_path / "io.npz", logits=np.zeros(3))
    if path.suffix == ".npz":
        assert nematus.load(tmp_path).path == path
    else:
        refuses(r"holds no model", tmp_path, error=FileNotFoundError)


def test_nothing_is_left_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, parameters = save(tmp_path)
    before = (tmp_path / "model.npz").read_bytes()
    with pytest.raises(ValueError, match=r"save_theano: the model lacks decoder/base/gru2/gates_bias"):
        nematus.save_theano(tmp_path / "m", config.replace(rnn_dec_base_transition_depth=3), parameters)

    def fail(file: Any, *_: Any, **__: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", fail)
    with pytest.raises(OSError, match="No space left"):
        nematus.save_theano(tmp_path / "model.npz", config, parameters)
    assert (tmp_path / "model.npz").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.npz", "model.npz.json"]


@pytest.mark.parametrize("kind", ["layer", "deep of odd depth", "deep v0.4", "deep theano with offset", "lexical"])
def test_layer_norm_becomes_rms_norm_exactly(kind: str) -> None:
    config = config_of(kind)
    parameters = random_parameters(config)
    sentences = batch(config)[:3]
    new, converted = to_rms_norm(config, parameters)
    assert (new.norm, new.norm_offset) == ("rms", True)
    check("test", new, converted)
    wanted = RNNSearch(config, parameters).logits(*sentences)
    np.testing.assert_allclose(RNNSearch(new, converted).logits(*sentences), wanted, rtol=0, atol=1e-12)


def test_what_cannot_become_rms_norm() -> None:
    """The sums of a Transformer of zero have a mean of their own."""
    for kind in ("rms", "plain", "transformer layer", "zero layer"):
        with pytest.raises(ValueError, match=r"the model is .* with .*, expected rnn with layer"):
            to_rms_norm(config_of(kind), random_parameters(config_of(kind)))


def test_an_archive_of_theano_is_computed_as_theano_does_whatever_its_options_are_called(tmp_path: Path) -> None:
    """What Theano Nematus computes otherwise is said."""
    with pytest.warns(UserWarning, match=rf"{OTHER_NUMBERS}: its output activation is tanh"):
        save(tmp_path, "relu")
    with pytest.warns(UserWarning, match=rf"{OTHER_NUMBERS}: it adds the biases of decoder/high elsewhere"):
        config, _ = save(tmp_path, "deep", dialect="tensorflow-v0.3")
    assert nematus.load(tmp_path).config.dialect == "tensorflow-v0.3"
    reoption(tmp_path, dialect=None)
    for options in (None, write(config)):
        assert nematus.load(tmp_path, config=options).config.dialect == "theano"
        assert nematus.load(tmp_path, config=options, dialect="tensorflow").config.dialect == "tensorflow"


def test_bytes_of_another_machine_are_swapped(tmp_path: Path) -> None:
    """NumPy reads numbers with the highest byte first; PyTorch and JAX take no such arrays."""
    _, parameters = save(tmp_path, "rms")
    with np.load(tmp_path / "model.npz") as archive:
        swapped = {name: array.astype(">f4") for name, array in archive.items()}
    rewrite(tmp_path, **swapped)
    model = nematus.load(tmp_path)
    same(parameters, model.parameters)
    assert all(array.dtype.isnative for array in model.parameters.values())


def test_all_that_is_refused_is_in_one_message() -> None:
    theano = {"dim": 4, "dim_word": 0, "n_words": 5, "encoder": "lstm", "decoder": "gru", "weight_normalisation": True}
    of_zero = {"model_name": "rnnsearch", "cell": "lstm", "caencoder": True, "layer_norm": False, "hidden_size": -1}
    fields = {"source_vocab_sizes": (4,), "target_vocab_size": 3}
    for make, names in (
        (
            lambda: read(theano),
            ["encoder is", "decoder is", "weight_normalisation is", "embedding_size", "n_words_src"],
        ),
        (lambda: read(of_zero, norm="rms", **fields), ["cell is", "caencoder is", "layer_norm is", "state_size is"]),
        (lambda: Config(embedding_size=0, state_size=-1, **fields), ["embedding_size is", "state_size is"]),
        (
            lambda: Config(embedding_size=4, state_size=4, **fields, dim_per_factor=(2,), search="zero"),
            ["dim_per_factor is (2,)", "search is"],
        ),
    ):
        with pytest.raises(ValueError, match="Config: ") as caught:
            make()
        message = str(caught.value)
        assert "\n" not in message
        for name in names:
            assert message.count(name) == 1, message
        assert message.count("; and ") == len(names) - 1
