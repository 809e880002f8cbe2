"""A call is checked and planned once for equal shapes, dtypes and options, whichever library the arrays are of."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from rmsnorm import cpu
from rmsnorm.cpu.prepared import _prepared, prepare
from rmsnorm.cpu.rows import axes_last, mask_steps, moved, moved_back, order_of

X, G = np.ones((4, 6), "float32"), np.ones(6, "float32")


def options(axis: Any = -1, feature_axis: Any = None, partial: Any = None) -> Any:
    return "llama", None, partial, axis, feature_axis, None


def test_an_equal_call_is_prepared_once() -> None:
    first = prepare("rms_norm", options(), X, G)
    before = _prepared.cache_info().misses
    assert prepare("rms_norm", options(), X.copy(), G.copy()) is first
    assert _prepared.cache_info().misses == before
    assert prepare("rms_norm", options(), X, G.astype("float64")) is not first
    plan, reason = first.in_memory()
    assert (plan is None) is (reason is not None) is not cpu.is_available()
    assert first.in_memory()[0] is plan


def test_what_is_equal_to_python_is_no_equal_option() -> None:
    assert prepare("rms_norm", options(1), X, G).call.axes == (1,)
    for axis in (True, 1.0):
        with pytest.raises(TypeError, match="axis"):
            prepare("rms_norm", options(axis), X, G)


def test_an_option_that_no_cache_can_look_up() -> None:
    assert prepare("rms_norm", options([0, 1]), X, np.ones((4, 6))).call == prepare(
        "rms_norm", options((0, 1)), X, np.ones((4, 6))
    ).call  # fmt: skip
    with pytest.raises(ValueError, match="scale has shape"):
        prepare("rms_norm", options([0, 1]), X, G)


def test_every_order_of_axes_is_one_that_kernels_take_or_the_order_of_x() -> None:
    shape = (2, 3, 4, 5)
    every = [axes for count in (1, 2, 3) for axes in itertools.combinations(range(4), count)]
    count = 0
    for axes, features, partial in itertools.product(every, every, (None, 0.5)):
        x, scale = np.ones(shape, "float32"), np.ones([shape[i] for i in features])
        prepared = prepare("rms_norm", options(axes, features, partial), x, scale)
        call, order = prepared.call, order_of(prepared.call)
        assert prepared.order == order
        if order is None:
            assert prepared.rows is call
            continue
        count += 1
        rows = axes_last(call)
        assert sorted(order) == list(range(4))
        assert rows.shape == tuple(shape[axis] for axis in order)
        (there,) = moved(order, np.transpose, x)
        assert there.shape == rows.shape
        assert moved_back(order, np.transpose, there, None)[0].shape == shape
        # the parameters keep their order, and neither a part of a row nor a parameter is torn apart
        assert [order[axis] for axis in rows.feature_axes] == list(call.feature_axes)
        assert {order[axis] for axis in rows.axes} == set(call.axes)
        assert rows.has_neighbours
        assert partial is None or set(call.axes) <= set(call.feature_axes)
    assert count > 50


def test_the_steps_through_a_mask_reach_the_elements_of_a_broadcast() -> None:
    shape, forms = (2, 3, 4), set()
    for sizes in itertools.product(*((1, size) for size in shape)):
        for mask_shape, first in itertools.product((sizes, sizes[1:], sizes[2:], ()), range(3)):
            mask = np.arange(np.prod(mask_shape)).reshape(mask_shape)
            stored, row_step, step = mask_steps(mask_shape, shape, first)
            n = int(np.prod(shape[first:]))
            flat = np.broadcast_to(mask, stored).reshape(-1)
            got = [[flat[row * row_step + i * step] for i in range(n)] for row in range(24 // n)]
            assert np.array_equal(got, np.broadcast_to(mask, shape).reshape(-1, n))
            forms.add((min(row_step, 1), step))
    assert forms == {(0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("framework", ["torch", "tf", "flax"])
def test_an_eager_call_without_kernels_warns_once(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every framework that has the kernels; calls that no kernel could compute say nothing."""
    package = {"torch": "torch", "tf": "tensorflow", "flax": "jax"}[framework]
    arrays = import_module(pytest.importorskip(package).__name__ + (".numpy" if package == "jax" else ""))
    make = arrays.constant if package == "tensorflow" else arrays.asarray
    rms_norm = import_module(f"rmsnorm.{framework}_impl").rms_norm
    x, g = make(np.ones((5, 7), "float32")), make(np.ones(7, "float32"))
    caches = cpu._warn, _prepared
    monkeypatch.setattr(cpu, "is_switched_off", lambda: False)
    monkeypatch.setattr(cpu, "what_is_missing", lambda: "there are none today")
    try:
        for cache in caches:
            cache.cache_clear()
        rms_norm(make(np.ones((0, 7), "float32")), g)
        with pytest.warns(UserWarning, match="rmsnorm: using slower code with the same results, as there are none to"):
            rms_norm(x, g)
        rms_norm(x, g)  # warnings are errors
        rms_norm(make(np.ones((3, 7), "float32")), g, variant="llama")
    finally:
        for cache in caches:
            cache.cache_clear()
