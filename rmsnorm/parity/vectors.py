"""The files of static vectors: JSON, and the same as flat text for languages in which reading JSON needs a library."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rmsnorm.files import replacing
from rmsnorm.parity.cases import Array
from rmsnorm.parity.static import FORMAT, TYPES, VARIANTS, documents, hexadecimal
from rmsnorm.specification import errors


def flat(document: Mapping[str, Any]) -> str:
    """The same for a reader without a library: words with spaces between them, each number as the bits of a float32."""
    lines = ["rmsnorm vectors {format} {variant}.{dtype} {numberOfTests}".format(**document)]
    for test in document["tests"]:
        eps, flag = float(_numbers("float64", test["eps"])[0]), ",".join(test["flags"])
        call = f"{test['rows']} {test['n']} {eps!r} {test['offset']} {_bits(test['norm'])}"
        lines.append(f"test {test['id']} {flag} {call}")
        for name, entry in test["inputs"].items():
            head, size = f"{name} {_bits(entry['dtype'])} {math.prod(entry['shape'])}", math.prod(entry["shape"])
            is_hash = "seed" in entry
            lines.append(f"hash {head} {entry['seed']} {entry['exponent']}" if is_hash else
                         f"in {head} 1 {size} {_in_float32(entry, 'bits')}")  # fmt: skip
        for name, entry in test["outputs"].items():
            size, block = math.prod(entry["shape"]), entry["block"]
            ends = " ".join(_in_float32(entry, end) for end in ("lo", "hi"))
            lines.append(f"out {name} {_bits(entry['dtype'])} {size} {block} {size // block} {ends}")
        lines.append("end")
    return "\n".join(lines) + "\n"


def _in_float32(entry: Mapping[str, Any], name: str) -> str:
    dtype = "float32" if entry.get("block", 1) > 1 else entry["dtype"]
    return hexadecimal(_numbers(dtype, entry[name]).astype(np.float32))


def _numbers(dtype: str, text: str) -> Array:
    kind = np.dtype(dtype)  # ml_dtypes registers those that NumPy lacks
    bits = np.array([int(word, 16) for word in text.split()], f"u{kind.itemsize}")
    return bits.view(kind)


def _bits(dtype: str) -> int:
    """The bits of a significand; 0 for no dtype."""
    if dtype == "none":
        return 0
    return int(ml_dtypes.finfo(dtype).nmant) + 1


def write(folder: Path, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> int:
    """Write the files of ``vectors/`` of the repository, which a program reads without this package.

    Args:
        folder: empty, or made if it does not exist.
        on_progress: called after every file with the number of files done and the number of all.

    Returns:
        The number of tests in the files.

    Raises:
        ValueError: the folder is not empty.
        OSError: the folder cannot be written to.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):  # files of other vectors would count as a part of these
        raise errors.out_of_domain("rmsnorm vectors", "folder", str(folder), "an empty one", "empty it first")
    try:
        with replacing(folder / "manifest.json") as manifest:
            return _write(manifest, on_progress)
    except BaseException:
        if made:
            folder.rmdir()
        raise


def _write(manifest: Path, on_progress: Callable[[int, int], None]) -> int:
    """Writes all files and returns how many tests they have; the manifest comes last, with the digests."""
    contents = {"schema.json": files("rmsnorm.parity").joinpath("static.schema.json").read_text(encoding="utf-8")}
    counts = {}
    for done, (name, content) in enumerate(documents(), start=1):
        counts[f"{name}.json"] = content["numberOfTests"]
        contents |= {f"{name}.json": json.dumps(content, indent=1) + "\n", f"{name}.txt": flat(content)}
        on_progress(done, len(VARIANTS) * len(TYPES))
    entries = []
    for name, text in contents.items():
        manifest.with_name(name).write_bytes(text.encode())
        own = {"numberOfTests": counts[name]} if name in counts else {}
        entries.append({"file": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), **own})
    total = sum(counts.values())
    document = {"kind": "rmsnorm static vectors", "format": FORMAT, "numberOfTests": total, "files": entries}
    manifest.write_bytes((json.dumps(document, indent=1) + "\n").encode())
    return total
