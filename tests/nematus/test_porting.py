"""Nematus's names, options and Theano archives, with NumPy alone."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_models import KINDS, TRANSFORMERS, batch, config_of, random_parameters, reference, refuses, reoption, same

from rmsnorm import nematus
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.config import LEGACY, Config, read, write
from rmsnorm.nematus.names import VERSIONS, check, is_of_training, unused, variables
from rmsnorm.nematus.numpy import RNNSearch

GAINS = [str(row.theano) for row in variables(config_of("rms")) if row.name.endswith("/scale")]
OTHER_NUMBERS = "Theano Nematus will compute other numbers"


def save(directory: Path, kind: str = "rms", **changes: Any) -> tuple[Config, dict[str, Any]]:
    config = config_of(kind).replace(**changes)
    parameters = random_parameters(config, "float32")
    nematus.save_theano(directory / "model.npz", config, parameters)
    return config, parameters


def rewrite(directory: Path, **changes: Any) -> None:
    """The archive in a directory with other arrays; None takes one out."""
    path = directory / "model.npz"
    with np.load(path) as archive:
        arrays = {**archive, **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize("kind", [*KINDS, *TRANSFORMERS])
def test_the_table_is_a_map_in_every_direction(kind: str) -> None:
    config = config_of(kind)
    rows = variables(config)
    for version, column in zip(VERSIONS, zip(*(row.names for row in rows), strict=True), strict=True):
        named = [name for name in column if name is not None]
        assert len(set(named)) == len(named)
        assert not any(map(is_of_training, named)), version
    assert not {name for row in rows for name in row.names} & unused(config)
    check("test", config, random_parameters(config))


def test_names_that_nematus_wrote() -> None:
    """The variables of real checkpoints, of shallow and deep models; and names as its converters know them."""
    for name, norm, version in (("A2s", "layer", 0), ("A4", "rms", 0), ("A7b", "rms", 0), ("B", "rms", 1)):
        run = reference(name)
        rows = variables(read(run.options, norm=norm))
        wanted = {key: tensor.shape for key, tensor in run.tensors.items()}
        assert {row.names[version]: row.shape for row in rows} == wanted
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


def test_warnings_where_theano_nematus_differs(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=rf"{OTHER_NUMBERS}: it adds the biases of decoder/high elsewhere"):
        save(tmp_path, "deep")
    with pytest.warns(UserWarning, match=rf"{OTHER_NUMBERS}: its output activation is tanh"):
        save(tmp_path, "relu")


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


@pytest.mark.parametrize("kind", ["rms", "transformer rms", "deep theano", "deep v0.3", "zero rms", "zero rnn"])
@pytest.mark.parametrize("norm", ["rms", "prms", "layer"])
@pytest.mark.parametrize("norm_offset", [True, False])
def test_every_form_says_which_norm_it_was(kind: str, norm: Any, norm_offset: bool, tmp_path: Path) -> None:
    config = config_of(kind).replace(norm=norm, norm_offset=norm_offset)
    parameters = random_parameters(config)
    nematus.save_safetensors(tmp_path / "model.safetensors", config, parameters)
    assert nematus.load(tmp_path / "model.safetensors").config == config
    if config.model_type == "rnn" and config.dialect != "zero":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            nematus.save_theano(tmp_path / "model.npz", config, parameters)
        assert nematus.load(tmp_path / "model.npz").config == config


def test_prmsnorm_is_in_the_options_as_its_names_are_those_of_rmsnorm(tmp_path: Path) -> None:
    config, _ = save(tmp_path, "tied decoder")
    assert "norm" not in write(config.replace(norm="rms"))
    zero = config_of("zero rms").replace(norm="prms")
    assert "norm" not in write(zero.replace(norm="rms", options=write(zero)))
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
    assert read(write(config), norm="rms") == config
    assert write(config)["saveto"] == "model.npz"
    assert write(config)["enc_depth"] == 2
    assert "rnn_enc_depth" not in write(config)

    theano = {"dim_word": 12, "dim": 16, "n_words_src": 37, "n_words": 41, "factors": 2, "dim_per_factor": [10, 2]}
    config = read(theano)
    assert (config.dialect, config.source_vocab_sizes) == ("theano", (37, 37))
    assert read(write(config)) == config
    assert read({**theano, "dialect": "tensorflow"}).dialect == "tensorflow"

    v04 = {"rnn_enc_depth": 2, **{name: old[name] for name in ("embedding_size", "state_size", "target_vocab_size")}}
    first = {**v04, "embedding_size": 16, "model_type": "transformer", "transformer_encoder_layers": 3}
    config = read({**first, "source_vocab_sizes": [37], "transformer_decoder_layers": 4}, norm="layer")
    assert (config.transformer_enc_depth, config.transformer_dec_depth) == (3, 4)
    config = read({**v04, "source_vocab_size": 37})
    assert (config.dialect, config.search) == ("tensorflow", "costs")
    assert read({**v04, "source_vocab_size": 37, "translation_strategy": "beam_search"}).search == "sampler"
    for kind in (*KINDS, *TRANSFORMERS):
        config = config_of(kind)
        assert read(write(config), norm=config.norm, norm_offset=config.norm_offset) == config
    assert max(Counter([*LEGACY, *(name for names in LEGACY.values() for name in names)]).values()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": None}, r"state_size or dim is missing, expected in the options of a Nematus model"),
        ({"dim": "16"}, r"state_size is '16', expected integers >= 1"),
        ({"enc_depth": 0}, r"rnn_enc_depth is 0, expected integers >= 1"),
        ({"dec_base_recurrence_transition_depth": 1}, r"base_transition_depth is 1, expected integers >= 2"),
        ({"output_hidden_activation": "gelu"}, r"is 'gelu', expected 'tanh', 'relu', 'prelu' or 'linear'"),
        ({"dim_per_factor": [6, 2], "factors": 2}, r"dim_per_factor is \(6, 2\), expected sizes that add up to 6"),
        ({"dim_per_factor": [3, 3]}, r"dim_per_factor is \(3, 3\), expected one size for each of \(9,\)"),
        ({"encoder": "lstm"}, r"encoder is 'lstm', expected 'gru'; this part of Theano Nematus is not ported"),
        ({"enc_depth_bidirectional": 2}, r"enc_depth_bidirectional is 2, expected the enc_depth of 1"),
        ({"use_dropout": True, "model_version": None}, r"model_version is None, expected 0.1 or later"),
        ({"use_dropout": True, "model_version": 0}, r"model_version is 0, expected 0.1 or later"),
        ({"label_smoothing": 1.5}, r"label_smoothing is 1.5, expected a number in \[0, 1\)"),
        ({"softmax_mixture_size": 2, "lexical_model": True}, r"rnn_lexical_model is True, expected False"),
        ({"tie_encoder_decoder_embeddings": True}, r"target_vocab_size is 8, expected 9 of the tied source"),
        ({"model_type": "cnn"}, r"model_type is 'cnn', expected 'rnn' or 'transformer'"),
        ({"model_type": "transformer"}, r"embedding_size is 6, expected the state_size of 5"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path)
    reoption(tmp_path, dialect=None, **changes)
    refuses(message, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ff_state_b": None},
            r"lacks ff_state_b, expected by the config as decoder/initial_state_constructor/b \(5,\)",
        ),
        ({"Wemb": None, "ff_state_b": None}, r"lacks Wemb and 1 more, expected by the config as encoder/embedding"),
        ({"encoder_W": np.zeros((6, 9), "f4")}, r"encoder_W in .*npz has shape \(6, 9\), expected \(6, 10\) of enc"),
        ({"other": np.zeros(3, "f4")}, r"holds other \(3,\), and the config has no such variable"),
        ({"encoder_W": np.full((6, 10), np.nan, "f4")}, r"encoder_W in .* holds 60 NaN or infinite values of 60"),
        ({"encoder_W": np.zeros((6, 10), "i4")}, r"encoder_W in .* has dtype int32, expected float32 or float64"),
        ({"encoder_W": np.array([{}], object)}, r"encoder_W in .* is an array of Python objects, .*never unpickled"),
        (dict.fromkeys(GAINS), r"no gains, expected those of the norms, because its option layer_normalisat"),
    ],
)
@pytest.mark.sample(8)
def test_archives_that_do_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Gains Nematus's own conversion drops: then the model is another one, unless that is meant."""
    save(tmp_path)
    rewrite(tmp_path, **changes)
    refuses(message, tmp_path, error=(TypeError, ValueError))
    if len(changes) == len(GAINS):
        assert nematus.load(tmp_path, norm="none").config.norm == "none"


