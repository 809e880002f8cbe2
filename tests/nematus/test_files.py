"""Models in the files of every form: what is written, where models are found, and what a training run leaves there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import checkpoint, rewrite, run, save, saved, skip_without
from nematus_models import (
    CONFIGS,
    KINDS,
    RELA,
    RUNS,
    TRANSFORMERS,
    random_parameters,
    reference,
    refuses,
    reoption,
    same,
)

from rmsnorm import nematus
from rmsnorm.nematus.convert import TARGETS
from rmsnorm.nematus.names import unused, variables
from rmsnorm.nematus.options import scope_of_zero, write
from rmsnorm.nematus.vocabulary import dictionaries, vocabularies

pytestmark = pytest.mark.filterwarnings("ignore:.*Theano Nematus will compute other numbers")
ZEROS = [RELA, "zero rnn"]
# Forms, which of their files the model is, what kinds they do not have or one of how many, and what else there is.
NOT_TF, NOT_THEANO = ["rms with offset", *ZEROS], ["prelu", "mixture", "tied mixture", "lexical", *TRANSFORMERS, *ZEROS]
OF_TF = [".data-00000-of-00001", ".index", "checkpoint"]
ALL = [*KINDS, *TRANSFORMERS, *ZEROS]
ROUND_TRIPS = [
    ("torch", "safetensors", "model.safetensors", ALL, ["", ".json"]),
    ("tf", "tensorflow", "model.npz", [kind for kind in ALL if kind not in NOT_TF], [*OF_TF, ".json"]),
    ("tf", "tensorflow", "model-0", ZEROS, [*OF_TF, ".meta", "param.json"]),
    ("theano", "theano", "model.npz", [kind for kind in ALL if kind not in NOT_THEANO], ["", ".json"]),
    ("keras", "keras", "model.keras", [*list(KINDS)[::4], *ALL[-3:]], [""]),  # its options are in it
]


@pytest.mark.parametrize(("to", "form", "file", "kinds", "files"), ROUND_TRIPS, ids=[row[2] for row in ROUND_TRIPS])
def test_a_round_trip_changes_no_bit(to: str, form: str, file: str, kinds: Any, files: Any, tmp_path: Path) -> None:
    """Nor an option, but that there are no averages; and what there is beside the model is what the form has."""
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        config, parameters = save(folder, kind, to, file, exponential_smoothing=1e-4, options={"saveto": "elsewhere"})
        loaded = nematus.load(folder)
        found = (loaded.config, loaded.form, loaded.smoothed, loaded.config.options["saveto"])
        assert found == (config.replace(exponential_smoothing=0.0), form, False, "elsewhere"), kind
        same(loaded.parameters, parameters)
        assert loaded.left_out == (("decoder_c_tt",) if to == "theano" else ())
        transitions = (config.rnn_enc_transition_depth - 1) * config.rnn_enc_depth
        assert len(loaded.unused) == (4 * transitions if to == "theano" and "theano" not in kind else 0)
        wanted = [name if name and name[0] != "." else file + name for name in files]
        assert sorted(path.name for path in folder.iterdir()) == sorted(wanted)


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_checkpoint_comes_back_from_every_form(name: str, tmp_path: Path) -> None:
    """Each file of TensorFlow byte for byte, with the options, by way of every form that has such a model."""
    tf = pytest.importorskip("tensorflow")
    config, parameters, _ = reference(name).model()
    options = {name: value for name, value in config.options.items() if "dict" not in name and "vocab_file" not in name}
    config, to = config.replace(exponential_smoothing=0.0, options=options), config.rules.checkpoint
    forms = ["torch", "keras", *(["theano"] if all(row.theano for row in variables(config)) else [])]
    first = tmp_path / "first"
    first.mkdir()
    nematus.save_tensorflow(first / to, config, parameters)
    names = tf.train.load_checkpoint(str(first / to)).get_variable_to_shape_map()
    assert sorted(names) == sorted(reference(name).tensors), "as the program named them"
    model = nematus.load(first)
    for form in forms:
        folder = tmp_path / form
        folder.mkdir()
        TARGETS[form].save(folder / TARGETS[form].file, model.config, model.parameters)
        model = nematus.load(folder)
        assert model.config == config
        same(model.parameters, parameters)
    nematus.save_tensorflow(tmp_path / to, model.config, model.parameters)
    for file in (f"{to}.index", f"{to}.data-00000-of-00001"):
        assert (tmp_path / file).read_bytes() == (first / file).read_bytes()


@pytest.mark.parametrize(
    ("to", "kind", "message"),
    [
        ("tf", "rms with offset", r"norm_offset is True, expected False: RMSNorm has no offset in Nem"),
        ("theano", "zero rnn", r"save_theano: dialect is 'zero', expected one of Nematus"),
        *(("theano", kind, "no variable like decoder/") for kind in ("mixture", "lexical", "prelu")),
    ],
)
def test_a_form_refuses_what_it_cannot_keep(to: str, kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        save(tmp_path, kind, to)
    assert not list(tmp_path.iterdir())


def test_what_theano_computes_otherwise_is_said(tmp_path: Path) -> None:
    """An archive of Theano is computed as Theano does, whatever its options are called."""
    for kind, why in (("relu", "its output activation is tanh"), ("deep", "it adds the biases of decoder/high")):
        with pytest.warns(UserWarning, match=f"Theano Nematus will compute other numbers: {why}"):
            config, _ = save(tmp_path, kind, dialect="tensorflow-v0.3")
    assert nematus.load(tmp_path).config.dialect == "tensorflow-v0.3"
    reoption(tmp_path, dialect=None)
    for options in (None, write(config)):
        assert nematus.load(tmp_path, config=options).config.dialect == "theano"
        assert nematus.load(tmp_path, config=options, dialect="tensorflow").config.dialect == "tensorflow"


@pytest.mark.parametrize("name", ["model.npz-1000", "model.iter1000.npz", "model.npz.best-valid-script", "model.npz"])
def test_where_models_and_their_options_are_looked_for(name: str, tmp_path: Path) -> None:
    """Checkpoints from the midst of training have the options of the model."""
    refuses(r"holds no model, expected a checkpoint \(\*.index\), an archive", tmp_path)
    refuses(r"nothing.npz is neither a directory, nor a file, nor the prefix", tmp_path / "nothing.npz")
    config, parameters = save(tmp_path)
    path = (tmp_path / "model.npz").rename(tmp_path / name)
    assert nematus.load(path).config == config
    elsewhere = (tmp_path / "model.npz.json").rename(tmp_path / "options.json")
    refuses(r"the options of .* are missing", path)
    for options in (elsewhere, write(config, theano=True)):
        assert nematus.load(path, config=options).config == config
    elsewhere.rename(tmp_path / "config.json")
    assert nematus.load(path).config == config
    if path.suffix == ".npz":
        assert nematus.load(tmp_path).path == path
        nematus.save_theano(tmp_path / "model.two.npz", config, parameters)
        (tmp_path / f"{name}.json").write_text(json.dumps(write(config, theano=True)))
        refuses(r"holds 2 models, expected one; name one of model.*.npz, model.*.npz", tmp_path)


def test_which_of_several_checkpoints_is_read(tmp_path: Path) -> None:
    """The file ``checkpoint`` says which is the newest; a prefix and a file may have one name."""
    skip_without("tf")
    config = CONFIGS["layer"]
    for number in (1000, 2000):
        nematus.save_tensorflow(tmp_path / f"model.npz-{number}", config, random_parameters(config, seed=number))
        Path(tmp_path / f"model.npz-{number}.json").rename(tmp_path / "model.npz.json")
    same(nematus.load(tmp_path).parameters, random_parameters(config, seed=2000))
    for file in ("model.npz-1000", "model.npz-1000.index", "model.npz-1000.data-00000-of-00001"):
        same(nematus.load(tmp_path / file).parameters, random_parameters(config, seed=1000))
    (tmp_path / "checkpoint").unlink()
    refuses(r"holds 2 models, expected one; name one of model.npz-1000.index, model.npz-2000.index", tmp_path)
    nematus.save_theano(tmp_path / "model.npz-1000", config, random_parameters(config))
    refuses(r"npz-1000 is a file and the prefix of .*; name model.npz-1000.index, or move", tmp_path / "model.npz-1000")


@pytest.mark.parametrize("to", ["torch", "keras", "tf", "theano"])
def test_a_model_in_a_new_folder_has_its_dictionaries(to: str, tmp_path: Path) -> None:
    skip_without(to)
    read, new = tmp_path / "read", tmp_path / "new"
    saved(read, "layer")
    new.mkdir()
    model = nematus.load(read)
    TARGETS[to].save(new / TARGETS[to].file, model.config, model.parameters)
    again = nematus.load(new)
    assert dictionaries(again.config) == [new / "0.json", new / "1.json"]
    assert vocabularies(again) == vocabularies(model)
    assert str(read) not in "".join(path.read_text() for path in new.glob("*.json"))
    (new / "1.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"new/1\.json is missing, expected .*; copy 1\.json from"):
        vocabularies(nematus.load(new))
    (read / "1.json").unlink()
    with pytest.warns(UserWarning, match=r"1\.json is missing: copy it beside the result"):
        TARGETS[to].save(new / TARGETS[to].file, model.config, model.parameters)


@pytest.mark.parametrize("decay", [0.0, 1e-4])
@pytest.mark.parametrize("name", ["A4", "B", "Z1", "Z2"])
def test_what_a_training_run_of_tensorflow_leaves(name: str, decay: float, tmp_path: Path) -> None:
    """Slots, backups, counters and biases that are never added; averages, which are taken if options ask for them."""
    recorded, is_zero = reference(name), name[0] == "Z"
    config, parameters, _ = recorded.model()
    slots, average, option = ["Adam", "Adam_1"], "_smooth", "exponential_smoothing"
    extra: dict[str, Any] = {"beta1_power": np.float32(0.9), "beta2_power": np.float32(0.99), "time": np.int32(7)}
    if is_zero:
        slots += ["CTrainOpBackUpReplica", "CTrainOpReplica"]
        average, option = "/ExponentialMovingAverage", "ema_decay"
        extra |= {"global_step": np.int64(7), "loss/CTrainOpReplica": np.float32(0), "other/bias": np.ones(3, "f4")}
    extra |= {f"{key}/{slot}": 0 * value for key, value in recorded.tensors.items() for slot in slots}
    averages = {f"{key}{average}": 2 * value for key, value in recorded.tensors.items()}
    dead = [key for key in unused(config) if key.startswith("encoder/") and "gru1" in key] if name == "A4" else []
    tensors = {**recorded.tensors, **extra, **averages, **{key: np.ones(1, "f4") for key in dead}}
    options = {**recorded.options, option: decay or -1.0 * is_zero}
    checkpoint(tmp_path / "model.npz", tensors, options, "param.json" if is_zero else "model.npz.json")
    loaded = nematus.load(tmp_path)
    assert loaded.config == config.replace(exponential_smoothing=decay)
    assert (loaded.names == "v0.3", loaded.smoothed, set(loaded.unused)) == (name == "B", decay > 0, set(dead))
    scope = f"{scope_of_zero(recorded.options)}/" if is_zero else ""
    left_out = {*extra, *(recorded.tensors if decay else averages)}
    assert {key.removeprefix("/") for key in loaded.left_out} == {key.removeprefix(scope) for key in left_out}
    same(loaded.parameters, {key: (1 + (decay > 0)) * value for key, value in parameters.items()})
    assert ("the averages are taken" if decay else "its options ask for no averages") in run("info", tmp_path)


def test_what_a_training_run_of_theano_leaves(tmp_path: Path) -> None:
    """Numbers of the trainer, also as pickled objects, and averages, which are taken where the options ask for them."""
    config, parameters = save(tmp_path)
    averages = {f"{row.theano}_smooth": 2 * parameters[row.name] for row in variables(config)}
    slots = {"adam_t": np.ones(3), "accum3": np.ones(2), "loss/prior/encoder_W": np.ones(2), "uidx": np.int64(3)}
    pickled = dict.fromkeys(("history_errs", "zipped_params"), np.array([[1.0], None], object))
    rewrite(tmp_path, **averages, **slots, **pickled)
    plain = nematus.load(tmp_path)
    assert plain.left_out == tuple(sorted([*averages, *slots, "decoder_c_tt"]))
    same(plain.parameters, parameters)
    reoption(tmp_path, exponential_smoothing=1e-4)
    smooth = nematus.load(tmp_path)
    assert (plain.smoothed, smooth.smoothed) == (False, True)
    same(smooth.parameters, {name: 2 * array for name, array in parameters.items()})
    rewrite(tmp_path, ff_state_b_smooth=None)
    refuses(r"smoothed, lacks ff_state_b_smooth, expected by the config as decoder/initial", tmp_path / "model.npz")


def test_the_names_of_every_version(tmp_path: Path) -> None:
    """As Nematus's converters know them; a checkpoint has those of its dialect."""
    known = {row.name: row for row in variables(CONFIGS["deep theano with offset"])}
    for name, v01, theano in (
        ("encoder/forward-stack/level0/gru0/gates_bias", "encoder/forwardEncoder/gates_bias", "encoder_b"),
        ("encoder/forward-stack/level1/gru0/state_to_gates", None, "encoder_r_2_U"),
        ("encoder/backward-stack/level1/gru1/gates_state_norm/new_std", None, "encoder_2_U_drt_1_lns"),
        ("decoder/base/gru1/gates_x_norm/new_std", "decoder/gates_x_norm_1/new_std", "decoder_Wc_lns"),
        ("decoder/base/gru2/proposal_state_norm/new_mean", None, "decoder_Ux_nl_drt_1_lnb"),
        ("decoder/embedding/embeddings", "decoder/y_embeddings_layer/embeddings", "Wemb_dec"),
        ("decoder/next_word_predictor/state_to_hidden/new_std", None, "ff_logit_lstm_ln_s"),
    ):
        assert (known[name].v01, known[name].theano) == (v01 or name, theano)
    assert {row.theano for row in variables(CONFIGS["factors"])} >= {"Wemb", "Wemb1"}
    config, _ = save(tmp_path, "deep theano", "tf")
    names = pytest.importorskip("tensorflow").train.load_checkpoint(str(tmp_path / "model.npz"))
    assert names.get_variable_to_shape_map().keys() == {row.v01 for row in variables(config)}, "as Nematus converts"


