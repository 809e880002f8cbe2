"""Models in every form of files, in both directions: each has a reader and a function that saves.

- safetensors, which NumPy and every framework can read, and Keras's ``.keras``, which contains the options, have the
  state dict of the model in PyTorch: Nematus master's names with dots for slashes.
- TensorFlow checkpoints, and archives of Theano with named arrays in an ``.npz`` file, are those of the programs.

What saves takes a path, and a config and parameters as ``rmsnorm.nematus.load`` returns them, which reads them back.
The options are written to ``<path>.json``, with the dictionaries beside it. Existing files are replaced when the new
ones are complete. ValueError says that the parameters are not those of the config. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save

from rmsnorm.files import reading, replacing, tensors
from rmsnorm.nematus.backends import model_class
from rmsnorm.nematus.config import RMS, Config
from rmsnorm.nematus.files import OP, ZERO_OPTIONS, Form, write_options
from rmsnorm.nematus.names import VERSIONS, check, dotted, is_of_training, slashed, variables
from rmsnorm.nematus.options import scope_of_zero, write
from rmsnorm.nematus.vocabulary import copied
from rmsnorm.specification import errors

KERAS: Final = ".keras"
_CLASSES: Final = ("rmsnorm>RNNSearch", "rmsnorm>Transformer")
_OF_KERAS: Final = "a model of rmsnorm in a file of Keras"
_CHECKPOINT: Final = "a whole checkpoint"


def renamed(read: tensors.Tensors, new: Callable[[str], str]) -> tensors.Tensors:
    """The same arrays by new names."""
    shapes, tensor = read
    names = {new(name): name for name in shapes}
    return {name: shapes[own] for name, own in names.items()}, lambda name: tensor(names[name])


def _read_tensorflow(path: Path) -> tensors.Tensors:
    tf = _tensorflow()
    with reading(OP, path, _CHECKPOINT):
        reader = tf.train.load_checkpoint(str(path))

    def tensor(name: str) -> Any:
        with reading(OP, path, _CHECKPOINT):
            return reader.get_tensor(name)

    return {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}, tensor


# What ``port info`` calls a form, and what reads the shapes of the arrays by name, and one array.
FORMS: Final[Mapping[Form, tuple[str, Callable[[Path], tensors.Tensors]]]] = {
    "tensorflow": ("TensorFlow", _read_tensorflow),
    "theano": ("Theano", lambda path: tensors.npz(OP, path, is_of_training)),
    "safetensors": (
        "PyTorch or none: a safetensors file of rmsnorm", lambda path: renamed(tensors.safetensors(OP, path), slashed)
    ),
    "keras": (
        "Keras: a file of rmsnorm",
        lambda path: renamed(tensors.keras(OP, path, "vars", _OF_KERAS), lambda name: name.replace(".", "/")),
    ),
}  # fmt: skip


def options_in_keras(path: Path) -> dict[str, Any]:
    """The options of Nematus for the model in a ``.keras`` file."""
    with reading(OP, path, _OF_KERAS):
        model = json.loads(tensors.member(OP, path, "config.json", _OF_KERAS))
        kind = model.get("registered_name") or model.get("class_name")
        if kind is not None and kind not in _CLASSES:
            fix = "name the model.keras that rmsnorm port wrote"
            raise errors.another_kind(OP, path, f"a file of Keras with the model {kind!r:.80}", _OF_KERAS, fix)
        return write(Config(**model["config"]["config"]))


def save_safetensors(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as a safetensors file, whose name ends in .safetensors: see rmsnorm.nematus.forms.

    Example:
        >>> import tempfile
        >>> from rmsnorm import nematus
        >>> from rmsnorm.nematus.names import variables
        >>> config = Config(embedding_size=2, state_size=2, source_vocab_sizes=(4,), target_vocab_size=3, norm="rms")
        >>> parameters = {row.name: np.ones(row.shape) for row in variables(config)}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save_safetensors(f"{directory}/model.safetensors", config, parameters)
        ...     nematus.load(directory).config == config
        True
    """
    path = _with_suffix("save_safetensors", path, ".safetensors")
    rows = check("save_safetensors", config, parameters)
    arrays = {dotted(row.name): np.ascontiguousarray(parameters[row.name]) for row in rows}
    with replacing(path) as temporary:
        temporary.write_bytes(save(arrays))
    write_options(path, copied(config, path.parent))


