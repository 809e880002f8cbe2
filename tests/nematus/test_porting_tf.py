"""TensorFlow checkpoints of Nematus and zero: names of every version, what the trainer adds, a full disk."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nematus_commands import checkpoint, run, save
from nematus_models import config_of, random_parameters, reference, refuses, same
from programs import finished

from rmsnorm import nematus
from rmsnorm.nematus import zero
from rmsnorm.nematus.config import write
from rmsnorm.nematus.names import unused, variables

tf = pytest.importorskip("tensorflow")
ZERO_SLOTS = ("CTrainOpBackUpReplica", "CTrainOpReplica")


@pytest.mark.parametrize("decay", [0.0, 1e-4])
@pytest.mark.parametrize(("name", "norm"), [("A4", "rms"), ("B", "rms"), ("Z1", "rms"), ("Z2", "layer")])
def test_what_a_training_run_leaves(name: str, norm: str, decay: float, tmp_path: Path) -> None:
    """Slots, backups, counters and biases that are never added; averages, which are taken if options ask for them."""
    recorded, is_zero = reference(name), name[0] == "Z"
    config, parameters, _ = recorded.model(norm)
    slots, average, option = ["Adam", "Adam_1"], "_smooth", "exponential_smoothing"
    extra: dict[str, Any] = {"beta1_power": np.float32(0.9), "beta2_power": np.float32(0.99), "time": np.int32(7)}
    if is_zero:
        slots, average, option = [*slots, *ZERO_SLOTS], "/ExponentialMovingAverage", "ema_decay"
        extra |= {"global_step": np.int64(7), "loss/CTrainOpReplica": np.float32(0), "other/bias": np.ones(3, "f4")}
    extra |= {f"{key}/{slot}": 0 * value for key, value in recorded.tensors.items() for slot in slots}
    averages = {f"{key}{average}": 2 * value for key, value in recorded.tensors.items()}
    dead = {}
    if name == "A4":
        dead = {key: np.ones(1, "f4") for key in unused(config) if key.startswith("encoder/") and "gru1" in key}
        assert len(dead) == 8
    tensors = {**recorded.tensors, **extra, **averages, **dead}
    options = {**recorded.options, option: decay or -1.0 * is_zero}
    checkpoint(tmp_path / "model.npz", tensors, options, "param.json" if is_zero else "model.npz.json")
    loaded = nematus.load(tmp_path)
    assert loaded.config == config.replace(exponential_smoothing=decay)
    assert (loaded.names == "v0.3", loaded.smoothed) == (name == "B", decay > 0)
    left_out = {*extra, *(recorded.tensors if decay else averages)}
    scope = f"{zero.scope(recorded.options)}/" if is_zero else ""
    assert {key.removeprefix("/") for key in loaded.left_out} == {key.removeprefix(scope) for key in left_out}
    assert set(loaded.unused) == set(dead)
    same(loaded.parameters, {key: (1 + (decay > 0)) * value for key, value in parameters.items()})
    assert ("the averages are taken" if decay else "its options ask for no averages") in run("info", tmp_path)


def test_the_names_and_options_of_the_version_are_written(tmp_path: Path) -> None:
    columns = {"rms": "name", "deep v0.3": "v03", "deep v0.4": "v03", "deep theano with offset": "v01"}
    for kind, column in columns.items():
        config, parameters = save(tmp_path, kind, "tf", norm="rms", norm_offset=False)  # LayerNorm has one name in all
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(tmp_path)))
        same({row.name: reader.get_tensor(getattr(row, column)) for row in variables(config)}, parameters)
        options = json.loads((tmp_path / "model.npz.json").read_text())
        assert ("rnn_enc_depth" in options) == (column == "name" or kind == "deep v0.4")
        assert ("embedding_size" in options) == (column != "v01")


def test_numbered_checkpoints(tmp_path: Path) -> None:
    """The options may stand beside the unnumbered name; ``checkpoint`` says which is the newest."""
    config = config_of("layer")
    for number in (1000, 2000):
        nematus.save_tensorflow(tmp_path / f"model.npz-{number}", config, random_parameters(config, seed=number))
        Path(tmp_path / f"model.npz-{number}.json").rename(tmp_path / "model.npz.json")
    same(nematus.load(tmp_path).parameters, random_parameters(config, seed=2000))
    for file in ("model.npz-1000", "model.npz-1000.index", "model.npz-1000.data-00000-of-00001"):
        same(nematus.load(tmp_path / file).parameters, random_parameters(config, seed=1000))
    (tmp_path / "checkpoint").unlink()
    refuses(r"holds 2 models, expected one; name one of model.npz-1000.index, model.npz-2000.index", tmp_path)


def test_an_archive_with_the_name_of_a_tensorflow_checkpoint(tmp_path: Path) -> None:
    config = config_of("layer")
    for write_model, seed in ((nematus.save_tensorflow, 1), (nematus.save_theano, 2)):
        write_model(tmp_path / "model.npz", config, random_parameters(config, seed=seed))
    (tmp_path / "checkpoint").unlink()
    refuses(r"holds 2 models, expected one; name one of model.npz.index, model.npz$", tmp_path)
    refuses(r"model.npz is a file and the prefix of .*; name model.npz.index, or move", tmp_path / "model.npz")
    same(nematus.load(tmp_path / "model.npz.index").parameters, random_parameters(config, seed=1))


def test_a_transformer_whose_other_option_tied_the_projection(tmp_path: Path) -> None:
    """Nematus's first Transformers tied the projection when encoder and decoder shared their embeddings."""
    config = config_of("transformer rms").replace(tie_encoder_decoder_embeddings=True, source_vocab_sizes=(8,))
    tied = config.replace(tie_decoder_embeddings=True)
    checkpoint(tmp_path / "model.npz", random_parameters(tied, "float32"), write(config))
    assert nematus.load(tmp_path).config == tied
    untied = config_of("transformer rms")
    parameters = random_parameters(untied, "float32")
    checkpoint(tmp_path / "model.npz", parameters, {**write(untied), "tie_decoder_embeddings": True})
    assert not nematus.load(tmp_path).config.tie_decoder_embeddings
    lacking = {key: value for key, value in parameters.items() if "softmax" not in key}
    checkpoint(tmp_path / "model.npz", lacking, write(untied))
    refuses(r"lacks transformer_model/softmax_projection_layer/embedding_table, expected", tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "a file; No space left on device")

    monkeypatch.setattr(tf.raw_ops, "SaveV2", fail)
    with pytest.raises(OSError, match="No space left on device"):
        save(tmp_path, to="tf")
    assert not [*tmp_path.iterdir()]


def test_another_backend_of_keras_is_refused() -> None:
    """The models are written in TensorFlow's operations."""
    pytest.importorskip("jax")
    done = finished("-c", "import rmsnorm.nematus.tf", KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "rmsnorm.nematus.tf: the backend of Keras is 'jax', expected 'tensorflow', as these models need; "
        "set KERAS_BACKEND=tensorflow before Python starts, or take the model for flax or torch"
    )


def test_another_model_of_keras_is_no_damaged_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("config.json", json.dumps({"class_name": "Sequential", "config": {"name": "a", "layers": []}}))
    words = "is a file of Keras with the model 'Sequential', expected a model of rmsnorm in a file of Keras; name the"
    with pytest.raises(ValueError, match=words):
        nematus.load(tmp_path / "model.keras")
