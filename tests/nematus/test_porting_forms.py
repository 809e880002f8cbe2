"""Models in the files of every form: read back, by Keras and Flax themselves, too; and once around all forms."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import run, save, saved, skip_without, with_dictionaries
from nematus_models import KINDS, RELA, TRANSFORMERS, batch, config_of, random_parameters, refuses, same

from rmsnorm import nematus
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import write
from rmsnorm.nematus.convert import TARGETS
from rmsnorm.nematus.numpy import RNNSearch
from rmsnorm.nematus.vocabulary import dictionaries, read_vocabulary, vocabularies

BOUND = 1e-12  # of float64 logits of at most 10, as against the golden's

ZEROS = [RELA, "zero rnn"]
ALL = [*KINDS, *TRANSFORMERS, *ZEROS]
OF_TF = [kind for kind in ALL if kind not in ("rms with offset", *ZEROS)]
OF_THEANO = [kind for kind in KINDS if kind not in ("prelu", "mixture", "tied mixture", "lexical")]
# Forms, which of their files the model is, what kinds they have, and what else they consist of.
ROUND_TRIPS = [
    ("torch", "safetensors", "model.safetensors", ALL, ["", ".json"]),
    ("tf", "tensorflow", "model.npz", OF_TF, [".data-00000-of-00001", ".index", ".json", "checkpoint"]),
    ("tf", "tensorflow", "model-0", ZEROS, [".data-00000-of-00001", ".index", ".meta", "checkpoint", "param.json"]),
    ("theano", "theano", "model.npz", OF_THEANO, ["", ".json"]),
    ("flax", "flax", "model.orbax", [*list(KINDS)[::2], *list(TRANSFORMERS)[::2], *ZEROS], ["", ".json"]),
    ("keras", "keras", "model.keras", [*list(KINDS)[::4], *ALL[-3:]], [""]),  # its options are in it
]


@pytest.mark.parametrize(
    ("to", "form", "file", "kind", "files"),
    [(to, form, file, kind, files) for to, form, file, kinds, files in ROUND_TRIPS for kind in kinds],
)
@pytest.mark.filterwarnings("ignore:.*Theano Nematus will compute other numbers")
def test_a_round_trip_changes_no_bit(to: str, form: str, file: str, kind: str, files: Any, tmp_path: Path) -> None:
    """Nor an option, but that there are no averages; and what there is beside the model is what the form has."""
    of_training: dict[str, Any] = {"exponential_smoothing": 1e-4, "options": {"saveto": "elsewhere"}}
    config, parameters = save(tmp_path, kind, to, file, **of_training)
    loaded = nematus.load(tmp_path)
    assert (loaded.config, loaded.form, loaded.smoothed) == (config.replace(exponential_smoothing=0.0), form, False)
    assert loaded.config.options["saveto"] == "elsewhere"
    same(loaded.parameters, parameters)
    assert loaded.left_out == (("decoder_c_tt",) if to == "theano" else ())
    assert all("_drt_" in name for name in loaded.unused)
    transitions = (config.rnn_enc_transition_depth - 1) * config.rnn_enc_depth
    assert len(loaded.unused) == (4 * transitions if to == "theano" and "theano" not in kind else 0)
    wanted = [name if name and name[0] != "." else file + name for name in files]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(wanted)


@pytest.mark.parametrize(
    ("to", "file", "kind", "message"),
    [
        ("tf", "model.npz", "rms with offset", r"norm_offset is True, expected False: RMSNorm has no offset in Nem"),
        ("keras", "model.npz", "rms", r"save_keras: path is .*model.npz', expected a name that ends in .keras"),
        ("torch", "model.npz", "rms", r"path is '.*model.npz', expected a name that ends in .safetensors; add it"),
        ("theano", "model.npz", "zero rnn", r"save_theano: dialect is 'zero', expected one of Nematus"),
        ("theano", "model.npz", "mixture", r"Theano Nematus has no variable like decoder/"),
        ("theano", "model.npz", "lexical", r"Theano Nematus has no variable like decoder/"),
        ("theano", "model.npz", "prelu", r"Theano Nematus has no variable like decoder/"),
        ("flax", ".", "rms", r" exists, expected a new directory; name another"),
    ],
)
def test_what_a_form_refuses(to: str, file: str, kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileExistsError), match=message):
        save(tmp_path, kind, to, file)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_keras_itself_reads_it(tmp_path: Path) -> None:
    """By its load_model and load_weights; and what Keras has saved is read back, without the slots of its optimizer."""
    keras, _ = pytest.importorskip("keras"), pytest.importorskip("tensorflow")
    from rmsnorm.nematus.tf import RNNSearch as InKeras

    config = config_of("layer")
    parameters = random_parameters(config)
    nematus.save_keras(tmp_path / "model.keras", config, parameters)
    model = keras.saving.load_model(tmp_path / "model.keras")
    x, x_mask, y, _ = batch(config)
    wanted = RNNSearch(config, parameters).logits(x, x_mask, y)
    np.testing.assert_allclose(np.asarray(model.logits(x, x_mask, y)), wanted, rtol=0, atol=BOUND)
    model.save_weights(tmp_path / "model.weights.h5")
    other = InKeras(config, random_parameters(config, seed=1))
    other.load_weights(tmp_path / "model.weights.h5")
    same({name: np.asarray(value) for name, value in other.by_name().items()}, parameters)
    same(nematus.load(tmp_path / "model.weights.h5", config=write(config)).parameters, parameters)

    model.compile(optimizer=keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    tuned = random_parameters(config, seed=2)
    for name, value in model.by_name().items():
        value.assign(tuned[name])
    model.save(tmp_path / "tuned.keras")
    loaded = nematus.load(tmp_path / "tuned.keras")
    assert loaded.config == config
    same(loaded.parameters, tuned)


@pytest.mark.parametrize("kind", ["layer", "tied all", "transformer tied all"])
def test_flax_itself_reads_it(kind: str, tmp_path: Path) -> None:
    """By Orbax into the state of a model; and what Orbax has saved of one is read back, as a dictionary or a State."""
    orbax = pytest.importorskip("orbax.checkpoint")
    import jax
    from flax import nnx

    config, parameters = save(tmp_path, kind, "flax")
    model = model_class("flax", config)(config, random_parameters(config, "float32", seed=1))
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    with orbax.StandardCheckpointer() as checkpointer:
        wanted = jax.tree.map(orbax.utils.to_shape_dtype_struct, state)
        nnx.update(model, checkpointer.restore(tmp_path / "model.orbax", wanted))
    same({name: np.asarray(value) for name, value in model.by_name().items()}, parameters)
    for name, state in (("dictionary", nnx.to_pure_dict(nnx.state(model, nnx.Param))), ("state", nnx.state(model))):
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, state)
        same(nematus.load(tmp_path / name, config=write(config)).parameters, parameters)


@pytest.mark.parametrize(
    ("form", "module", "name"),
    [("keras", "h5py", "Keras"), ("flax", "orbax.checkpoint", "Flax"), ("tf", "tensorflow", "TensorFlow")],
)
def test_without_the_framework(
    form: str, module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, path = config_of("rms"), tmp_path / TARGETS[form].file
    file = {"keras": path, "flax": path / "_CHECKPOINT_METADATA", "tf": Path(f"{path}.index")}[form]
    file.parent.mkdir(exist_ok=True)
    file.touch()
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"{name} is not installed, expected for this backend; from a checkout.*pip install '\.\["
    refuses(message, path, error=ModuleNotFoundError, config=write(config))
    if form != "keras":  # whose form Keras itself writes
        with pytest.raises(ModuleNotFoundError, match=message):
            TARGETS[form].save(tmp_path / "out", config, random_parameters(config))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dialect"), [("layer", "theano"), ("tied all", "tensorflow")])
def test_once_around(kind: str, dialect: str, tmp_path: Path) -> None:
    """TensorFlow to PyTorch to Theano to Flax to TensorFlow to Keras and back: each tensor, option and dictionary."""
    for form in ("tf", "torch", "flax", "keras"):
        skip_without(form)
    config, parameters = save(tmp_path, with_dictionaries(tmp_path, config_of(kind)), "tf", dialect=dialect)
    folder = tmp_path
    for number, form in enumerate(("torch", "theano", "flax", "tf", "keras", "tf")):
        out = tmp_path / f"{number}.{form}"
        run("nematus", folder, out, "--to", form)
        loaded = nematus.load(out)
        assert loaded.config == config
        assert loaded.path.name == TARGETS[form].file
        same(loaded.parameters, parameters)
        assert json.loads((out / "1.json").read_text()) == json.loads((tmp_path / "1.json").read_text())
        folder = out
    for file in ("model.npz.index", "model.npz.data-00000-of-00001"):
        assert (folder / file).read_bytes() == (tmp_path / file).read_bytes(), "the first and the last files"


@pytest.mark.parametrize("to", TARGETS)
def test_a_tuned_model_in_a_new_folder_has_its_dictionaries(to: str, tmp_path: Path) -> None:
    skip_without(to)
    read, new = tmp_path / "read", tmp_path / "new"
    read.mkdir()
    new.mkdir()
    saved(read, "layer")
    model = nematus.load(read)
    TARGETS[to].save(new / TARGETS[to].file, model.config, model.parameters)
    again = nematus.load(new)
    assert dictionaries(again) == [new / "0.json", new / "1.json"]
    assert vocabularies(again) == vocabularies(model)
    assert str(read) not in "".join(path.read_text() for path in new.glob("*.json"))
    (new / "1.json").unlink()
    message = r"new/1\.json is missing, expected .*; copy 1\.json from the folder of .* into .*/new, or name"
    with pytest.raises(FileNotFoundError, match=message):
        vocabularies(nematus.load(new))
    (read / "1.json").unlink()
    (new / "0.json").write_text("{}")
    if to != "flax":  # it replaces no folder
        with pytest.warns(UserWarning, match=r"1\.json is missing: copy it beside the result"):
            TARGETS[to].save(new / TARGETS[to].file, model.config, model.parameters)
        assert read_vocabulary(new / "0.json", 9, 1) == read_vocabulary(read / "0.json", 9, 1)
