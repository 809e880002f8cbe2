"""What holds whatever the numbers are: batches, threads, memory, forms of the options, what is returned and kept."""

from __future__ import annotations

import importlib
import itertools
import threading
from fractions import Fraction
from typing import Any

import calls
import ml_dtypes
import numpy as np
import pytest

from rmsnorm import PRESETS, Variant, cpu, numpy_impl
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.specification import dtypes

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="of the kernels")


def drawn(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def bits(value: Any) -> list[Any]:
    return [None if part is None else part.tobytes() for part in (value if isinstance(value, tuple) else (value,))]


def same(got: Any, want: Any) -> None:
    """16 bits within one ulp, the others within a few tens of roundings of terms that are near 1."""
    got, want = (result if isinstance(result, tuple) else (result,) for result in (got, want))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if other.dtype.name in dtypes.HALF:
                assert ulps(one, other).max(initial=0) <= 1
            else:
                units = 64 * dtypes.unit_roundoff(other.dtype.name)
                np.testing.assert_allclose(one, other, rtol=units, atol=units)


OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"variant": "llama"}, {"residual": True}, {"mask": True}, {"gate": True}, {"partial": 0.3}
)  # fmt: skip


def optioned(options: dict[str, Any], x: Any) -> dict[str, Any]:
    """The options with arrays of the shape of x in place of True."""
    made = {"residual": drawn(*x.shape, seed=1).astype(x.dtype), "gate": drawn(*x.shape, seed=2).astype(x.dtype),
            "mask": drawn(*x.shape, seed=3) > -0.5}  # fmt: skip
    return {name: made[name] if value is True else value for name, value in options.items()}


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_does_not_know_the_others(framework: Any, dtype: str) -> None:
    """Neither how many there are, nor what is in them: not one bit of y and dx. Nor does a call know the one before."""
    x, dy, g = drawn(67, 41, dtype=dtype), drawn(67, 41, dtype=dtype, seed=5), drawn(41, dtype=dtype, seed=6)
    x[3], x[5, 0], x[6], x[7, 1] = np.nan, np.inf, 0, 1e4
    for options in OPTIONS if framework.name != "flax" else OPTIONS[:2]:
        whole = optioned(options, x)
        y, d = framework.rms_norm(x, g, **whole), framework.rms_norm_vjp(dy, x, g, **whole)
        assert bits(framework.rms_norm(x, g, **whole)) == bits(y), "the same call again"
        assert bits(framework.rms_norm_vjp(dy, x, g, **whole)) == bits(d), "the same call again"
        y = y[0] if isinstance(y, tuple) else y
        if {"mask", "gate"} & {*options}:
            continue  # whose operations may add in another order
        for rows in (slice(0, 1), slice(2, 9), slice(34, 67)):
            part = {name: a[rows] if isinstance(a, np.ndarray) else a for name, a in whole.items()}
            some = framework.rms_norm(x[rows], g, **part)
            assert bits(some[0] if isinstance(some, tuple) else some) == bits(y[rows]), (options, rows)
            assert bits(framework.rms_norm_vjp(dy[rows], x[rows], g, **part)[0]) == bits(d[0][rows]), (options, rows)