def save_keras(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as Keras does, in a file whose name ends in .keras: see rmsnorm.nematus.forms.

    ``keras.saving.load_model`` reads it after ``import rmsnorm.nematus.tf_models``. ModuleNotFoundError if TensorFlow
    is not installed.
    """
    path = _with_suffix("save_keras", path, KERAS)
    check("save_keras", config, parameters)
    config = copied(config, path.parent)
    model = model_class("tf", config)(config.replace(exponential_smoothing=0.0), parameters)
    with replacing(path) as temporary:
        model.save(temporary)


def save_theano(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as an archive for Theano Nematus: see rmsnorm.nematus.forms.

    Theano Nematus adds the biases of deep decoders in other places than TensorFlow Nematus, and has no output
    activation except tanh: if it would compute other numbers than the model, a warning says so. What this package reads
    back is the same model. ValueError if Theano Nematus has no such variable.
    """
    if config.rules.is_zero:
        want = "one of Nematus"
        raise errors.out_of_domain("save_theano", "dialect", config.dialect, want, "save a TensorFlow checkpoint")
    arrays: dict[str, Any] = {}
    for row in check("save_theano", config, parameters):
        if row.theano is None:
            raise errors.InputValueError(
                f"save_theano: Theano Nematus has no variable like {row.name}; save a TensorFlow checkpoint"
            )
        arrays[row.theano] = np.asarray(parameters[row.name])
    dtype = arrays["ff_state_b"].dtype
    for row in variables(config.replace(dialect="theano")):  # TensorFlow has no biases of encoder transitions
        if row.theano is not None:
            arrays.setdefault(row.theano, np.zeros(row.shape, dtype))
    arrays["decoder_c_tt"] = np.zeros(1, dtype)
    other = "save_theano: Theano Nematus will compute other numbers: "
    if config.rules.transition_bias == "none" and config.rnn_dec_depth > 1:
        warnings.warn(f"{other}it adds the biases of decoder/high elsewhere", stacklevel=2)
    if config.output_hidden_activation != "tanh":
        warnings.warn(f"{other}its output activation is tanh", stacklevel=2)
    path = Path(path)
    with replacing(path) as temporary, temporary.open("wb") as file:
        tensors.write_npz(file, arrays)
    write_options(path, copied(config, path.parent), theano=True)


def save_tensorflow(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as a TensorFlow checkpoint for the Nematus of its dialect: see rmsnorm.nematus.forms.

    The path is a prefix: Nematus uses ``model.npz``, zero ``model-<step>``. Names and options are those of master, of
    v0.4 (``config.search`` is ``costs``) or of v0.3; for the dialect ``theano`` they are those of version 0.1, as in
    Nematus's own conversion of Theano models. For zero it has options in ``param.json``, and ``.meta``, for which zero
    looks. ValueError if RMSNorm has offsets, which Nematus cannot add.
    """
    tf, path = _tensorflow(), Path(path)
    rows = check("save_tensorflow", config, parameters)
    if config.norm in RMS and config.norm_offset:
        want = "False: RMSNorm has no offset in Nematus"
        raise errors.out_of_domain("save_tensorflow", "norm_offset", True, want, "save a Theano archive")
    with _writing(tf, path), replacing(path) as temporary:
        if config.rules.is_zero:
            scope = scope_of_zero(write(config))
            _save_zero(tf, temporary, {f"{scope}/{row.name}": np.asarray(parameters[row.name]) for row in rows})
        else:
            newest = "v0.3" if config.search == "costs" else "master"
            version = VERSIONS.index({"tensorflow": newest, "theano": "v0.1"}.get(config.dialect, "v0.3"))
            names, arrays = [row.names[version] for row in rows], [np.asarray(parameters[row.name]) for row in rows]
            whole = [""] * len(names)
            tf.raw_ops.SaveV2(prefix=str(temporary), tensor_names=names, shape_and_slices=whole, tensors=arrays)
            state = f'model_checkpoint_path: "{path.name}"\nall_model_checkpoint_paths: "{path.name}"\n'
            temporary.with_name("checkpoint").write_text(state)
    write_options(path, copied(config, path.parent), name=ZERO_OPTIONS if config.rules.is_zero else None)


def _save_zero(tf: Any, path: Path, arrays: Mapping[str, Any]) -> None:
    """As zero writes it: by tf.train.Saver, with the graph of the variables as ``.meta``."""
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        for name, array in arrays.items():
            initial = v1.get_variable(name, array.shape, array.dtype, use_resource=False).initializer
            session.run(initial, {initial.inputs[1]: array})
        v1.train.Saver(save_relative_paths=True).save(session, str(path))


@contextmanager
def _writing(tf: Any, path: Path) -> Iterator[None]:
    """Turns TensorFlow's error on a full disk, say, into that of the system."""
    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message.splitlines()[-1], str(path)) from error


def _tensorflow() -> Any:
    try:
        import tensorflow
    except ImportError as error:
        raise errors.missing_framework("TensorFlow", "tf") from error
    return tensorflow


def _with_suffix(op: str, path: str | os.PathLike[str], suffix: str) -> Path:
    path = Path(path)
    if path.suffix != suffix:
        raise errors.out_of_domain(op, "path", str(path), f"a name that ends in {suffix}", "add it")
    return path
