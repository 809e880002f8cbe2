"""Golden test vectors in files, for implementations that Python cannot call. Nothing is ever unpickled.

docs/ci.md describes the files, in format 1: inputs, expected values, units, bounds and what the call means.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import safetensors

from rmsnorm.accuracy.bounds import QUANTITIES, Bound
from rmsnorm.files import check_regular, read_json, reading, replacing
from rmsnorm.numpy_impl import rms_norm_quantised
from rmsnorm.numpy_impl.arithmetic import add
from rmsnorm.parity.cases import Array, Data, make, select
from rmsnorm.parity.comparison import Comparison, Run, labelled
from rmsnorm.parity.instead import Output, instead
from rmsnorm.parity.judge import Expected, Outcome, compare, expect, failed
from rmsnorm.parity.quantised_cases import cases_of, quotients
from rmsnorm.parity.static_files import write_static
from rmsnorm.specification import errors
from rmsnorm.specification.dtypes import HALF
from rmsnorm.specification.quantisation import get_quantisation
from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.specification.version import VERSION

FORMAT: Final = 1
_KIND: Final = "rmsnorm vectors"
_OP: Final = "rmsnorm vectors check"
_QUANTISED: Final = ("q", "scales")
_TYPES: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool"}
_CODES: Final = {name: code for code, name in _TYPES.items()}


def write(
    folder: Path,
    *,
    variants: Sequence[str] = (),
    types: Sequence[str] = (),
    cases: Sequence[str] = (),
    quantities: Sequence[str] = QUANTITIES,
    quantisations: Sequence[str] = (),
    static: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write the vectors of all cases, or of those with these variants, dtypes and names.

    Args:
        folder: made if it does not exist.
        variants, types, cases: names; an empty sequence means all, but cases of more than 16,384 elements.
        quantities: what the other program computes; cases that have none of them are left out.
        quantisations: presets of ``Quantisation``: their exact cases are written, for x of 16 bits if there are no
            ``types``, and none of the others.
        static: write the files of ``vectors/`` of the repository instead, which a program reads without this package.
        on_progress: called after every case with the number of cases done and the number of all.

    Returns:
        The number of cases, or of static tests.

    Raises:
        ValueError: no case has these quantities, variants, dtypes and names, or the folder is not empty.
        OSError: the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> write(Path(tempfile.mkdtemp()), variants=["mlx"], types=["float32"])
        2
    """
    if quantisations and (variants or cases):
        want, fix = "none, as quantisations have cases of their own", "write them into another folder"
        raise errors.out_of_domain("rmsnorm vectors write", "variants and cases", [*variants, *cases], want, fix)
    some = () if len(quantities) == len(QUANTITIES) else quantities
    if static and (filters := [*variants, *types, *cases, *quantisations, *some]):
        fix = "leave them out: the folder is written as a whole"
        raise errors.out_of_domain("rmsnorm vectors write", "filters of static vectors", filters, "none", fix)
    presets = [pair for pair in select(tuple(variants), tuple(types)) if not pair[0].fields]
    named = [pair for pair in presets if not cases or pair[0].name in cases]
    chosen = named if cases else [pair for pair in named if not pair[0].is_large]
    total = 0 if quantisations else len(chosen)  # of exact cases the number is not known before
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):  # files of other vectors would count as a part of these
        raise errors.out_of_domain("rmsnorm vectors write", "folder", str(folder), "an empty one", "empty it first")
    try:
        if static:
            return write_static(folder, on_progress)
        with replacing(folder / "manifest.json") as manifest:
            exact = _of_quantisations(quantisations, types or HALF)
            count = _write(
                manifest, exact if quantisations else _of_variants(chosen, quantities),
                lambda done: on_progress(done, max(done, total)),
            )  # fmt: skip
            if not count:
                asked = " ".join([*variants, *types, *cases, *some])
                raise errors.out_of_domain("rmsnorm vectors write", "filter", asked, "one that a case passes",
                                           "rmsnorm/parity/cases.py has them")  # fmt: skip
    except BaseException:
        if made:
            folder.rmdir()
        raise
    return count


Vector: TypeAlias = tuple[Mapping[str, str], Mapping[str, Array], Mapping[str, Expected]]  # with metadata and inputs


