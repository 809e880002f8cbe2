"""A row has the same bits however it is stored, whatever rows are beside it, and on any number of threads."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from golden.cases import case
from programs import finished

from rmsnorm import PRESETS, cpu, numpy_impl
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import fast
from rmsnorm.parity.cases import make
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [numpy_impl, fast], ids=["golden", "fast"])
KERNELS = pytest.mark.skipif(not cpu.is_available(), reason="there are no kernels here")
OF_MATRIX = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
NAMES = ("dy", "x", "scale", "bias", "residual", "dh", "mask")
LARGE: dict[str, Any] = {"rows": (2100,), "width": 1025}  # so many elements are shared out


def draw(dtype: Any = "float32", rows: tuple[int, ...] = (6,), width: int = 10, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(*rows, width), (*rows, width), (width,), (width,), (*rows, width), (*rows, width)]
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in zip(NAMES, shapes, strict=False)}
    return {**arrays, "mask": rng.random((*rows, width)) < 0.8}


def results(implementation: Any, a: dict[str, Any], **options: Any) -> list[np.ndarray]:
    """y, h, 1 / rho, dx, dscale, dbias and dresidual; and without a residual y, dx and dscale.

    Of the golden with a mask, and also the derivative along tangents.
    """
    options |= {"residual": a["residual"], "mask": a["mask"] if implementation is numpy_impl else None}
    normalised = [*implementation.rms_norm(a["x"], a["scale"], a["bias"], return_inverse_rms=True, **options)]
    normalised += implementation.rms_norm_vjp((a["dy"], a["dh"]), a["x"], a["scale"], a["bias"], **options)
    plain = [implementation.rms_norm(a["x"], a["scale"]), *implementation.rms_norm_vjp(a["dy"], a["x"], a["scale"])[:2]]
    if implementation is numpy_impl:
        plain.append(implementation.rms_norm_jvp((a["x"], a["scale"], a["bias"]), (a["dy"], a["bias"], a["scale"])))
    return [*normalised, *plain]


def bits(arrays: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays if array is not None]


def assert_same(got_arrays: list[np.ndarray], want_arrays: list[np.ndarray]) -> None:
    for got, want in zip(got_arrays, want_arrays, strict=True):
        assert type(got) is np.ndarray
        assert (got.dtype, got.dtype.isnative) == (want.dtype, True)
        assert got.tobytes() == want.tobytes()


def unaligned(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def overlapping(array: np.ndarray) -> np.ndarray:
    """The first numbers of an array, where each row begins one number after the row before."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return np.lib.stride_tricks.as_strided(flat, array.shape, array.itemsize * np.ones(array.ndim, int))


class Subclass(np.ndarray):
    def __mul__(self, other: Any) -> Any:
        raise AssertionError("what is computed is computed with plain arrays")


STORED = {
    "Fortran": np.asfortranarray,
    "axes swapped": lambda a: a.swapaxes(0, -2).copy().swapaxes(0, -2) if a.ndim > 1 else a,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "every second row": lambda a: np.repeat(a, 2, -2)[..., ::2, :] if a.ndim > 1 else a,
    "the first columns": lambda a: np.concatenate([a, a], -1)[..., : a.shape[-1]],
    "backwards": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "rows backwards": lambda a: a[::-1].copy()[::-1],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "subclass": lambda a: a.view(Subclass),
    "unaligned": unaligned,
    "overlapping": overlapping,
    "one row for all": lambda a: np.broadcast_to(a[:1], a.shape),
    "matrix": lambda a: a.view(np.matrix) if a.ndim == 2 else a,
    "record array": lambda a: a.view(np.recarray),
}