def test_the_config_of_another_model(tmp_path: Path) -> None:
    save(tmp_path)
    reoption(tmp_path, enc_depth=2)
    refuses(r"lacks encoder_2_U and \d+ more, expected by the config as encoder/backward-s", tmp_path)
    reoption(tmp_path, enc_depth=1, dim=6)
    refuses(r"has shape .*, expected .* by the config; is it the config of another model", tmp_path)
    deep, parameters = config_of("rms").replace(rnn_dec_base_transition_depth=3), random_parameters(config_of("rms"))
    with pytest.raises(ValueError, match=r"save_theano: the model lacks decoder/base/gru2/gates_bias"):
        nematus.save_theano(tmp_path / "m", deep, parameters)
    assert not (tmp_path / "m").exists()


def test_what_belongs_to_the_trainer_is_left_out(tmp_path: Path) -> None:
    """Also as pickled objects, which Theano Nematus writes for some."""
    config, _ = save(tmp_path)
    rewrite(
        tmp_path, uidx=np.int64(3), history_errs=np.array([[1.0], None], object), adam_t=np.ones(3), zipped_params=None,
        accum3=np.ones(2), **{"loss/prior/encoder_W": np.ones(2)},
    )  # fmt: skip
    loaded = nematus.load(tmp_path)
    assert loaded.left_out == ("accum3", "adam_t", "decoder_c_tt", "loss/prior/encoder_W", "uidx")
    assert loaded.config == config


