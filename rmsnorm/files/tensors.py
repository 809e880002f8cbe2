"""The tensors of a file from outside, by name: safetensors, ``.npz``, GGUF, Keras's files and checkpoints of Orbax.

Each reader returns the shapes by name, and a function that reads one tensor. Nothing is ever unpickled, and nothing is
read that the file keeps elsewhere.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import safe_open

from rmsnorm import files
from rmsnorm.files import GGUF, SAFETENSORS, ZIP, check_expansion, check_kind, reading
from rmsnorm.specification import dtypes, errors

Tensors = tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]

NPZ: Final = "an npz archive"
HDF5: Final = "a file of Keras"
ORBAX: Final = "a whole checkpoint of Orbax"
_NPY: Final = ".npy"
_VALUE: Final = "/value"  # ends the paths of an nnx.State, not those of its pure dictionary
_CHUNK: Final = 2**20  # numbers: HDF5 reads whole chunks, which compressed take hardly any room in a file
_FORMATS: Final = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def safetensors(op: str, path: Path) -> Tensors:
    """Of floating-point numbers in all formats, those that NumPy lacks among them.

    Raises:
        ValueError: the file is incomplete, or is no safetensors file.
    """
    with reading(op, path, SAFETENSORS):
        check_kind(op, path, SAFETENSORS, SAFETENSORS)
        safe_open(path, framework="numpy")  # which checks the header and the size of the file
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}

    def tensor(name: str) -> Any:
        kind, start = header[name]["dtype"], header[name]["data_offsets"][0]
        with reading(op, path, SAFETENSORS):
            dtype = _FORMATS.get(kind)
            if dtype is None:
                raise ValueError(f"{name} has the format {kind}, expected one of {', '.join(_FORMATS)}")
            numbers = np.fromfile(path, dtype, math.prod(shapes[name]), offset=8 + length + start)
            return numbers.reshape(shapes[name])

    return shapes, tensor


def gguf(op: str, path: Path) -> Tensors:
    """Of floating-point numbers; a quantised tensor has a shape, and reading it is refused.

    Raises:
        ModuleNotFoundError: the package gguf, of llama.cpp, is not installed.
        ValueError: the file is damaged.
    """
    try:
        package: Any = import_module("gguf")
    except ImportError as error:
        raise errors.missing_framework("gguf", "gguf") from error
    with reading(op, path, GGUF):
        check_kind(op, path, GGUF, GGUF)
        entries = {entry.name: entry for entry in package.GGUFReader(path).tensors}
        shapes = {name: tuple(map(int, entry.shape[::-1])) for name, entry in entries.items()}

    def tensor(name: str) -> Any:
        kind = entries[name].tensor_type.name
        if kind not in _FORMATS:
            raise errors.InputValueError(
                f"{op}: {name} in {path} has the format {kind}, expected F32, F16, BF16 or F64; take a file that keeps "
                "it so, as llama.cpp's own converter does for norms"
            )
        with reading(op, path, GGUF):
            return np.array(entries[name].data).view(_FORMATS[kind]).reshape(shapes[name])

    return shapes, tensor


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def npz(op: str, path: Path, is_left_out: Callable[[str], bool] = lambda name: False) -> Tensors:
    """Arrays of Python objects, which only unpickling could read, are left out where that is allowed.

    Raises:
        ValueError: the file is no archive, is incomplete, or has such an array elsewhere.
    """
    with reading(op, path, NPZ):
        check_kind(op, path, NPZ, ZIP, files.INDEX)
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("its end is missing")
        arrays: dict[str, _Header] = {}
        with zipfile.ZipFile(path) as archive:
            _require(op, path, archive, _NPY, NPZ)
            for member in archive.infolist():
                if member.filename.endswith(_NPY):
                    name = member.filename.removesuffix(_NPY)
                    if name in arrays:
                        raise zipfile.BadZipFile(f"{name} is in it twice")
                    with archive.open(member) as file:
                        arrays[name] = _header(name, file, member.file_size)
    for name, header in arrays.items():
        if header.dtype.hasobject and not is_left_out(name):
            raise errors.InputValueError(
                f"{op}: {name} in {path} is an array of Python objects, expected numbers; "
                "it is never unpickled: save it as numbers, or leave it out"
            )

    def tensor(name: str) -> Any:
        with reading(op, path, NPZ), zipfile.ZipFile(path) as archive, archive.open(name + _NPY) as file:
            return dtypes.native(np.lib.format.read_array(file, allow_pickle=False))

    return {name: header.shape for name, header in arrays.items() if not header.dtype.hasobject}, tensor


def write_npz(file: Any, arrays: Mapping[str, Any]) -> None:
    """As np.savez, which pickles objects, and before NumPy 2.2 takes ``allow_pickle`` for the name of an array."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}{_NPY}", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def _header(name: str, file: Any, size: int) -> _Header:
    """What the first bytes of an array say about the rest, which must fit them."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise errors.InputValueError(f"{name} has a header of version {version}")
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    wanted, rest = math.prod(shape) * dtype.itemsize, size - file.tell()
    if not dtype.hasobject and (min(shape, default=0) < 0 or wanted != rest):
        raise errors.InputValueError(f"{name} of shape {shape} and {rest} bytes, expected {wanted}")
    return _Header(shape, dtype)


def keras(op: str, path: Path, within: str = "", wanted: str = HDF5) -> Tensors:
    """Of a ``.keras`` or ``.weights.h5`` file: all, or those of one group, which has no groups within it.

    Reading them needs no TensorFlow.

    Raises:
        ModuleNotFoundError: h5py, which is installed with Keras, is not installed.
        ValueError: the file is damaged, or has no such group.
    """
    try:
        h5py: Any = import_module("h5py")
    except ImportError as error:
        raise errors.missing_framework("Keras", "keras") from error
    weights: Any = path
    with reading(op, path, wanted):
        check_kind(op, path, wanted, ZIP if path.suffix == ".keras" else files.HDF5)
        if path.suffix == ".keras":
            weights = io.BytesIO(member(op, path, "model.weights.h5", wanted))
        with h5py.File(weights, "r") as file:
            datasets = _datasets(h5py, file, within)
            shapes = {name: dataset.shape for name, dataset in datasets.items()}

    def tensor(name: str) -> Any:
        with reading(op, path, wanted), h5py.File(weights, "r") as file:
            *groups, last = f"{within}/{name}".strip("/").split("/")
            group = file
            for part in groups:
                group = _member(h5py, group, part, h5py.Group)
            return dtypes.native(_member(h5py, group, last, h5py.Dataset)[()])

    return shapes, tensor


def _require(op: str, path: Path, archive: zipfile.ZipFile, end: str, wanted: str) -> None:
    """Refuses an archive in which no name ends so: it is one of another program."""
    names = archive.namelist()
    if not any(name.endswith(end) for name in names):
        is_pickle = any(name.endswith("data.pkl") for name in names)
        kind = (
            "a file of PyTorch, which is a pickle" if is_pickle else f"a zip archive without {'*' * (end == _NPY)}{end}"
        )
        raise errors.another_kind(op, path, kind, wanted, "name another file")


def member(op: str, path: Path, name: str, wanted: str) -> bytes:
    """One of the files in an archive."""
    check_kind(op, path, wanted, ZIP)
    with zipfile.ZipFile(path) as archive:
        _require(op, path, archive, name, wanted)
        check_expansion(archive.getinfo(name).file_size, path.stat().st_size)
        return archive.read(name)


def _member(h5py: Any, group: Any, name: str, kind: Any) -> Any:
    """None may be a link or be kept in another file, which the file from outside would choose."""
    part = group[name] if isinstance(group.get(name, getlink=True), h5py.HardLink) else None
    if part is None or (isinstance(part, h5py.Dataset) and (part.external or part.is_virtual)):
        raise ValueError(f"{name} is kept outside of it")
    if not isinstance(part, kind):
        raise ValueError(f"{name} is a {type(part).__name__} of HDF5, expected weights")
    if isinstance(part, h5py.Dataset) and math.prod(part.chunks or ()) > max(part.size, _CHUNK):
        raise ValueError(f"{name} is stored in chunks that are larger than it: {part.chunks}")
    return part


def _datasets(h5py: Any, file: Any, within: str) -> dict[str, Any]:
    if within:
        group = _member(h5py, file, within, h5py.Group)
        return {name: _member(h5py, group, name, h5py.Dataset) for name in group}
    datasets: dict[str, Any] = {}
    seen, waiting = {hash(file.id)}, [("", file)]
    while waiting:
        prefix, group = waiting.pop()
        for name in group:
            part = _member(h5py, group, name, (h5py.Group, h5py.Dataset))
            if isinstance(part, h5py.Dataset):
                datasets[prefix + name] = part
            elif hash(part.id) in seen:
                raise ValueError(f"{prefix}{name} is another name of a group")
            else:
                seen.add(hash(part.id))
                waiting.append((f"{prefix}{name}/", part))
    return datasets


def orbax(op: str, path: Path, size: int) -> Tensors:
    """Of a checkpoint of so many bytes.

    Raises:
        ModuleNotFoundError: Flax is not installed.
        ValueError: the checkpoint is damaged.
    """
    checkpoints, trees = flax("orbax.checkpoint"), flax("flax.traverse_util")
    with reading(op, path, ORBAX), checkpoints.PyTreeCheckpointer() as checkpointer:
        tree = trees.flatten_dict(checkpointer.metadata(path.absolute()).item_metadata.tree)
        names = {"/".join(map(str, keys)).removesuffix(_VALUE): keys for keys in tree}
        shapes = {name: tuple(tree[keys].shape) for name, keys in names.items()}

    @cache
    def arrays() -> Any:
        with checkpoints.PyTreeCheckpointer() as checkpointer:
            as_numpy = {keys: checkpoints.RestoreArgs(restore_type=np.ndarray) for keys in tree}
            restored = checkpointer.restore(path.absolute(), restore_args=trees.unflatten_dict(as_numpy))
        return trees.flatten_dict(restored)

    def tensor(name: str) -> Any:
        with reading(op, path, ORBAX):
            check_expansion(4 * sum(map(math.prod, shapes.values())), size)
            return arrays()[names[name]]

    return shapes, tensor


def flax(module: str) -> Any:
    """A module that is installed with Flax."""
    try:
        return import_module(module)
    except ImportError as error:
        raise errors.missing_framework("Flax", "flax") from error
