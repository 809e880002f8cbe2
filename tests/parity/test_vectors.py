"""Golden vectors in files: the same bytes every time, readable without rmsnorm, judged as in `rmsnorm check`."""

import hashlib
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from commands import rmsnorm
from mutants import FAULTS
from safetensors.numpy import save_file

from rmsnorm import Variant
from rmsnorm.accuracy.rounding import cast
from rmsnorm.numpy_impl import rms_norm
from rmsnorm.parity import instead, report, vectors
from rmsnorm.parity.cases import make, recast, select
from rmsnorm.parity.equations import candidate
from rmsnorm.parity.judge import expect, golden, judge

ROOT = Path(__file__).parents[2]
TYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "BOOL": np.bool_}
FEW = {
    "cases": ["rows", "odd", "gain f32", "mask", "residual", "no rows", "gate of x"],
    "variants": ["standard", "llama"],
}


def read(path):
    """Reads a safetensors file by its public definition, without code of rmsnorm."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "vectors"
    assert vectors.write(folder, **FEW) == 44
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """A copy with the golden's own outputs beside it."""
    copy = tmp_path / "vectors"
    shutil.copytree(written, copy)
    (copy / "outputs").mkdir()
    for path in copy.glob("*.safetensors"):
        _, tensors = read(path)
        outputs = {name.removeprefix("expected."): a for name, a in tensors.items() if name.startswith("expected.")}
        save_file(outputs, copy / "outputs" / path.name)
    return copy


def _change(path, **outputs):
    _, tensors = read(path.parent.parent / path.name)
    golden = {name.removeprefix("expected."): a for name, a in tensors.items() if name.startswith("expected.")}
    save_file({name: a for name, a in (golden | outputs).items() if a is not None}, path)


def _failures(folder):
    return {(r.variant, r.dtype, r.case, r.quantity): r.detail for r in vectors.check(folder).failures}


