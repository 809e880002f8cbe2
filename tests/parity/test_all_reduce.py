"""``check_all_reduce`` of functions that add the parts of several ranks, in every order, and of wrong ones."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numpy_zoo import truncated

from rmsnorm import Variant
from rmsnorm.numpy_impl import all_reduced, rms_norm, rms_norm_vjp
from rmsnorm.numpy_impl.all_reduce import ORDERS
from rmsnorm.parity import check_all_reduce

SAID = {
    "sum_rounded": "the sum over ranks is rounded once, before the residual is added",
    "each_rounded": "the sum over ranks is rounded after each rank",
    "rounded_once": "the sum over ranks and the residual is rounded once",
    "truncated": "the sum over ranks is truncated",
}


def kernel(order, *, sums_only_y=False, reads="before", wrong=""):
    """As engines have it: sums in float32, or in the dtype for ``each_rounded``, and the norm in float32."""

    def norm(parts, weight, *, eps, residual=None):
        dtype = parts[0].dtype
        wide = [part.astype(np.float32) for part in (parts[:-1] if wrong == "a rank forgotten" else parts)]
        r = np.float32(0) if residual is None else residual.astype(np.float32)
        if wrong == "a residual of each rank":
            wide = [part + r for part in wide]
            r = np.float32(0)
        total = functools.reduce(np.add, wide[::-1])
        if order == "each_rounded":
            total = functools.reduce(np.add, [part.astype(dtype) for part in wide]).astype(np.float32)
        elif order == "truncated":
            total = truncated(total, dtype).astype(np.float32)
        elif order == "sum_rounded":
            total = total.astype(dtype).astype(np.float32)
        exact = total + r
        h = exact.astype(dtype)
        read = exact if reads == "after" else h.astype(np.float32)
        rho = np.sqrt(np.mean(read * read, axis=-1, keepdims=True) + np.float32(eps))
        y = (read / rho * weight.astype(np.float32)).astype(dtype)
        return y if sums_only_y else (y, h)

    return norm


@pytest.mark.parametrize("asked", ORDERS)
@pytest.mark.parametrize("sums_only_y", [False, True])
def test_a_right_function_passes_and_another_order_is_named(asked, sums_only_y):
    right = check_all_reduce(kernel(asked, sums_only_y=sums_only_y), asked)
    assert right.passed, right.text
    assert right.run.cases == 3 * 2 * 3
    for order in set(ORDERS) - {asked}:
        wrong = check_all_reduce(kernel(order, sums_only_y=sums_only_y), asked, dtypes=["float16", "bfloat16"])
        assert not wrong.passed
        assert wrong.run.message == SAID[order]
        assert wrong.text.splitlines()[0].endswith(f": {SAID[order]}")


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_may_read_the_sum_before_it_is_rounded(order):
    variant = Variant.get("standard").replace(residual_rounding="after")
    after = kernel(order, reads="after")
    assert check_all_reduce(after, order, variant).passed
    wrong = check_all_reduce(after, order=order)
    assert wrong.run.message == f"{SAID[order]}, and the norm reads h before its last rounding"
    assert not check_all_reduce(kernel(order), order, variant).passed


@pytest.mark.parametrize("wrong", ["a rank forgotten", "a residual of each rank"])
@pytest.mark.parametrize("sums_only_y", [False, True])
def test_a_wrong_sum_is_refused_in_every_dtype(wrong, sums_only_y):
    for dtype in ("float16", "bfloat16", "float32"):
        function = kernel("sum_rounded", sums_only_y=sums_only_y, wrong=wrong)
        report = check_all_reduce(function, "sum_rounded", dtypes=dtype)
        assert {record.case for record in report.run.failures} >= {"2 ranks, residual", "8 ranks, residual"}
        assert report.run.message.startswith("no order of roundings gives these results")


def test_pytorch_and_a_residual_that_must_be_there():
    torch = pytest.importorskip("torch")

    def norm(parts, weight, *, eps, residual):
        h = sum(part.float() for part in parts).to(residual.dtype) + residual
        return torch.nn.functional.rms_norm(h.float(), h.shape[-1:], weight.float(), eps).to(h.dtype), h

    report = check_all_reduce(norm, "sum_rounded")
    assert report.passed, report.text
    assert {record.case for record in report.run.records} == {f"{n} ranks, residual" for n in (2, 3, 8)}
    assert "is standard of a sum over ranks, sum_rounded" in report.text


def test_what_it_cannot_be_called_with_is_said():
    with pytest.raises(ValueError, match="order is 'twice', expected 'sum_rounded', 'each_rounded', "):
        check_all_reduce(kernel("truncated"), "twice")
    with pytest.raises(ValueError, match=r"expected a function f\(parts, scale, \*, eps\); write an adapter"):
        check_all_reduce(lambda parts, weight: parts[0], "truncated")
    report = check_all_reduce(lambda parts, weight, eps: None, "truncated", framework="numpy", dtypes="float32")
    assert report.run.failures[0].detail == "y is a NoneType, expected numpy.ndarray"


@pytest.mark.parametrize("order", ORDERS)
def test_the_golden_is_the_sum_of_fractions(order):
    from fractions import Fraction

    parts = np.random.default_rng(5).normal(size=(5, 40)).astype(np.float32) * 10.0 ** np.arange(-2, 3)[:, None]
    parts, residual = parts.astype(np.float16), np.linspace(-3, 3, 40).astype(np.float32)

    def nearest(exact, dtype, toward_zero=False):
        near = np.dtype(dtype).type(float(exact))
        neighbours = [np.nextafter(near, near.dtype.type(s * np.inf)) for s in (-1, 1)]
        within = [n for n in (near, *neighbours) if not toward_zero or abs(Fraction(float(n))) <= abs(exact)]
        return min(within, key=lambda n: (abs(Fraction(float(n)) - exact), n.view(f"u{n.itemsize}") % 2))

    for i, column in enumerate(parts.T):
        exact, r = [Fraction(float(part)) for part in column], Fraction(float(residual[i]))
        if order == "each_rounded":
            total = functools.reduce(lambda a, b: Fraction(float(nearest(a + b, np.float16))), exact)
        elif order == "rounded_once":
            total = sum(exact)
        else:
            total = Fraction(float(nearest(sum(exact), np.float16, toward_zero=order == "truncated")))
        assert all_reduced(parts, residual, order=order)[i] == nearest(total + r, np.float32)
        if order != "rounded_once":
            assert all_reduced(parts, order=order)[i] == total
    assert all_reduced(parts, residual, order=order).dtype == np.float32


def test_the_golden_refuses_what_does_not_fit():
    part = np.ones(3, np.float16)
    with pytest.raises(ValueError, match=r"all_reduced: parts is \[\], expected the part of one rank at least"):
        all_reduced([])
    with pytest.raises(ValueError, match=r"parts\[1\] has shape \(2,\), expected \(3,\) to match the first part"):
        all_reduced([part, part[:2]])
    with pytest.raises(TypeError, match=r"parts\[1\] has dtype float32, expected float16"):
        all_reduced([part, part.astype(np.float32)])
    with pytest.raises(TypeError, match=r"residual has dtype int64, expected float16"):
        all_reduced([part], np.ones(3, np.int64))
    with pytest.raises(ValueError, match=r"order is 'none', expected 'sum_rounded'"):
        all_reduced([part], order="none")


def test_a_sharded_norm_is_the_norm_of_the_whole():
    """Rows of 192 features on two ranks with 96 each: sums of squares and groups of 64 are those of the whole row."""
    random = np.random.default_rng(6)
    x, dy = random.normal(size=(2, 8, 192))
    gain = random.normal(size=192)
    shards = np.split(np.arange(192), 2)
    whole = rms_norm(x, gain, eps=1e-3)
    total = sum(np.sum(x[:, shard] ** 2, axis=1, keepdims=True) for shard in shards)
    for shard in shards:
        y = x[:, shard] / np.sqrt(total / 192 + 1e-3) * gain[shard]
        np.testing.assert_allclose(y, whole[:, shard], rtol=1e-13)  # roundings of about 192 float64 operations
        assert not np.allclose(rms_norm(x[:, shard], gain[shard], eps=1e-3), whole[:, shard], rtol=1e-3)

    groups = rms_norm(x.reshape(8, 3, 64), gain.reshape(3, 64), feature_axis=(-2, -1), eps=1e-3).reshape(8, 192)
    squares = np.zeros((8, 3))
    for shard in shards:  # the second group has 32 features on each rank
        np.add.at(squares, (slice(None), shard // 64), x[:, shard] ** 2)
    y = x / np.sqrt(squares / 64 + 1e-3)[:, np.arange(192) // 64] * gain
    np.testing.assert_allclose(y, groups, rtol=1e-13)

    gradient = rms_norm_vjp(dy, x, gain, eps=1e-3)[1]
    of_ranks = [rms_norm_vjp(dy[rows], x[rows], gain, eps=1e-3)[1] for rows in (slice(0, 3), slice(3, 8))]
    np.testing.assert_allclose(sum(of_ranks), gradient, rtol=1e-13, atol=1e-13)  # which of terms of size 1 may cancel
