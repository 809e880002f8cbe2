"""The golden and the fast functions of NumPy: the same bits for any storage, batching and number of threads."""

from __future__ import annotations

import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from programs import finished

from rmsnorm import PRESETS, cpu, numpy_impl
from rmsnorm.numpy_impl import fast
from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Spec
from rmsnorm.specification.resolve import resolve

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [numpy_impl, fast], ids=["golden", "fast"])
NAMES = ("dy", "x", "scale", "bias", "residual", "dh", "mask")


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


def assert_same(got_arrays: list[np.ndarray], want_arrays: list[np.ndarray]) -> None:
    for got, want in zip(got_arrays, want_arrays, strict=True):
        assert type(got) is np.ndarray
        assert (got.dtype, got.dtype.isnative) == (want.dtype, True)
        assert got.tobytes() == want.tobytes()


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:]
    return raw.view(array.dtype).reshape(array.shape)


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


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("rows", [(6,), (6, 5)])
@pytest.mark.parametrize("way", STORED)
def test_however_arrays_are_stored(
    way: str, rows: tuple[int, ...], dtype: str, implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only; and by the kernels, where there are some."""
    if way == "big-endian" and dtype == "bfloat16":
        pytest.skip("ml_dtypes has no other byte order")
    if cpu.is_available() and dtype != "float64":
        monkeypatch.setattr(fast, "golden", None)
    stored = {name: STORED[way](array) for name, array in draw(dtype, rows).items()}
    before = {name: array.tobytes() for name, array in stored.items()}
    for array in stored.values():
        array.setflags(write=False)
    plain = {
        name: np.array(array, array.dtype.newbyteorder("="), order="C", subok=False) for name, array in stored.items()
    }
    assert_same(results(implementation, stored), results(implementation, plain))
    assert before == {name: array.tobytes() for name, array in stored.items()}


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
    function = (lambda: implementation.rms_norm(a["x"], mask=a["mask"])) if name == "mask" else None
    with pytest.raises(
        TypeError, match=rf"{name} is <class 'numpy.ma.*MaskedArray'> .*, expected an array without a mask"
    ):
        function() if function else results(implementation, a)
    with pytest.raises(TypeError, match=r"rms_norm_jvp: dx is <class 'numpy.ma.*MaskedArray'>"):
        numpy_impl.rms_norm_jvp((np.ones(3),), (np.ma.masked_array(np.ones(3)),))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@IMPLEMENTATIONS
def test_what_is_no_array_of_numbers(implementation: Any) -> None:
    a = draw()
    with pytest.raises(
        ValueError, match=r"scale has shape \(1, 10\), expected \(10,\) to match axis -1 of x f32\[6, 10\]"
    ):
        implementation.rms_norm(a["x"], np.asmatrix(a["scale"]))
    for wrong in (np.zeros(3, [("field", "f4")]), np.array([1.0, None]), np.ones(3, np.clongdouble), np.array(["a"])):
        with pytest.raises(
            TypeError, match=r"rms_norm: x has dtype .*, expected float16, bfloat16, float32 or float64"
        ):
            implementation.rms_norm(wrong)


@pytest.mark.skipif(not cpu.is_available(), reason="without kernels nothing is shared out")
@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_however_many_threads(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask, a residual and its gradient; rows batched in several ways."""
    a = draw(dtype, rows=(2100,), width=1025)
    of_threads = []
    for count, rows in (("1", (2100,)), ("2", (7, 300)), ("7", (2100, 1)), ("50", (2, 1, 1050))):
        monkeypatch.setenv("RMSNORM_NUM_THREADS", count)
        batched = {name: array if array.ndim == 1 else array.reshape(*rows, 1025) for name, array in a.items()}
        of_threads.append([array.tobytes() for array in results(fast, batched)])
    assert all(bits == of_threads[0] for bits in of_threads)


def _has_threads(implementation: Any) -> bool:
    return implementation is fast and cpu.is_available()


@IMPLEMENTATIONS
def test_several_threads_at_once(implementation: Any) -> None:
    """Every thread has its own arrays, and its own settings of warnings: NaN and infinity cause none.

    Those of the kernels are large enough that the calls share their rows out, all at once.
    """
    size, turns = ({"rows": (2100,), "width": 1025}, 2) if _has_threads(implementation) else ({"rows": (50,)}, 6)
    arrays = [draw("float32", seed=seed, **size) for seed in range(4)]
    for a in arrays:
        a["x"][0, 0], a["x"][1, 1], a["x"][2] = np.nan, np.inf, 0
    wanted = [results(implementation, a, eps=0.0) for a in arrays]

    def work(index: int) -> None:
        with np.errstate(all="raise"):
            for turn in range(turns):
                which = (index + turn) % 4
                got = results(implementation, arrays[which], eps=0.0)
                assert [array.tobytes() for array in got] == [array.tobytes() for array in wanted[which]]

    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(work, range(8), timeout=60))) == 8


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


def test_without_kernels_the_warning_says_how_slow_and_points_to_the_caller(tmp_path):
    user = tmp_path / "user.py"
    calls = "rms_norm(np.ones((2, 4)))\nrms_norm(np.ones(4))"
    absent = "import sys; sys.modules['rmsnorm.cpu._native'] = None"
    user.write_text(f"import numpy as np; {absent}\nfrom rmsnorm.numpy_impl.fast import rms_norm\n{calls}")
    done = finished(user, timeout=100, path=tmp_path, RMSNORM_CPU_KERNELS=None)
    (warning,) = (line for line in done.stderr.splitlines() if "Warning" in line)
    assert warning.startswith(f"{user}:2: UserWarning: rmsnorm: numpy_impl.fast is now the golden, 200 to 1,600 times")
    assert "the module of the kernels cannot be imported" in warning
    assert "install the package with a C++ compiler" in warning
