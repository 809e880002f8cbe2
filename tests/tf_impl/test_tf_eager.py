"""How the TensorFlow functions compute: eager calls in three ways, and compiled functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checks import check_near
from kit import BY_NAME, failures

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.parity.backends import open_backend
from rmsnorm.specification import dtypes

tf = pytest.importorskip("tensorflow")

from tf_arrays import to_tf  # noqa: E402
from tf_gradients import with_gradients  # noqa: E402

from rmsnorm.tf_impl import engines, graph, kernels, rms_norm  # noqa: E402

WAYS = ("kernels", "compiled", "operations")
CALLS = {  # of the kit
    "rows": "float64", "gain bf16": "float16", "mask, partial": "bfloat16", "mask, residual": "float32",
    "middle axis": "float16", "channels": "float32",
}  # fmt: skip


@pytest.fixture(params=WAYS)
def way(request: Any, monkeypatch: pytest.MonkeyPatch, forget: Any) -> str:
    """One of the ways, for tensors of every size. A call that it does not support goes to the next way."""
    if request.param == "kernels" and not cpu.is_available():
        pytest.skip("no kernels")
    if request.param != "kernels":
        monkeypatch.setattr(kernels, "are_readable", lambda *_: False)
    monkeypatch.setattr(engines, "_LARGE", 2**60 if request.param == "operations" else 1)
    forget(graph.compiled)
    return str(request.param)


@pytest.mark.parametrize("name", CALLS)
def test_every_way_is_the_golden(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tape and without one, within the bounds of the kit."""
    used = []
    kernel = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *arguments: used.append(1) or kernel(*arguments))
    _, implementation = open_backend("tf", "cpu")
    case = BY_NAME[name]
    failed, _ = failures(implementation, [(case, case.variants[-1], CALLS[name])])
    assert not failed, "\n".join(failed)
    assert bool(used) == (way == "kernels")
    assert bool(graph.compiled.cache_info().misses) == (way == "compiled" or (way == "kernels" and not used))


def test_one_trace_for_every_batch(monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    """One forward and one backward trace for all sizes of the axes that share parameters; others for another width."""
    monkeypatch.setattr(kernels, "are_readable", lambda *_: False)
    monkeypatch.setattr(engines, "_LARGE", 1)
    forget(graph.compiled)
    traced, traced_of = [], graph.compiled
    monkeypatch.setattr(graph, "compiled", lambda *arguments: traced.append(traced_of(*arguments)) or traced[-1])
    for batch in ((2, 3), (5, 3), (1, 7)):
        x = tf.random.stateless_normal((*batch, 40), (0, 1))
        with_gradients(x, x, tf.ones(40))
    assert len(traced) == 6
    assert [f.experimental_get_tracing_count() for f in traced] == [1] * 6
    assert traced_of.cache_info().misses == len({id(f) for f in traced}) == 2
    with_gradients(x[..., :30], x[..., :30], tf.ones(30))
    assert traced_of.cache_info().misses == 4


def written(function: Callable[..., Any], *tensors: Any) -> list[str]:
    """Formats of the arrays in the shape of x that XLA's program for the CPU writes: all but a single result."""
    text = tf.function(function, jit_compile=True).experimental_get_compiler_ir(*tensors)(stage="optimized_hlo")
    entry = text[text.index("\nENTRY") :].split("\n")[2:]
    size = ",".join(map(str, tensors[0].shape))
    return [match[1] for line in entry if (match := re.match(rf"\s*(?!ROOT)\S+ = (\w+)\[{size}\]", line))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_operand_of_a_sum_is_written_out(dtype: str) -> None:
    """The built-in's plain sums write three out. The two arguments and the two results alone are of the size of x."""
    x, scale = tf.ones((512, 1024), dtype), tf.ones(1024, dtype)
    short = dtypes.short(dtype)
    assert written(with_gradients, x, x, scale) == [short] * 4
    assert written(lambda x: rms_norm(x), x) == [short]
    plain = written(lambda x: tf.reduce_sum(tf.square(tf.cast(x, tf.float64)), -1), x)
    assert plain == [short, "f64"]  # the test can tell


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_magnitude_compiled(dtype: str) -> None:
    """Also if 1 / rho is below the normal numbers of float32, which XLA takes as 0."""
    rng = np.random.default_rng(0)
    for magnitude in (1e20, 1e38, 2e38, 1e-30, 1e-37):
        x = (rng.uniform(0.5, 1.5, (16, 64)) * magnitude).astype(dtype)
        dy = (rng.standard_normal(x.shape) * max(1, magnitude) ** 0.9).astype(dtype)
        scale = rng.standard_normal(64).astype(dtype)
        want = [golden.rms_norm(x, scale, eps=0.0), *golden.rms_norm_vjp(dy, x, scale, eps=0.0)[:2]]
        terms = term_sizes(x, scale, dy=dy, tangents=(dy, None, None), variant="paper")
        got = tf.function(with_gradients, jit_compile=True)(*map(to_tf, (x, dy, scale)), eps=0.0)
        for g, w, quantity in zip(got, want, ("y", "dx", "dscale"), strict=True):
            # 8 operations and two sums, between 16 bits in float32; TensorFlow's kernels take subnormal numbers as 0
            u = 2.0**-24 if dtype == "bfloat16" else 2.0**-53
            check_near(g.numpy(), w, (8 + 2 * 64) * u * terms[quantity], 2.0**-126)