def test_two_runs_write_the_same_bytes(written, tmp_path):
    assert vectors.write(tmp_path / "again", **FEW) == 44
    names = sorted(path.name for path in written.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert len(names) == 45
    for name in names:
        assert (written / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_the_manifest_says_what_is_there(written):
    manifest = json.loads((written / "manifest.json").read_text())
    assert manifest["format"] == vectors.FORMAT
    assert len({entry["file"] for entry in manifest["files"]}) == 44
    for entry in manifest["files"]:
        path = written / entry["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        metadata, tensors = read(path)
        assert metadata == entry["metadata"]
        assert set(tensors) == set(entry["tensors"])
        names = {name for name, _ in safetensors.deserialize(path.read_bytes())}
        assert names == set(tensors), "safetensors itself reads the file"


def test_every_tensor_is_aligned_for_a_cast_in_c(written):
    for path in written.glob("*.safetensors"):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        assert length % 8 == 0
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % np.dtype(TYPES[entry["dtype"]]).itemsize == 0, (path.name, name)


def test_the_files_hold_the_cases_of_the_kit(written):
    manifest = json.loads((written / "manifest.json").read_text())
    by_case = {(e["metadata"]["variant"], e["metadata"]["dtype"], e["metadata"]["case"]): e for e in manifest["files"]}
    chosen = [(c, v, d) for c, v, d in select(tuple(FEW["variants"])) if c.name in FEW["cases"]]
    assert len(by_case) == len(chosen) == 44
    for case, variant, dtype in chosen:
        data = make(case, variant, dtype)
        _, tensors = read(written / by_case[variant, dtype, case.name]["file"])
        inputs = {"x": data.x, "scale": data.scale, "bias": data.bias, "mask": data.mask, "residual": data.residual,
                  "gate": data.gate, "dy": data.dy, "dh": data.dh}  # fmt: skip
        inputs |= dict(zip(("tangent.x", "tangent.scale", "tangent.bias"), data.tangents, strict=True))
        want = {name: array for name, array in inputs.items() if array is not None}
        want |= {f"expected.{name}": array for name, array in golden(data).items()}
        if data.residual is not None:
            want["expected.h"] = rms_norm(data.x, data.scale, data.bias, **data.options, **data.arrays)[1]
        for name in [name for name in want if name.startswith("expected.") and want[name].dtype.itemsize == 2]:
            ends = [tensors[name.replace("expected", end)] for end in ("lo", "hi")]
            assert [end.tobytes() for end in ends] == [end.tobytes() for end in vectors.interval(want[name])]
        others = {name for name in tensors if not name.startswith(("unit.", "lo.", "hi."))}
        of_y = expect(data, ("y",))["y"]
        if of_y.low is not None:
            want |= {"least.y": of_y.low, "greatest.y": of_y.high}
        assert others == set(want)
        for name, array in want.items():
            assert tensors[name].dtype == array.dtype, name
            assert tensors[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_interval_of_an_element_is_what_rounds_to_it(dtype):
    """All 65,536 numbers: both ends round to the element, and the next float64 outside does not."""
    values = np.arange(2**16).astype(np.uint16).view(dtype)
    low, high = vectors.interval(values)
    with np.errstate(invalid="ignore"):  # half of the NaN are signalling
        is_nan = np.isnan(values)
    assert np.all(np.isnan(low) == is_nan)
    assert np.all(np.isnan(high) == is_nan)
    number = values[~is_nan].astype(np.float64)
    for end, outwards in ((low[~is_nan], -np.inf), (high[~is_nan], np.inf)):
        assert np.all(cast(end, dtype).astype(np.float64) == number)
        next_one = np.nextafter(end, outwards)
        assert np.all((cast(next_one, dtype).astype(np.float64) != number) | np.isinf(end))


def test_the_goldens_own_outputs_pass(folder):
    run = vectors.check(folder)
    assert run.status == "held"
    assert run.cases == 44
    assert {record.parity_ratio for record in run.records} == {0.0}
    assert {record.quantity for record in run.records} == {
        "y",
        "inverse_rms",
        "dx",
        "dscale",
        "dresidual",
        "dgate",
        "jvp",
    }


_INSTEAD = {
    "": "",
    "eps on the other side": "standard: y is that of standard with eps_position='outside'; "
    "llama: y is that of llama with eps_position='outside'; llama with gate_position='before': y is that of llama with "
    "eps_position='outside', gate_position='before'",
    "rounded on the other side": "standard: y is that of standard with rounding='before_scale'; "
    "llama: y is that of flax; llama with gate_position='before': y is that of standard with gate_position='before' or "
    "gemma4 with gate_position='before' or olmo2 with gate_position='before' or keras with gate_position='before' and "
    "1 more, which these cases do not tell apart",
    "gate on the other side": "llama with gate_position='before': y is that of llama",
}


@pytest.mark.parametrize("fault", _INSTEAD)
def test_the_verdicts_are_those_of_check(folder, fault):
    """For a right implementation and for wrong ones, every number is the same."""
    direct = {}
    for case, variant, dtype in select(tuple(FEW["variants"])):
        if case.name not in FEW["cases"]:
            continue
        data = make(case, variant, dtype)
        outcome = candidate(data, FAULTS[fault].changes if fault else {})
        for verdict in judge(lambda _, outcome=outcome: outcome, data):
            direct[variant, dtype, case.name, verdict.quantity] = verdict
        name = f"{variant}.{dtype}.{case.name.replace(' ', '-')}.safetensors"
        outputs = {quantity: np.ascontiguousarray(results[0]) for quantity, results in outcome.results.items()}
        (folder / "outputs" / name).write_bytes(vectors.serialized(outputs, {}))
    run = vectors.check(folder)
    assert run.message == _INSTEAD[fault]
    records = run.records
    assert len(records) == len(direct) > 100
    for record in records:
        want = direct[record.variant, record.dtype, record.case, record.quantity]
        for field in ("parity_ratio", "bound", "bit_identical", "identical_bound", "max_ulp", "passed", "detail"):
            assert getattr(record, field) == getattr(want, field), (record, want)


def test_the_report_says_what_is_wrong_with_an_output(folder):
    name = "llama.float32.rows.safetensors"
    path = folder / "outputs" / name
    _, tensors = read(folder / name)
    y = tensors["expected.y"]
    place = ("llama", "float32", "rows")

    _change(path, y=y.astype(np.float64))
    assert _failures(folder) == {(*place, "y"): "got f64[48, 96], want f32[48, 96]"}
    _change(path, y=y.T.copy())
    assert _failures(folder) == {(*place, "y"): "got f32[96, 48], want f32[48, 96]"}
    _change(path, y=y.astype(np.int32))
    assert _failures(folder) == {(*place, "y"): "not computed"}
    _change(path, dx=None)
    assert _failures(folder) == {(*place, "dx"): "not computed"}
    wrong = y.copy()
    wrong[3, 5] *= 1 + 2.0**-10
    _change(path, y=wrong)
    assert _failures(folder)[*place, "y"].startswith("at (3, 5) got ")
    path.write_bytes(path.read_bytes()[:-4])
    details = set(_failures(folder).values())
    assert len(details) == 1
    assert details.pop().startswith(f"{path} is not a safetensors file: ")
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    assert len(_failures(folder)) == 5
    path.unlink()
    assert set(_failures(folder).values()) == {f"{path} cannot be read: No such file or directory"}


def test_it_says_of_which_variant_outputs_of_another_are(tmp_path, monkeypatch):
    """All its cases count, also those that pass. On vectors that this version does not make it says nothing."""
    vectors.write(tmp_path, variants=["llama"], types=["bfloat16"], cases=["rows", "gain f32"], quantities=["y"])
    (tmp_path / "outputs").mkdir()
    for case, variant, dtype in select(("llama",), ("bfloat16",)):
        if case.name in ("rows", "gain f32"):
            data = recast(make(case, variant, dtype), Variant.get("gemma"))
            name = f"llama.bfloat16.{case.name.replace(' ', '-')}.safetensors"
            save_file(golden(data, ["y"]), tmp_path / "outputs" / name)
    run = vectors.check(tmp_path)
    assert run.message == "llama: y is that of gemma"
    report.write_json([run], tmp_path / "a.json")
    (backend,) = json.loads((tmp_path / "a.json").read_text())["backends"]
    assert (backend["message"], backend["identity"]) == (run.message, None)
    monkeypatch.setattr(instead, "_CASES", {"rows": replace(instead._CASES["rows"], shape=(48, 97))})
    assert vectors.check(tmp_path).message == ""


def test_the_share_of_identical_bits_counts(folder):
    """If one element in twenty is one ulp off, the ratio is within every bound, but the output is wrong."""
    name = "standard.bfloat16.rows.safetensors"
    _, tensors = read(folder / name)
    y = tensors["expected.y"].copy()
    y.reshape(-1).view(np.uint16)[::20] += 1
    _change(folder / "outputs" / name, y=y)
    (detail,) = _failures(folder).values()
    assert "1 ulp; 231 of 4608 elements differ" in detail


def _edit(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_changed_vectors_are_refused(folder, tmp_path):
    again = "write the vectors again with `rmsnorm vectors write`"
    with pytest.raises(ValueError, match=r"folder is '.*nowhere', expected one with a manifest.json of rmsnorm; write"):
        vectors.check(tmp_path / "nowhere")

    manifest = (folder / "manifest.json").read_text()
    _edit(folder, lambda manifest: manifest.update(format=2))
    with pytest.raises(ValueError, match=f"format of the vectors is 2, expected 1; {again}"):
        vectors.check(folder)
    _edit(folder, lambda manifest: manifest.update(kind="other", format=1))
    with pytest.raises(ValueError, match=f"kind of the vectors is 'other', expected 'rmsnorm vectors'; {again}"):
        vectors.check(folder)
    for broken in ("", "[]", "{}", manifest[:1000]):
        (folder / "manifest.json").write_text(broken)
        with pytest.raises(ValueError, match=r"expected one with a manifest.json of rmsnorm"):
            vectors.check(folder)

    (folder / "manifest.json").write_text(manifest)
    _edit(folder, lambda manifest: manifest["files"][0]["metadata"].update({"bound.y": "1e9"}))
    with pytest.raises(ValueError, match=r"digest of manifest.json is '[0-9a-f]{64}', expected '[0-9a-f]{64}'"):
        vectors.check(folder)
    (folder / "manifest.json").write_text(manifest)
    _edit(folder, lambda manifest: manifest["files"].pop())
    with pytest.raises(ValueError, match=r"digest of manifest.json"):
        vectors.check(folder)

    (folder / "manifest.json").write_text(manifest)
    path = folder / "standard.float64.rows.safetensors"
    content = path.read_bytes()
    for tampered in (content[:-8], content[:-1] + b"\x00", b""):
        path.write_bytes(tampered)
        with pytest.raises(
            ValueError, match=r"sha256 of standard.float64.rows.safetensors is '[0-9a-f]{64}', expected"
        ):
            vectors.check(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"sha256 of standard.float64.rows.safetensors is 'missing', expected"):
        vectors.check(folder)


def test_filters_that_no_case_passes_and_folders_that_are_not_empty_are_refused(tmp_path, written):
    with pytest.raises(ValueError, match=r"filter is 'gemma4 huge', expected one that a case passes"):
        vectors.write(tmp_path, variants=["gemma4"], cases=["huge"])
    with pytest.raises(ValueError, match=r"folder is '.*vectors', expected an empty one; empty it first"):
        vectors.write(written, variants=["gemma4"])
    with pytest.raises(ValueError, match=r"filter is 'rows dresidual', expected one that a case passes"):
        vectors.write(tmp_path / "new", cases=["rows"], quantities=["dresidual"])
    assert not list(tmp_path.iterdir())


def test_vectors_without_outputs_or_expectations_are_refused(tmp_path):
    """A check of nothing is no check that held."""
    assert vectors.write(tmp_path, variants=["standard"], types=["float32"], quantities=["dresidual"]) == 5
    with pytest.raises(
        ValueError, match=r"expected one with a folder outputs in it; make the folder .*outputs, and let"
    ):
        vectors.check(tmp_path)
    (tmp_path / "outputs").mkdir()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest |= {"files": [], "digest": vectors.digest_of([])}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"was compared in no case, expected at least one \(its files expect no"):
        vectors.check(tmp_path)


def test_only_the_quantities_asked_for_count(tmp_path):
    vectors.write(tmp_path, variants=["mlx"], types=["float32"], quantities=["y"])
    (tmp_path / "outputs").mkdir()
    assert {r.quantity: r.detail.split(": ")[-1] for r in vectors.check(tmp_path).records} == {
        "y": "No such file or directory"
    }


def test_vectors_of_a_quantisation_hold_codes_and_scales_and_judge_them(tmp_path):
    folder = tmp_path / "quantised"
    written = rmsnorm("vectors", "write", str(folder), "--quantisation", "te.mxfp8", "--dtype", "bfloat16")
    files = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    assert (written.exit_code, len(files)) == (0, len({path.name.lower() for path in files}))
    assert written.output.startswith(f"{len(files)} cases")
    (folder / "outputs").mkdir()
    for path in files:
        metadata, tensors = read(path)
        assert metadata["quantisation.element"] == "e4m3fn"
        x, gain, q, scales = (
            tensors[name].astype(np.float64) for name in ("x", "scale", "expected.q", "expected.scales")
        )
        if np.isfinite(q).all() and np.isfinite(gain).all():  # 1 / rho is 1
            nearest = cast((x * gain).reshape(*scales.shape, 32), "bfloat16").astype(np.float64) / scales[..., None]
            assert np.abs(nearest - q.reshape(nearest.shape)).max() <= 16 * 448 / 256  # half a step of the last octave
        save_file({name: tensors[f"expected.{name}"] for name in ("q", "scales")}, folder / "outputs" / path.name)
    assert vectors.check(folder).failures == []
    wrong = folder / "outputs" / "te.mxfp8.bfloat16.ties-a-scale-of-1.safetensors"
    _, tensors = read(folder / wrong.name)
    q = tensors["expected.q"].copy()
    q[0, 1] = np.nextafter(q[0, 1], np.float32(np.inf))
    save_file({"q": q, "scales": tensors["expected.scales"]}, wrong)
    assert [(entry.case, entry.quantity) for entry in vectors.check(folder).failures] == [("ties, a scale of 1", "q")]
    with pytest.raises(ValueError, match="quantisations have cases of their own"):
        vectors.write(tmp_path / "both", quantisations=["te.mxfp8"], variants=["llama"])