@needs_kernels
def test_threads_change_no_bit(framework: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of y, dx, dscale and dbias, with more rows than a thread takes; and from many threads of Python at once."""
    x, dy, g = drawn(3001, 65), drawn(3001, 65, seed=1), drawn(65, seed=2)

    def results() -> bytes:
        found = framework.rms_norm(x, g, residual=dy), framework.rms_norm_vjp(dy, x, g, g)
        return b"".join(part.tobytes() for result in found for part in result)

    seen, before = [], None
    if framework.name == "torch":
        before = framework.bridge.torch.get_num_threads()
    for count in (1, 2, 7):
        monkeypatch.setenv("RMSNORM_NUM_THREADS", str(count))
        if framework.name == "torch":
            framework.bridge.torch.set_num_threads(count)
        seen.append(results())
    workers = [threading.Thread(target=lambda: seen.append(results())) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if before:
        framework.bridge.torch.set_num_threads(before)
    assert len(seen) == 9
    assert len({*seen}) == 1


@needs_kernels
@pytest.mark.parametrize("framework", ["torch", "tf", "flax"], indirect=True)
@pytest.mark.parametrize("dtype", [*dtypes.HALF, "float32"])
def test_gradients_have_the_bits_of_the_golden(framework: Any, dtype: str) -> None:
    """By the kernels, by the formulas and by automatic differentiation: twice rounded would be another number."""
    for shape in ((6, 5, 40), (131, 1025)):  # the second one is shared out
        x, dy, dh, r = (drawn(*shape, dtype=dtype, seed=seed) for seed in range(4))
        g, b = (drawn(shape[-1], dtype=dtype, seed=seed) for seed in (4, 5))
        for variant in ("standard", "gemma", "zhang_torch", *(["llama"] if dtype != "float16" else [])):
            if framework.name == "flax" and (shape[-1] == 40) == (variant == "gemma"):
                continue
            outcome = framework.outcome(calls.arguments(x, g, b, variant=variant, dy=dy))
            want = numpy_impl.rms_norm_vjp(dy, x, g, b, variant=variant)
            for name, gradient in zip(("dx", "dscale", "dbias"), want, strict=True):
                assert len(outcome.results[name]) == 2
                assert all(bits(got) == bits(gradient) for got in outcome.results[name]), (variant, shape, name)
        got, want = (f.rms_norm_vjp((dy, dh), x, g, b, residual=r) for f in (framework, numpy_impl))
        assert bits(got) == bits(want)


def test_what_is_returned(framework: Any) -> None:
    """y; (y, x + residual); and 1 / rho last. A gradient for each argument, None where there is none."""
    x, r, g = drawn(3, 4, 5), drawn(3, 4, 5, seed=1), drawn(5, seed=2)
    assert not isinstance(framework.rms_norm(x), tuple)
    for options in ({}, {"residual": r}, {"return_inverse_rms": True}, {"residual": r, "return_inverse_rms": True}):
        same(framework.rms_norm(x, **options), numpy_impl.rms_norm(x, **options))
    assert framework.rms_norm(x, axis=(0, 1), return_inverse_rms=True)[1].shape == (1, 1, 5)
    more = ({}, {"residual": r}, {"gate": r}, {"residual": r, "gate": r})
    for scale, bias, options in itertools.product((None, g), (None, g), more):
        same(*(f.rms_norm_vjp(r, x, scale, bias, **options) for f in (framework, numpy_impl)))
    for dy in ((x, r), (x, None)):
        same(*(f.rms_norm_vjp(dy, x, g, residual=r) for f in (framework, numpy_impl)))


def test_forms_of_the_options(framework: Any) -> None:
    """Lists and tuples, positive and negative axes, a Variant and its name, a fraction and its decimal, own dtypes."""
    x, v, g = drawn(3, 4, 5), drawn(3, 4, 5, seed=1), drawn(5, seed=2)
    wide, tall = drawn(4, 5, seed=3), drawn(3, seed=4)
    for options, scale in (
        ({"axis": 2}, g), ({"axis": [-1]}, g), ({"axis": np.int64(-1)}, g), ({"axis": (2, 1)}, wide),
        ({"axis": [-1, -2]}, wide), ({"axis": (1, 2), "feature_axis": 0}, tall), ({"axis": 0}, tall),
        ({"axis": -1, "feature_axis": (1, 2)}, wide), ({"axis": (0, 1, 2), "feature_axis": -1}, g),
        ({"variant": Variant.get("gemma")}, g), ({"variant": "gemma", "eps": 0}, g), ({"eps": np.float32(0.5)}, g),
        ({"partial": 0.5}, g), ({"partial": Fraction(1, 3)}, g), ({"partial": 1}, g),
    ):  # fmt: skip
        same(*(f.rms_norm(x, scale, **options) for f in (framework, numpy_impl)))
        same(*(f.rms_norm_vjp(v, x, scale, **options) for f in (framework, numpy_impl)))
    equal = [framework.rms_norm(x, g, partial=p).tobytes() for p in (0.2, Fraction(1, 5), Fraction("0.2"))]
    assert len({*equal}) == 1
    changed = Variant.get("llama").replace(eps=0.1, partial=0.2)
    found = [framework.rms_norm(x, g, variant=variant, eps=0.5, partial=0.6) for variant in ("llama", changed)]
    assert bits(found[0]) == bits(found[1]), "eps and partial of the call replace those of a Variant, too"
    own = {"numpy": ml_dtypes, "torch": "torch", "tf": "tensorflow", "flax": "jax.numpy"}[framework.name]
    module = importlib.import_module(own) if isinstance(own, str) else own
    for out in ("bfloat16", module.bfloat16):
        assert bits(framework.rms_norm(x, out_dtype=out)) == bits(numpy_impl.rms_norm(x, out_dtype="bfloat16"))
    with pytest.raises(ValueError, match="out_dtype is 'int32', expected 'float16'"):
        framework.rms_norm(x, out_dtype=getattr(module, "int32", np.int32))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (4, 0), (1, 1)], ids=str)
def test_empty(framework: Any, shape: tuple[int, ...]) -> None:
    """Shapes, dtypes and zero sums."""
    x, g = drawn(*shape, dtype="bfloat16"), drawn(shape[-1], seed=1)
    for options in ({}, {"residual": x}, {"gate": x}, {"mask": np.ones(shape, bool)}):
        same(*(f.rms_norm(x, g, return_inverse_rms=True, **options) for f in (framework, numpy_impl)))
        same(*(f.rms_norm_vjp(x, x, g, g, **options) for f in (framework, numpy_impl)))


@pytest.mark.parametrize("eps", [None, 0.0])
@pytest.mark.parametrize("variant", ["standard", "zhang_torch", "x_transformers"])
def test_what_is_under_a_mask_reaches_no_derivative(framework: Any, variant: str, eps: float | None) -> None:
    """By the formulas and by automatic differentiation; a row counts nothing, and one zeros: for no eps 1 / 0."""
    chosen = PRESETS[variant] if eps is None else PRESETS[variant].replace(eps=eps)
    x, dy, mask = drawn(6, 20), drawn(6, 20, seed=1), drawn(6, 20, seed=2) > -0.3
    x[5], mask[2] = 0, False
    found = []
    for value in (0.0, 1e30, np.nan, np.inf):
        filled = [np.where(mask, a, np.float32(value)) for a in (x, dy)]
        data = calls.arguments(filled[0], drawn(20, seed=3), variant=chosen, mask=mask, dy=filled[1])
        found.append(framework.outcome(data).results)
    for results, (name, want) in itertools.product(found, found[0].items()):
        counted = mask if name == "y" else ...
        for got, expected in zip(results[name], want, strict=True):
            assert np.array_equal(got[counted], expected[counted], equal_nan=True), name
            assert np.isfinite(got[counted]).all() or eps == 0, name
    assert not any(dx[~mask].any() or dx[2].any() for dx in found[0]["dx"])
    assert not any(y[2].any() for y in found[0]["y"])


def test_memory_of_the_arguments(framework: Any) -> None:
    """A strided, transposed, big-endian or expanded argument, and any mask that broadcasts, mean what copies mean."""
    x, dy, g = drawn(6, 8, 10), drawn(6, 8, 10, seed=1), drawn(10, seed=2)
    y, d = framework.rms_norm(x, g), framework.rms_norm_vjp(dy, x, g)
    views = [np.asfortranarray(x), np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)]
    views += [x.astype(">f4"), x[::-1].copy()[::-1]] if framework.name == "numpy" else []
    for view in views:
        assert bits(framework.rms_norm(view, g)) == bits(y)
        assert bits(framework.rms_norm_vjp(dy, view, g)) == bits(d)
    for mask in (x > 0, x[:1] > 0, x[:, :1, :1] > -0.5, x[:, :, :1] > 0, x[0, 0] > 0, np.array(True)):
        same(*(f.rms_norm(x, g, mask=mask) for f in (framework, numpy_impl)))
        whole = np.broadcast_to(mask, x.shape)
        same(framework.rms_norm_vjp(dy, x, g, mask=mask), framework.rms_norm_vjp(dy, x, g, mask=whole.copy()))


@pytest.mark.parametrize("name", ["axis", "eps", "partial"])
def test_what_is_kept_of_a_call_changes_no_later_one(framework: Any, name: str) -> None:
    """An option of another type is refused after an equal one."""
    for _ in range(2):
        framework.rms_norm(drawn(3, 4), **{name: 1})
        with pytest.raises(TypeError, match=r"is True \(bool\), expected"):
            framework.rms_norm(drawn(3, 4), **{name: True})


def test_dy_is_an_array_or_a_pair() -> None:
    with pytest.raises(TypeError, match=r"dy is .* expected an array or a pair"):
        numpy_impl.rms_norm_vjp((np.ones(2),) * 3, np.ones(2), residual=np.ones(2))


def test_tangents_may_be_left_out() -> None:
    x, r, t, g, b, dg, db = (*(drawn(3, 4, 5, seed=s) for s in range(3)), *(drawn(5, seed=s) for s in range(4)))
    for primals, tangents in (
        ((x,), (t,)), ((x, g), (t,)), ((x, g), (t, dg)), ((x, g, b), (None, dg, None)), ((x, g, b), (None, None, db)),
        ((x, None, b), (t, None, db)), ((x, g, b), (t, dg, db)), ((x, g, b), (None,)),
    ):  # fmt: skip
        pairs = [*itertools.zip_longest(primals, tangents)]
        whole = [None if p is None else np.zeros_like(p) if tangent is None else tangent for p, tangent in pairs]
        for options in ({}, {"residual": r}, {"out_dtype": "bfloat16"}):
            same(*(numpy_impl.rms_norm_jvp(primals, along, **options) for along in (tangents, whole)))
