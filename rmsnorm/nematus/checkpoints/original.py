"""Models in the files of Nematus and zero themselves: TensorFlow checkpoints, and Theano archives.

An archive has named arrays in an ``.npz`` file. Nothing is ever unpickled.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm.files import reading, replacing, tensors
from rmsnorm.nematus import zero
from rmsnorm.nematus.checkpoints.files import OP, ZERO_OPTIONS, write_options
from rmsnorm.nematus.config import RMS, Config, write
from rmsnorm.nematus.dialects import rules
from rmsnorm.nematus.names import VERSIONS, check, is_of_training, variables
from rmsnorm.nematus.vocabulary import copied
from rmsnorm.specification import errors

_WANTED: Final = "a whole checkpoint"


def read_theano(path: Path) -> tensors.Tensors:
    """The arrays of a model and numbers of its trainer: see ``tensors.npz``."""
    return tensors.npz(OP, path, is_of_training)


def save_theano(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as an archive for Theano Nematus, with its options in ``<path>.json``.

    The arrays are written unchanged, under their Theano names. Theano Nematus adds the biases of deep decoders in other
    places than TensorFlow Nematus, and has no output activation except tanh: if it would compute other numbers than the
    model, a warning says so. ``rmsnorm.nematus.load`` reads the same model back, with its dialect.

    Args:
        path: of the archive; an existing file is replaced when the new one is complete.
        config, parameters: as ``rmsnorm.nematus.load`` returns them.

    Raises:
        ValueError: Theano Nematus has no such variable, or the parameters are not those of the config.
    """
    if not rules(config).has_theano:
        raise errors.out_of_domain(
            "save_theano", "dialect", config.dialect, "one of Nematus", "save a TensorFlow checkpoint"
        )
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
    if rules(config).transition_bias == "none" and config.rnn_dec_depth > 1:
        warnings.warn(f"{other}it adds the biases of decoder/high elsewhere", stacklevel=2)
    if config.output_hidden_activation != "tanh":
        warnings.warn(f"{other}its output activation is tanh", stacklevel=2)
    path = Path(path)
    with replacing(path) as temporary, temporary.open("wb") as file:
        tensors.write_npz(file, arrays)
    write_options(path, copied(config, path.parent), theano=True)


def read_tensorflow(path: Path) -> tensors.Tensors:
    """Shapes of the arrays by name, and a function that reads one array; ValueError if the checkpoint is damaged."""
    tf = _tensorflow()
    with reading(OP, path, _WANTED):
        reader = tf.train.load_checkpoint(str(path))

    def tensor(name: str) -> Any:
        with reading(OP, path, _WANTED):
            return reader.get_tensor(name)

    return {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}, tensor


def save_tensorflow(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write a model as a TensorFlow checkpoint for the Nematus of its dialect, with its options in ``<path>.json``.

    For the dialect ``zero`` it is one of zero, with its options in ``param.json``, and ``.meta``, for which zero looks.
    Names and options are those of master, of v0.4 (``config.search`` is ``costs``) or of v0.3; for the dialect
    ``theano`` they are those of version 0.1, as in Nematus's own conversion of Theano models.

    Args:
        path: the prefix; Nematus uses ``model.npz``, zero ``model-<step>``. Existing files are replaced when the new
            ones are complete.
        config, parameters: as ``rmsnorm.nematus.load`` returns them.

    Raises:
        ModuleNotFoundError: TensorFlow is not installed.
        ValueError: the parameters are not those of the config, or RMSNorm has offsets, which Nematus cannot add.
    """
    tf = _tensorflow()
    rows = check("save_tensorflow", config, parameters)
    if config.norm in RMS and config.norm_offset:
        want = "False: RMSNorm has no offset in Nematus"
        raise errors.out_of_domain("save_tensorflow", "norm_offset", True, want, "save a Theano archive")
    path = Path(path)
    if rules(config).own_options:
        prefix = zero.scope(write(config))
        _save_zero(tf, path, {f"{prefix}/{row.name}": np.asarray(parameters[row.name]) for row in rows})
        write_options(path, copied(config, path.parent), name=ZERO_OPTIONS)
        return
    newest = "v0.3" if config.search == "costs" else "master"
    version = {"tensorflow": newest, "theano": "v0.1"}.get(config.dialect, "v0.3")
    names = [str(row.names[VERSIONS.index(version)]) for row in rows]
    arrays, whole = [np.asarray(parameters[row.name]) for row in rows], [""] * len(names)
    with _writing(tf, path), replacing(path) as temporary:
        tf.raw_ops.SaveV2(prefix=str(temporary), tensor_names=names, shape_and_slices=whole, tensors=arrays)
        state = f'model_checkpoint_path: "{path.name}"\nall_model_checkpoint_paths: "{path.name}"\n'
        temporary.with_name("checkpoint").write_text(state)
    write_options(path, copied(config, path.parent))


def _save_zero(tf: Any, path: Path, arrays: Mapping[str, Any]) -> None:
    """As zero writes it: by tf.train.Saver, with the graph of the variables as ``.meta``."""
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session, _writing(tf, path), replacing(path) as temporary:
        for name, array in arrays.items():
            initial = v1.get_variable(name, array.shape, array.dtype, use_resource=False).initializer
            session.run(initial, {initial.inputs[1]: array})
        v1.train.Saver(save_relative_paths=True).save(session, str(temporary))


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