def _of_variants(chosen: Sequence[Any], quantities: Sequence[str]) -> Iterator[Vector]:
    """The vectors of the cases that have one of the quantities."""
    for case, variant, dtype in chosen:
        data = make(case, variant, dtype)
        expected = expect(data, quantities)
        if expected:
            yield _metadata(data), _inputs(data) | _sums(data, expected), expected


def _of_quantisations(quantisations: Sequence[str], types: Sequence[str]) -> Iterator[Vector]:
    """The vectors of the calls that quantise and whose result is exact in any order of the sum, for x of these dtypes.

    In these 1 / rho, every scale and every code are known, so that a program must return just these numbers. ``lo.q``
    and ``hi.q`` are the least and the greatest y / s that have the code.
    """
    exact = Bound(0.0, 1.0)
    for name in quantisations:
        preset = get_quantisation("rmsnorm vectors write", name)
        intervals = quotients(preset)
        for dtype in types:
            for case in cases_of(preset, dtype, residual=False, always=False):
                if case.slack or case.reciprocal_slack:
                    continue
                q, scales, *_ = rms_norm_quantised(case.x, case.gain, eps=case.eps, quantisation=preset, **case.options)
                ends = {f"{end}.q": own[q.view(np.uint8)] for end, own in zip(("lo", "hi"), intervals, strict=True)}
                results = {"q": q, "scales": np.atleast_1d(scales)}
                values = {name: array.astype(np.float32) for name, array in results.items()}
                expected = {name: Expected(value, np.ones(value.shape), exact) for name, value in values.items()}
                metadata: dict[str, Any] = {"variant": name, "dtype": dtype, "case": case.name, "eps": case.eps}
                fields = {field: value for field, value in asdict(preset).items() if field not in ("name", "source")}
                metadata |= case.options | {f"quantisation.{field}": value for field, value in fields.items()}
                texts = {name: str(value) for name, value in metadata.items()}
                yield texts, {"x": case.x, "scale": case.gain, **ends}, expected


def _sums(data: Data, expected: Mapping[str, Expected]) -> dict[str, Array]:
    """The sum h, where there is a y of it."""
    has_sum = data.residual is not None and "y" in expected
    return {"expected.h": add(data.x, data.residual, data.call.sum)} if has_sum else {}


def _write(path: Path, vectors: Iterable[Vector], on_progress: Callable[[int], None]) -> int:
    """Writes the vectors and, at the path, their manifest; returns how many they are."""
    files = []
    for done, (about, inputs, expected) in enumerate(vectors, start=1):
        tensors, metadata = dict(inputs), {"format": str(FORMAT), **about}
        for name, want in expected.items():
            tensors |= {f"expected.{name}": want.value, f"unit.{name}": want.unit}
            if want.low is not None and want.high is not None:
                tensors |= {f"least.{name}": want.low, f"greatest.{name}": want.high}
            metadata |= {f"bound.{name}": str(want.bound.ratio), f"identical.{name}": str(want.bound.identical)}
        for name, value in [*tensors.items()]:
            kind, _, quantity = name.partition(".")
            if kind == "expected" and value.dtype.name in HALF:
                tensors |= dict(zip((f"lo.{quantity}", f"hi.{quantity}"), interval(value), strict=True))
        labels = (metadata[name] for name in ("variant", "dtype", "case"))
        file = f"{'.'.join(re.sub('[^a-z0-9._-]+', '-', label.lower()) for label in labels)}.safetensors"
        content = serialized(tensors, metadata)
        path.with_name(file).write_bytes(content)
        shapes = {name: errors.describe(array.shape, array.dtype.name) for name, array in tensors.items()}
        files.append({"file": file, "sha256": _digest(content), "tensors": shapes, "metadata": metadata})
        on_progress(done)
    manifest = {"kind": _KIND, "format": FORMAT, "rmsnorm": VERSION, "digest": digest_of(files), "files": files}
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return len(files)