def test_averages_of_exponential_smoothing(tmp_path: Path) -> None:
    config, parameters = save(tmp_path)
    averages = {f"{row.theano}_smooth": 2 * parameters[row.name] for row in variables(config)}
    rewrite(tmp_path, **averages)
    plain = nematus.load(tmp_path)
    assert not plain.smoothed
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

    def fail(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", fail)
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
    for config in (config_of("rms"), config_of("plain"), config_of("transformer layer")):
        with pytest.raises(ValueError, match=r"the model is .* with .*, expected rnn with layer"):
            to_rms_norm(config, random_parameters(config))


def test_where_biases_are_added() -> None:
    """The rules of TensorFlow (v0.3 to master), and those of Theano."""
    cells = [("encoder", 0), ("encoder", 1), ("base", 0), ("base", 1), ("base", 2), ("high", 0), ("high", 1)]
    tensorflow = ["input", "none", "input", "state", "state", "state", "state"]
    theano = ["input", "outside", "input", "state", "state", "input", "outside"]
    for dialect, biases in (("tensorflow", tensorflow), ("tensorflow-v0.3", tensorflow), ("theano", theano)):
        config = config_of("plain").replace(dialect=dialect)
        assert [config.gru_bias(stack, index) for stack, index in cells] == biases  # type: ignore[arg-type]


@pytest.mark.filterwarnings(f"ignore:.*{OTHER_NUMBERS}:UserWarning")
def test_an_archive_of_theano_is_computed_as_theano_does_whatever_its_options_are_called(tmp_path: Path) -> None:
    config, _ = save(tmp_path, "deep", dialect="tensorflow-v0.3")
    assert nematus.load(tmp_path).config.dialect == "tensorflow-v0.3"
    reoption(tmp_path, dialect=None)
    for options in (None, write(config)):
        assert nematus.load(tmp_path, config=options).config.dialect == "theano"
        assert nematus.load(tmp_path, config=options, dialect="tensorflow").config.dialect == "tensorflow"
