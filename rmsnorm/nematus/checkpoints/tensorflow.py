"""Models in TensorFlow checkpoints, as Nematus and zero themselves write and read them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.files import reading, replacing
from rmsnorm.nematus import zero
from rmsnorm.nematus.checkpoints.files import OP, ZERO_OPTIONS, write_options
from rmsnorm.nematus.config import RMS, Config, write
from rmsnorm.nematus.names import VERSIONS, check

_WANTED: Final = "a whole checkpoint"


def read(path: Path) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]:
    """Shapes of the arrays by name, and a function that reads one array.

    Raises:
        ModuleNotFoundError: TensorFlow is not installed.
        ValueError: the checkpoint is damaged.
    """
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
        raise errors.out_of_domain(
            "save_tensorflow", "norm_offset", True, "False: RMSNorm has no offset in Nematus", "save a Theano archive"
        )
    path = Path(path)
    if config.dialect == "zero":
        prefix = zero.scope(write(config))
        _save_zero(tf, path, {f"{prefix}/{row.name}": np.asarray(parameters[row.name]) for row in rows})
        write_options(path, config, name=ZERO_OPTIONS)
        return
    version = "master"
    if config.dialect != "tensorflow":
        version = "v0.1" if config.dialect == "theano" else "v0.3"
    elif config.search == "costs":
        version = "v0.3"
    index = VERSIONS.index(version)
    names = [str(row.names[index]) for row in rows]
    with _writing(tf, path), replacing(path) as temporary:
        tf.raw_ops.SaveV2(
            prefix=str(temporary),
            tensor_names=names,
            shape_and_slices=[""] * len(names),
            tensors=[np.asarray(parameters[row.name]) for row in rows],
        )
        state = f'model_checkpoint_path: "{path.name}"\nall_model_checkpoint_paths: "{path.name}"\n'
        temporary.with_name("checkpoint").write_text(state)
    write_options(path, config)


def _save_zero(tf: Any, path: Path, arrays: Mapping[str, Any]) -> None:
    """As zero writes it: by tf.train.Saver, with the graph of the variables as ``.meta``."""
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session, _writing(tf, path), replacing(path) as temporary:
        assigned = {
            v1.get_variable(name, array.shape, array.dtype, use_resource=False).initializer: array
            for name, array in arrays.items()
        }
        session.run(list(assigned), {op.inputs[1]: array for op, array in assigned.items()})
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