@OF_MATRIX
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("way", STORED)
def test_however_arrays_are_stored(way: str, dtype: str, implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only; and by the kernels, where there are some."""
    if way == "big-endian" and dtype == "bfloat16":
        pytest.skip("ml_dtypes has no other byte order")
    if cpu.is_available() and dtype != "float64":
        monkeypatch.setattr(fast, "golden", None)
    for rows in ((6,), (6, 5)):
        stored = {name: STORED[way](array) for name, array in draw(dtype, rows).items()}
        before = bits(stored.values())
        for array in stored.values():
            array.setflags(write=False)
        plain = {name: np.array(a, a.dtype.newbyteorder("="), order="C", subok=False) for name, a in stored.items()}
        assert_same(results(implementation, stored), results(implementation, plain))
        assert before == bits(stored.values())


@IMPLEMENTATIONS
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_files_in_memory_are_read_alone(mode: str, implementation: Any, tmp_path: Path) -> None:
    plain = draw("float32", rows=(40,))
    mapped = {}
    for name, array in plain.items():
        array.tofile(tmp_path / name)
        mapped[name] = np.memmap(tmp_path / name, array.dtype, mode, shape=array.shape)
    from_files = results(implementation, mapped)
    assert_same(from_files, results(implementation, plain))
    assert not any(np.shares_memory(result, array) for result in from_files for array in mapped.values())
    mapped.clear()
    assert all((tmp_path / name).read_bytes() == array.tobytes() for name, array in plain.items())


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", NAMES)
def test_a_masked_array_is_not_taken_for_its_data(name: str, implementation: Any) -> None:
    a = draw()
    a[name] = np.ma.masked_array(a[name], mask=np.zeros_like(a[name], bool))
    sentence = rf"{name} is <class 'numpy.ma.*MaskedArray'> .*, expected an array without a mask"
    with pytest.raises(TypeError, match=sentence):
        implementation.rms_norm(a["x"], mask=a["mask"]) if name == "mask" else results(implementation, a)
    with pytest.raises(TypeError, match=r"rms_norm_jvp: dx is <class 'numpy.ma.*MaskedArray'>"):
        numpy_impl.rms_norm_jvp((np.ones(3),), (np.ma.masked_array(np.ones(3)),))


@OF_MATRIX
@IMPLEMENTATIONS
def test_what_is_no_array_of_numbers(implementation: Any) -> None:
    a = draw()
    sentence = r"scale has shape \(1, 10\), expected \(10,\) to match axis -1 of x f32\[6, 10\]"
    with pytest.raises(ValueError, match=sentence):
        implementation.rms_norm(a["x"], np.asmatrix(a["scale"]))
    sentence = r"rms_norm: x has dtype .*, expected float16, bfloat16, float32 or float64"
    for wrong in (np.zeros(3, [("field", "f4")]), np.array([1.0, None]), np.ones(3, np.clongdouble), np.array(["a"])):
        with pytest.raises(TypeError, match=sentence):
            implementation.rms_norm(wrong)


@IMPLEMENTATIONS
def test_no_call_keeps_an_array(implementation: Any) -> None:
    arrays = draw("float32", rows=(3000,), width=24)
    alive = [weakref.ref(array) for array in (*arrays.values(), *results(implementation, arrays))]
    assert alive[0]() is not None
    arrays.clear()
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_what_describes_a_call_is_small_and_goes_between_processes() -> None:
    call = resolve("rms_norm", Spec((2**20, 4096), "float32"), Spec((4096,), "float32"), variant=PRESETS["llama"])
    for described in (PRESETS["llama"].replace(partial=0.07), call):
        pickled = pickle.dumps(described)
        assert len(pickled) < 2048
        assert pickle.loads(pickled) == described
        assert hash(pickle.loads(pickled)) == hash(described)
    assert pickle.loads(pickle.dumps(fast.rms_norm)) is fast.rms_norm


def test_without_kernels_the_warning_says_how_slow_and_points_to_the_caller(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    calls = "rms_norm(np.ones((2, 4)))\nrms_norm(np.ones(4))"
    absent = "import sys; sys.modules['rmsnorm.cpu._native'] = None"
    user.write_text(f"import numpy as np; {absent}\nfrom rmsnorm.numpy_impl.fast import rms_norm\n{calls}")
    done = finished(user, timeout=100, path=tmp_path, RMSNORM_CPU_KERNELS=None)
    (warning,) = (line for line in done.stderr.splitlines() if "Warning" in line)
    assert warning.startswith(f"{user}:2: UserWarning: rmsnorm: numpy_impl.fast is now the golden, 200 to 1,600 times")
    assert "the module of the kernels cannot be imported" in warning
    assert "install the package with a C++ compiler" in warning


# In every framework


def of_rows(rows: int, n: int, dtype: str = "float32") -> tuple[Any, ...]:
    """dy, x, scale and bias; rows of different size."""
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, n)) * 4.0 ** random.integers(-6, 6, (rows, 1))
    return random.normal(size=(rows, n)).astype(dtype), x.astype(dtype), *random.normal(size=(2, n)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["standard", "llama"])
def test_a_row_in_a_batch_is_what_it_is_alone(framework, variant, dtype):
    """Also in calls of many rows."""
    dy, x, scale, bias = of_rows(1100, 256, dtype)

    def call(some: slice) -> list[Any]:
        y = framework.rms_norm(x[some], scale, bias, variant=variant)
        return [y, framework.rms_norm_vjp(dy[some], x[some], scale, bias, variant=variant)[0]]

    whole = call(slice(None))
    for some in (slice(5, 6), slice(0, 7), slice(500, 757)):
        assert bits(call(some)) == bits(array[some] for array in whole)


def test_a_row_in_a_compiled_program_of_jax_is_what_it_is_alone():
    jax = pytest.importorskip("jax")
    from rmsnorm.flax_impl import rms_norm

    dy, x, scale, _ = map(jax.numpy.asarray, of_rows(1100, 256))
    pulled = jax.jit(lambda dy, x: (y_and_pull := jax.vjp(rms_norm, x, scale))[:1] + y_and_pull[1](dy)[:1])
    whole = pulled(dy, x)
    for some in (slice(5, 6), slice(0, 7), slice(500, 757)):
        got = pulled(dy[some], x[some])
        assert bits(map(np.asarray, got)) == bits(np.asarray(array[some]) for array in whole)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # from forward_ad
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parameter_gradients_do_not_depend_on_the_leading_axes(framework, dtype):
    """By the formulas and by automatic differentiation, which add up in one order."""
    data = make(case("sums", (96, 40), bias=True), "standard", dtype)
    parameters = [Spec(p.shape, p.dtype.name) for p in (data.scale, data.bias)]

    def sums(*rows):
        x, dy, dx = (array.reshape(*rows, 40) for array in (data.x, data.dy, data.tangents[0]))
        call = resolve("test", Spec(x.shape, dtype), *parameters, variant=data.variant)
        batched = replace(data, call=call, x=x, dy=dy, tangents=(dx, *data.tangents[1:]))
        outcome = framework.outcome(batched).results
        return bits([*outcome["dscale"], *outcome["dbias"]])

    want = sums(96)
    for rows in ((4, 24), (24, 2, 2), (96, 1)):
        assert sums(*rows) == want


def test_parameter_gradients_do_not_depend_on_the_order_of_rows(framework):
    """The sum is in float64 and rounded to float32 once, which hides the order of the roundings on the way."""
    dy, x, scale, bias = of_rows(300, 16)
    order = np.random.default_rng(1).permutation(300)
    want = framework.rms_norm_vjp(dy, x, scale, bias)
    assert bits(framework.rms_norm_vjp(dy[order], x[order], scale, bias)[1:]) == bits(want[1:])


def test_microbatches_add_up(framework):
    """Each part is rounded once, and so is their sum. Nothing else is lost."""
    dy, x, scale, bias = of_rows(64, 24)
    whole = framework.rms_norm_vjp(dy, x, scale, bias)[1:]
    parts = [framework.rms_norm_vjp(dy[i : i + 32], x[i : i + 32], scale, bias)[1:] for i in (0, 32)]
    for want, first, second in zip(whole, *parts, strict=True):
        unit = np.spacing(np.maximum(np.maximum(abs(first), abs(second)), abs(want)))
        assert (abs(first.astype(float) + second - want) <= 1.5 * unit).all()
        assert ulps(first, want).max() > 0  # half the rows are not all of them