def check(folder: Path, *, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Run:
    """Compare the outputs that another program has written with the expected ones.

    Args:
        folder: as ``write`` made it, with the folder ``outputs`` in it.
        on_progress: called after every case with the number of cases done and the number of all.

    Returns:
        Everything that is wrong with the outputs is a record that did not pass.

    Raises:
        ValueError: the vectors themselves are missing, have another format, were changed after they were written or
            expect nothing, or there is no folder ``outputs``.
    """
    run = Run(folder.resolve().name)
    began = time.monotonic()
    files = _manifest(folder)
    outputs_folder = folder / "outputs"
    if not outputs_folder.is_dir():
        fix = f"make the folder {outputs_folder}, and let your program write a file there for each file in {folder}"
        raise errors.out_of_domain(_OP, "folder", str(folder), "one with a folder outputs in it", fix)
    outputs: dict[Variant, dict[bool, list[Output]]] = {}  # by whether they passed
    for done, entry in enumerate(files, start=1):
        expected = _expected(folder, entry)
        metadata = entry["metadata"]
        labels = [metadata[name] for name in ("variant", "dtype", "case")]
        results, comparisons = _comparisons(outputs_folder / entry["file"], expected)
        for comparison in comparisons:
            variant = _variant(metadata)
            if comparison.quantity == "y" and "y" in results and variant is not None:
                output = Output(metadata["case"], metadata["dtype"], results["y"], expected["y"].value)
                outputs.setdefault(variant, {True: [], False: []})[comparison.passed].append(output)
        run.records += labelled(comparisons, *labels)
        run.cases += 1
        on_progress(done, len(files))
    run.conclude()
    if not run.records:
        raise errors.nothing_compared(_OP, str(folder), ["its files expect no quantity"])
    if run.failures:
        wrong = {variant: [*own[False], *own[True]] for variant, own in outputs.items() if own[False]}
        run.message = "; ".join(f"{v.label}: {text}" for v, own in wrong.items() if (text := instead(v, own)))
    run.seconds = time.monotonic() - began
    return run


def _variant(metadata: Mapping[str, str]) -> Variant | None:
    """The variant of a case, None where this version has none of that name."""
    names = ("gate_function", "gate_position", "residual_rounding")
    own = {name: metadata[name] for name in names if name in metadata}
    preset = PRESETS.get(metadata["variant"])
    return None if preset is None else preset.replace(**own)


def _inputs(data: Data) -> dict[str, Array]:
    tangents = dict(zip(("tangent.x", "tangent.scale", "tangent.bias"), data.tangents, strict=True))
    arrays = {"x": data.x, "scale": data.scale, "bias": data.bias, "residual": data.residual, "mask": data.mask,
             "gate": data.gate, "dy": data.dy, "dh": data.dh, **tangents}  # fmt: skip
    return {name: array for name, array in arrays.items() if array is not None}


def _metadata(data: Data) -> dict[str, str]:
    call, variant = data.call, data.variant
    metadata = {
        "variant": variant.name, "dtype": data.x.dtype.name, "case": data.case.name, "eps": call.eps,
        "eps_position": variant.eps_position, "statistic": variant.statistic, "scale_offset": variant.scale_offset,
        "n": call.n, "k": call.k, "axes": ",".join(map(str, call.axes)),
        "feature_axes": ",".join(map(str, call.feature_axes)), "norm": call.norm or "", "product": call.product,
    }  # fmt: skip
    if data.gate is not None:
        metadata |= {"gate_function": variant.gate_function, "gate_position": variant.gate_position}
    if data.residual is not None:
        metadata["residual_rounding"] = variant.residual_rounding
    return {name: str(value) for name, value in metadata.items()}


def interval(values: Array) -> tuple[Array, Array]:
    """The least and the greatest float64 that rounds to each element of 16 bits, to nearest with ties to even.

    >>> [float(end[0]) for end in interval(np.float16([2048]))]
    [2047.5, 2049.0]
    """
    bits = values.view(np.uint16)
    code = (bits & 0x7FFF).astype(np.int64)
    infinity = int(np.array(np.inf, values.dtype).view(np.uint16))
    beyond = 2.0 ** np.frexp(float(np.array(infinity - 1, np.uint16).view(values.dtype)))[1]  # in place of infinity

    def size(codes: Array) -> Array:
        number = np.minimum(codes, infinity).astype(np.uint16).view(values.dtype).astype(np.float64)
        return np.where(np.isinf(number), beyond, number)

    below, above = ((size(code) + size(np.clip(code + step, 0, infinity))) / 2 for step in (-1, 1))
    is_odd = code % 2 == 1
    below, above = (np.where(is_odd, np.nextafter(a, size(code)), a) for a in (below, above))
    below, above = np.where(code == 0, -above, below), np.where(code == infinity, np.inf, above)
    below, above = (np.where(code > infinity, np.nan, a) for a in (below, above))
    negative = bits > 0x7FFF
    return np.where(negative, -above, below), np.where(negative, -below, above)


def serialized(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file. The library writes metadata in a random order."""
    widest_first = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)  # this aligns all of them
    header: dict[str, Any] = {"__metadata__": metadata}
    end, parts = 0, []
    for name, array in widest_first:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": array.shape, "data_offsets": [begin, end]}
        little = array.dtype.newbyteorder("<") if array.dtype.kind == "f" else array.dtype
        parts.append(array.astype(little).tobytes())
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(parts)


def _deserialized(content: bytes) -> dict[str, Array]:
    """The tensors of a safetensors file; the library's own reader for NumPy lacks bfloat16.

    Raises:
        ValueError: it is not such a file, or is cut off.
    """
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise errors.InputValueError(f"not a safetensors file: {error}") from None
    tensors = {}
    for name, tensor in entries:
        if tensor["dtype"] in _TYPES:
            dtype = np.dtype(_TYPES[tensor["dtype"]])
            tensors[name] = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
    return tensors


def _manifest(folder: Path) -> list[dict[str, Any]]:
    again = "write the vectors again with `rmsnorm vectors write`"
    try:
        document = read_json(_OP, folder / "manifest.json", "a manifest of rmsnorm")
        manifest = {name: document[name] for name in ("kind", "format", "digest", "files")}
    except (OSError, ValueError, TypeError, KeyError):
        raise errors.out_of_domain(_OP, "folder", str(folder), "one with a manifest.json of rmsnorm", again) from None
    for name, want in (("kind", _KIND), ("format", FORMAT)):
        if manifest[name] != want:
            raise errors.out_of_domain(_OP, f"{name} of the vectors", manifest[name], repr(want), again)
    if manifest["digest"] != (digest := digest_of(manifest["files"])):
        raise errors.out_of_domain(_OP, "digest of manifest.json", manifest["digest"], repr(digest), again)
    with reading(_OP, folder / "manifest.json", "one that rmsnorm wrote"):
        for entry in manifest["files"]:
            _check_entry(entry)
    return list(manifest["files"])


def _check_entry(entry: Any) -> None:
    """Raises an error if an entry is not what ``write`` wrote, or names a file elsewhere."""
    metadata = entry["metadata"]
    if entry["file"] != Path(entry["file"]).name or not entry["file"].endswith(".safetensors"):
        raise errors.InputValueError(f"file {entry['file']!r} is no name of a safetensors file")
    texts = entry["sha256"], *(metadata[name] for name in ("variant", "dtype", "case"))
    if not all(isinstance(text, str) for text in texts):
        raise errors.InputTypeError(f"one of {texts} is no text")


def _expected(folder: Path, entry: Mapping[str, Any]) -> dict[str, Expected]:
    path = folder / entry["file"]
    digest = _digest(path.read_bytes()) if path.is_file() else "missing"
    if digest != entry["sha256"]:
        again = "write the vectors again with `rmsnorm vectors write`"
        raise errors.out_of_domain(_OP, f"sha256 of {path.name}", digest, repr(entry["sha256"]), again)
    expected = {}
    with reading(_OP, path, "vectors of rmsnorm"):
        tensors, metadata = _deserialized(path.read_bytes()), entry["metadata"]
        for name in (*QUANTITIES, *_QUANTISED):
            if (value := tensors.get(f"expected.{name}")) is not None:
                limit = Bound(float(metadata[f"bound.{name}"]), float(metadata[f"identical.{name}"]))
                ends = tensors.get(f"least.{name}"), tensors.get(f"greatest.{name}")
                expected[name] = Expected(value, tensors[f"unit.{name}"], limit, *ends)
    return expected


def _comparisons(path: Path, expected: Mapping[str, Expected]) -> tuple[Mapping[str, Array], list[Comparison]]:
    """What the other program computed, and a comparison of each quantity."""
    try:
        if path.exists():
            check_regular(_OP, path, "outputs")
        outputs = _deserialized(path.read_bytes())
    except OSError as error:
        return {}, [failed(name, f"{path} cannot be read: {error.strerror}") for name in expected]
    except ValueError as error:
        return {}, [failed(name, f"{path} is {error}") for name in expected]
    return outputs, compare(Outcome({name: [array] for name, array in outputs.items()}), expected)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(files: Sequence[Mapping[str, Any]]) -> str:
    return _digest(json.dumps(files, sort_keys=True).encode())
