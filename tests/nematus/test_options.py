"""The options of Nematus's programs and the fields of a config, the norm that names tell, RMSNorm of LayerNorm."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import rewrite, save
from nematus_models import CONFIGS, FACTORS, KINDS, TRANSFORMERS, batch, random_parameters, refuses, reoption

from rmsnorm import nematus
from rmsnorm.nematus.centring import to_rms_norm
from rmsnorm.nematus.convert import TARGETS
from rmsnorm.nematus.dialects import LEGACY
from rmsnorm.nematus.names import check, variables
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.options import read, write

GAINS = [str(row.theano) for row in variables(CONFIGS["rms"]) if row.name.endswith("/scale")]


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
    rewrite(tmp_path, **dict.fromkeys(GAINS))  # Nematus's own conversion drops them
    refuses(r"no gains, expected those of the norms, because its option layer_normalisat", tmp_path)
    assert nematus.load(tmp_path, norm="none").config.norm == "none"


def test_a_norm_that_the_names_contradict_is_refused(tmp_path: Path) -> None:
    """It would be another model; nor do other options than those of this package change what the names say."""
    for kind, asked, possible in (
        ("deep v0.3", "layer", "rms or prms"),
        ("zero rnn layer", "prms", "layer"),
        ("zero rnn", "layer", "rms or prms"),
        ("plain", "layer", "none"),
        ("layer", "rms", "layer"),
    ):
        config, _ = save(tmp_path, kind, "numpy")
        refuses(rf"norm is '{asked}', expected {possible}, as its variables say; leave it out", tmp_path, norm=asked)
        assert nematus.load(tmp_path).config == config
    reoption(tmp_path, "model.safetensors.json", layer_normalization_type="rmsnorm")
    assert nematus.load(tmp_path).config == config


@pytest.mark.parametrize(("kind", "form"), [("rms", "numpy"), ("deep theano", "theano"), ("zero rms", "numpy")])
def test_every_form_says_which_norm_it_was(kind: str, form: str, tmp_path: Path) -> None:
    for norm, norm_offset in (("rms", True), ("rms", False), ("prms", True), ("prms", False), ("layer", True)):
        config, _ = save(tmp_path, kind, form, norm=norm, norm_offset=norm_offset)
        assert nematus.load(tmp_path / TARGETS[form].file).config == config


OLD = {
    "embedding_size": 12, "state_size": 16, "source_vocab_sizes": [37], "target_vocab_size": 41, "enc_depth": 2,
    "dec_depth": 3, "use_layer_norm": True, "use_dropout": False, "dropout_hidden": 0.2, "saveto": "model.npz",
    "dec_base_recurrence_transition_depth": 4, "tie_decoder_embeddings": True,
}  # fmt: skip
THEANO = {"dim_word": 12, "dim": 16, "n_words_src": 37, "n_words": 41, "factors": 2, "dim_per_factor": [10, 2]}
V04 = {"rnn_enc_depth": 2, **{name: OLD[name] for name in ("embedding_size", "state_size", "target_vocab_size")}}
FIRST = {**V04, "embedding_size": 16, "model_type": "transformer", "source_vocab_sizes": [37]}
ZERO = {"model_name": "transformer", "hidden_size": 16, "embed_size": 16, "num_heads": 4}
SIZES: dict[str, Any] = {"source_vocab_sizes": (9,), "target_vocab_size": 8}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (OLD, {"dialect": "tensorflow-v0.3", "search": "costs", "rnn_enc_depth": 2, "rnn_dec_depth": 3}),
        (OLD, {"rnn_dec_base_transition_depth": 4, "tie_decoder_embeddings": True, "rnn_dropout_hidden": 0.0}),
        (THEANO, {"dialect": "theano", "source_vocab_sizes": (37, 37), "search": "sampler"}),
        ({**FIRST, "transformer_encoder_layers": 3}, {"transformer_enc_depth": 3, "transformer_dec_depth": 6}),
        ({**V04, "source_vocab_size": 37}, {"dialect": "tensorflow", "search": "costs"}),
        ({**V04, "source_vocab_size": 37, "translation_strategy": "beam_search"}, {"search": "sampler"}),
        ({**ZERO, "label_smooth": 1.5, "ema_decay": -1.0}, {"label_smoothing": 0.0, "exponential_smoothing": 0.0}),
        ({**ZERO, "label_smooth": 0.3, "ema_decay": 0.99}, {"label_smoothing": 0.3, "exponential_smoothing": 0.99}),
        ({**ZERO, "dropout": None, "attention_dropout": -1}, {"transformer_dropout_embeddings": 0.0}),
        ({**ZERO, "dtype_inf": 1e4, "dtype_epsilon": 1e-6}, {"masked_score": -1e4, "eps": 1e-6}),
        ({**ZERO, "model_name": "transformer_rela"}, {"relu_attention": True, "eps": 1e-8, "masked_score": -1e8}),
        ({**ZERO, "model_name": "transformer_aan"}, "model_name is 'transformer_aan', expected 'transformer' or"),
        ({**ZERO, "default_dtype": "float16"}, "default_dtype is 'float16', expected 'float32' or 'float64'.*not port"),
        ({**ZERO, "enable_noise_beam_search": True}, "enable_noise_beam_search is True, expected False"),
        ({**ZERO, "model_name": "rnnsearch", "cell": "atr"}, "cell is 'atr', expected 'gru'; this part of zero is not"),
        ({**ZERO, "num_heads": 3}, "transformer_num_heads is 3, expected a divisor of 16"),
        ({**ZERO, "dtype_inf": "1e8"}, "masked_score is None, expected a number"),
    ],
)
def test_the_options_of_every_program(options: dict[str, Any], wanted: Any) -> None:
    """The fields of the config, or why they cannot be; and back."""
    known = {"norm": "rms", **(SIZES if "model_name" in options else {})}
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            read(options, **known)
        return
    config = read(options, **known)
    assert wanted.items() <= vars(config).items()
    assert read(write(config), **known) == config
    assert not options.keys() & LEGACY.keys() - write(config).keys(), "under the names of the version"


def test_options_are_written_as_they_are_read() -> None:
    for config in (CONFIGS[kind] for kind in (*KINDS, *TRANSFORMERS)):
        assert read(write(config), norm=config.norm, norm_offset=config.norm_offset) == config
    assert max(Counter([*LEGACY, *(name for names in LEGACY.values() for name in names)]).values()) == 1
    unusual = {"eps": 1e-3, "masked_score": -1e4, "beam_size": 3, "normalization_alpha": 0.6, "search": "costs"}
    for dialect in ("tensorflow", "tensorflow-v0.3", "theano"):
        config = CONFIGS["rms"].replace(dialect=dialect, **unusual)
        assert read(write(config), norm="rms") == config, "of what Nematus has no option for, too"
    assert "rmsnorm" not in write(CONFIGS["rms"].replace(options=write(config))), "where all is usual"
    assert write(read(OLD, norm="rms"))["saveto"] == "model.npz"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("tied encoder", {"rnn_lexical_model": True}, "rnn_lexical_model is True, expected False where the decoder sh"),
        ("rms", {"relu_attention": True}, "relu_attention is True, expected False but in a Transformer of the dialect"),
        ("rms", {"search": "zero"}, "search is 'zero', expected zero in the dialect zero, and only there"),
        ("zero rnn", {"rnn_dec_depth": 2}, "rnn_dec_depth is 2, expected 1, as zero has no such option"),
        ("zero rnn", FACTORS, r"source_vocab_sizes is \(8, 4\), expected one factor in zero"),
        ("transformer rms", {"softmax_mixture_size": 2}, "model_type is 'transformer', expected rnn where there is a"),
        ("rms", {"dim_per_factor": (2,), "search": "zero"}, r"dim_per_factor is \(2,\).*; and search is 'zero'"),
    ],
)
def test_fields_that_contradict_each_other(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CONFIGS[kind].replace(**changes)


@pytest.mark.parametrize("kind", ["layer", "deep of odd depth", "deep theano with offset", "lexical", "zero rnn layer"])
def test_layer_norm_becomes_rms_norm_exactly(kind: str) -> None:
    """In zero the offsets go into biases."""
    config = CONFIGS[kind]
    parameters, sentences = random_parameters(config), batch(config)[:3]
    new, converted = to_rms_norm(config, parameters)
    assert (new.norm, new.norm_offset) == ("rms", config.dialect != "zero")
    check("test", new, converted)
    wanted = RNNSearch(config, parameters).logits(*sentences)
    np.testing.assert_allclose(RNNSearch(new, converted).logits(*sentences), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["rms", "plain", "transformer layer", "zero layer"])
def test_what_cannot_become_rms_norm(kind: str) -> None:
    """The sums of a Transformer of zero have a mean of their own."""
    with pytest.raises(ValueError, match=r"the model is .* with .*, expected rnn with layer"):
        to_rms_norm(CONFIGS[kind], random_parameters(CONFIGS[kind]))
