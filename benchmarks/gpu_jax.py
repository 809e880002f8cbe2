"""JAX on a GPU of Nvidia: parity with the golden, and times of the Triton kernels beside plain operations and Flax.

    python benchmarks/gpu_jax.py

Needs a GPU, Triton, and jax with its plugin for CUDA; Flax if it is installed. It takes about a minute, and no part
stops another one: an error is printed. A time is that of one of 20 calls of a compiled function, waited for once;
the median of five such series. The calls read the same input again.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

import rmsnorm.gpu

HAS_TRITON = rmsnorm.gpu.has_triton()  # before anything that may import TensorFlow

import jax  # noqa: E402
from jax import numpy as jnp  # noqa: E402

from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.flax_impl import gpu as kernels  # noqa: E402
from rmsnorm.flax_impl import private, rms_norm  # noqa: E402

PARITY = ((512, 4096), (33, 768))
OTHERS = ((8, 40000),)  # a row that is split takes Triton longest to compile
TIMES = ((4096, 4096), (16384, 8192))
CALLS, SERIES = 20, 5
WHY_NOT = kernels.why_not


def switch(is_on: bool) -> None:
    """The kernels on or off, for programs that are compiled after this."""
    kernels.why_not = WHY_NOT if is_on else lambda *_: "they are switched off"
    jax.clear_caches()


def older_call_of(types: list[Any], text: bytes) -> Callable[..., Any]:
    config: Any = text
    return jax.ffi.ffi_call("triton_kernel_call", types, custom_call_api_version=2, legacy_backend_config=config)


def formula(x: Any, scale: Any) -> Any:
    """As Flax writes it, with eps 1e-6."""
    wide = x.astype(jnp.float32)
    y = wide * (jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale.astype(jnp.float32))
    return y.astype(x.dtype)


def of_flax() -> Callable[..., Any]:
    try:
        from flax import nnx
    except ImportError:
        return formula

    def norm(x: Any, scale: Any) -> Any:
        layer = nnx.RMSNorm(x.shape[-1], dtype=x.dtype, param_dtype=x.dtype, rngs=nnx.Rngs(0))
        layer.scale[...] = scale
        return layer(x)

    return norm


def both(norm: Callable[..., Any]) -> Callable[..., Any]:
    """y, and the gradients of x and the gain."""

    def run(x: Any, scale: Any, dy: Any) -> Any:
        y, pull = jax.vjp(norm, x, scale)
        return y, *pull(dy)

    return run


def inputs(rows: int, n: int, dtype: str) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, ((rows, n), (n,), (rows, n)), strict=True)]


def parity(rows: int, n: int, dtype: str) -> str:
    x, scale, dy = inputs(rows, n, dtype)
    program = jax.jit(both(rms_norm)).lower(x, scale, dy)
    count = program.as_text().count("custom_call @triton_kernel_call")
    results = [np.asarray(result) for result in program.compile()(x, scale, dy)]
    x, scale, dy = map(np.asarray, (x, scale, dy))
    wanted = [golden.rms_norm(x, scale), *golden.rms_norm_vjp(dy, x, scale)[:2]]
    pairs = zip(results, wanted, strict=True)
    y, dx, dscale = (f"{np.count_nonzero(one != other)} of {one.size} ({one.dtype})" for one, other in pairs)
    return f"{count} kernels; different y: {y}, dx: {dx}, dscale: {dscale}"


def seconds(function: Callable[..., Any], arrays: list[Any]) -> float:
    compiled = jax.jit(function).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    taken = []
    for _ in range(SERIES):
        began = time.perf_counter()
        for _ in range(CALLS):
            result = compiled(*arrays)
        jax.block_until_ready(result)
        taken.append((time.perf_counter() - began) / CALLS)
    return statistics.median(taken)


def row(rows: int, n: int, dtype: str, name: str, norm: Callable[..., Any]) -> str:
    arrays = inputs(rows, n, dtype)
    return f"{1e3 * seconds(norm, arrays[:2]):11.3f} {1e3 * seconds(both(norm), arrays):20.3f}   {name}"


def part(title: str, function: Callable[..., str], *arguments: Any) -> bool:
    """Whether it ended without an error."""
    try:
        print(f"{title:24}", function(*arguments), flush=True)
        return True
    except Exception as error:  # each part is to tell what it can
        print(f"{title:24} failed: {type(error).__name__}: {str(error)[:1500]}", flush=True)
        print("".join(traceback.format_tb(error.__traceback__)[-3:]), flush=True)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=55, help="after which no other part begins [55]")
    limit = parser.parse_args().seconds
    faulthandler.dump_traceback_later(limit + 30, exit=True)  # a call of the driver that never returns
    limit += time.perf_counter()
    print("jax", jax.__version__, jax.devices(), "capability", kernels.capability(), "triton", HAS_TRITON, flush=True)
    print("jaxlib calls Triton kernels:", private.triton_calls() is not None, flush=True)
    part("explain", lambda: rmsnorm.explain(jnp.ones((4, 64), jnp.bfloat16)))
    cases = [(*shape, dtype) for shape in PARITY for dtype in ("bfloat16", "float32")]
    if not part("2x5 float32", parity, 2, 5, "float32"):
        print("from here on by jaxlib's older target, triton_kernel_call")
        kernels.call_of = older_call_of
        jax.clear_caches()
    for case in cases:
        part("{}x{} {}".format(*case), parity, *case)
    flax = of_flax()
    print(f"{'milliseconds':24} {'forward':>11} {'forward and backward':>20}")
    other = "formula in float32" if flax is formula else "flax.nnx.RMSNorm"
    norms = ("kernels", rms_norm, True), ("plain operations", rms_norm, False), (other, flax, True)
    cases = [(*shape, dtype) for shape in TIMES for dtype in ("bfloat16", "float32")]
    for case, (name, norm, is_on) in product(cases, norms):
        if time.perf_counter() > limit:
            sys.exit("the time is over")
        switch(is_on)
        part("{}x{} {}".format(*case), row, *case, name, norm)
    switch(is_on=True)
    for rows, n in OTHERS:
        if time.perf_counter() < limit - 10:
            part(f"{rows}x{n} bfloat16", parity, rows, n, "bfloat16")


if __name__ == "__main__":
    main()