def test_the_saver_of_tensorflow_restores_what_is_written_for_zero(tmp_path: Path) -> None:
    """Under the scope of the options, with the graph for whose file zero looks; and options on one line."""
    v1 = pytest.importorskip("tensorflow").compat.v1
    _, parameters = save(tmp_path, RELA, "tf", "model-7", options={"scope_name": "nmt"})
    text = (tmp_path / "param.json").read_text()
    asked = [json.loads(text)[name] for name in ("model_name", "hidden_size", "num_heads", "ema_decay")]
    assert (asked, len(text.splitlines())) == (["transformer_rela", 9, 3, -1.0], 1), "there are no averages"
    assert (tmp_path / "checkpoint").read_text().splitlines()[0] == 'model_checkpoint_path: "model-7"'
    with v1.Graph().as_default(), v1.Session() as session:
        variables = {name: v1.get_variable(f"nmt/{name}", value.shape) for name, value in parameters.items()}
        v1.train.Saver().restore(session, str(tmp_path / "model-7"))
        same(session.run(variables), parameters)


def test_a_transformer_whose_other_option_tied_the_projection(tmp_path: Path) -> None:
    """Nematus's first Transformers tied the projection when encoder and decoder shared their embeddings."""
    shared = CONFIGS["transformer tied encoder"]
    tied = shared.replace(tie_decoder_embeddings=True)
    checkpoint(tmp_path / "model.npz", random_parameters(tied, "float32"), write(shared))
    assert nematus.load(tmp_path).config == tied
    checkpoint(tmp_path / "model.npz", random_parameters(shared, "float32"), write(tied))
    assert nematus.load(tmp_path).config == shared


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
    tf = pytest.importorskip("tensorflow")

    def full(**arguments: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "a file; No space left on device")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", full)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path / "of tf", to="tf")
    assert not list((tmp_path / "of tf").iterdir())
