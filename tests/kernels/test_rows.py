"""A row has the same bits however it is stored, and whatever rows are beside it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
from programs import finished

from rmsnorm import cpu, numpy_impl
from rmsnorm.numpy_impl import fast

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


def bits(arrays: Any) -> list[bytes]:
    return [array.tobytes() for array in arrays if array is not None]


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
    "backwards": lambda a: np.ascontiguousarray(a[..., ::-1])[..., ::-1],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "subclass": lambda a: a.view(Subclass),
    "overlapping": overlapping,
    "one row for all": lambda a: np.broadcast_to(a[:1], a.shape),
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("way", STORED)
def test_however_arrays_are_stored(way: str, implementation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read-only; and by the kernels, where there are some. Results are plain arrays of this machine."""
    for dtype, rows in (("float64", (6,)), ("float32", (6,)), ("float32", (6, 5)), ("bfloat16", (6, 5))):
        if way == "big-endian" and dtype == "bfloat16":
            continue  # ml_dtypes has no other byte order
        by_kernels = cpu.is_available() and dtype != "float64"
        monkeypatch.setattr(fast, "golden", None if by_kernels else numpy_impl.functional)
        stored = {name: STORED[way](array) for name, array in draw(dtype, rows).items()}
        before = bits(stored.values())
        for array in stored.values():
            array.setflags(write=False)
        plain = {name: np.array(a, a.dtype.newbyteorder("="), order="C", subok=False) for name, a in stored.items()}
        for got, want in zip(results(implementation, stored), results(implementation, plain), strict=True):
            assert (type(got), got.dtype.isnative) == (np.ndarray, True)
            assert (got.dtype, got.tobytes()) == (want.dtype, want.tobytes())
        assert before == bits(stored.values())


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", NAMES)
def test_a_masked_array_is_not_taken_for_its_data(name: str, implementation: Any) -> None:
    a = draw()
    a[name] = np.ma.masked_array(a[name], mask=np.zeros_like(a[name], bool))
    with pytest.raises(TypeError, match=rf"{name} is .*MaskedArray'> .*, expected an array without a mask"):
        implementation.rms_norm(a["x"], mask=a["mask"]) if name == "mask" else results(implementation, a)


@IMPLEMENTATIONS
def test_no_call_keeps_an_array(implementation: Any) -> None:
    arrays = draw("float32", rows=(1500,), width=24)
    alive = [weakref.ref(array) for array in (*arrays.values(), *results(implementation, arrays))]
    assert alive[0]() is not None
    arrays.clear()
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_without_kernels_the_warning_says_how_slow_and_points_to_the_caller(tmp_path: Path) -> None:
    user = tmp_path / "user.py"
    absent = "import sys; sys.modules['rmsnorm.cpu._native'] = None"
    user.write_text(f"{absent}\nfrom rmsnorm.numpy_impl.fast import rms_norm\nrms_norm([1.0])\nrms_norm([1.0])")
    done = finished(user, timeout=100, path=tmp_path, RMSNORM_CPU_KERNELS=None)
    (warning,) = (line for line in done.stderr.splitlines() if "Warning" in line)
    assert warning.startswith(f"{user}:2: UserWarning: rmsnorm: numpy_impl.fast is now the golden, 200 to 1,600 times")
    assert "install the package with a C++ compiler" in warning


def test_a_row_in_a_compiled_program_of_jax_is_what_it_is_alone():
    jax = pytest.importorskip("jax")
    from rmsnorm.flax_impl import rms_norm

    arrays = draw(rows=(1100,), width=256)
    dy, x, scale = (jax.numpy.asarray(arrays[name]) for name in ("dy", "x", "scale"))
    pulled = jax.jit(lambda dy, x: (y_and_pull := jax.vjp(rms_norm, x, scale))[:1] + y_and_pull[1](dy)[:1])
    whole = pulled(dy, x)
    for some in (slice(5, 6), slice(0, 7), slice(500, 757)):
        got = pulled(dy[some], x[some])
        assert bits(map(np.asarray, got)) == bits(np.asarray(array[some]) for array in whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_of_parameters_do_not_depend_on_the_axes_or_the_order_of_rows(framework, dtype):
    """The sum is in float64 and rounded once, which hides the order of the roundings on the way."""
    dy, x, scale, bias = (draw(dtype, rows=(96,), width=40)[name] for name in ("dy", "x", "scale", "bias"))
    want = bits(framework.rms_norm_vjp(dy, x, scale, bias)[1:])
    for rows in ((4, 24), (24, 2, 2), (96, 1)):
        shaped = (array.reshape(*rows, 40) for array in (dy, x))
        assert bits(framework.rms_norm_vjp(*shaped, scale, bias)[1:]) == want
    order = np.random.default_rng(1).permutation(96)
    assert bits(framework.rms_norm_vjp(dy[order], x[order], scale, bias)[1:]) == want
