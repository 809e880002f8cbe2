"""The Pallas kernels against the golden, interpreted, and what they become for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax import numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

from rmsnorm import numpy_impl  # noqa: E402
from rmsnorm.accuracy.ulps import ulps  # noqa: E402
from rmsnorm.flax_impl import gpu, rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.gpu import plan  # noqa: E402
from rmsnorm.parity.cases import CASES, make  # noqa: E402

KIT = [  # case, variant, dtype; every rounding point, place of eps and format
    ("rows", "llama", "bfloat16"),
    ("rows", "gemma", "float16"),
    ("bias", "llama", "float16"),
    ("residual", "gemma", "bfloat16"),
    ("partial 0.3", "x_transformers", "float32"),
    ("eps 0.1", "zhang_torch", "bfloat16"),
    ("zero rows", "zhang_torch", "float32"),
    ("non-finite", "llama", "float32"),
    ("width 1", "standard", "bfloat16"),
    ("gain f32", "t5", "bfloat16"),
    ("out bf16", "apex", "float32"),
]
# The widest row that a program has in registers, and the rows of a tile: the division of rows of 80 elements.
BRANCHES = {"many": (2**13, 4), "one": (2**13, 1), "split": (64, 4)}
CUDA = "__gpu$xla.gpu.triton"
ROOT = Path(__file__).parents[2]
TRITON = Path(sys.prefix, "triton")  # where the Makefile installs it


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The passes that the kernels computed, on the CPU."""
    passes: list[str] = []
    for name in ("forward", "backward"):
        own = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda *args, own=own, name=name: (passes.append(name), own(*args))[1])
    monkeypatch.setenv("RMSNORM_GPU_KERNELS", "interpret")
    jax.clear_caches()
    yield passes
    jax.clear_caches()


def both(*arrays: Any, **options: Any) -> list[Any]:
    """y and, by automatic differentiation, its gradients."""
    *primals, dy = arrays

    @jax.jit
    def compute(*arrays: Any) -> Any:
        y, pull = jax.vjp(partial(rms_norm, **options), *arrays)
        return y, *pull(dy)

    return [np.asarray(x) for x in compute(*primals) if x is not None]


def assert_near(got: Any, want: Any) -> None:
    """The golden's bits in 16 bits, but for the sign of NaN; nearly all of them and else the next number in 32."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = np.dtype(f"u{got.dtype.itemsize}")
    same = (got.view(bits) == want.view(bits)) | (np.isnan(got) & np.isnan(want))
    if got.dtype == np.float32:
        assert ulps(got, want)[~same].max(initial=0) <= 1
    assert (~same).sum() <= (got.size // 10**5 if got.dtype == np.float32 else 0)


@pytest.mark.parametrize(("name", "variant", "dtype"), KIT)
def test_bits_of_the_golden(name: str, variant: str, dtype: str, used: list[str]) -> None:
    data = make(next(case for case in CASES if case.name == name), variant, dtype)
    arrays, options = (data.x, data.scale, data.bias), {"variant": data.variant, "out_dtype": data.out_dtype}
    if data.residual is None:
        got, want = both(*arrays, data.dy, **options), [numpy_impl.rms_norm(*arrays, **options)]
        gradients = numpy_impl.rms_norm_vjp(data.dy, *arrays, **options)
    else:  # automatic differentiation would round the gradient before it adds dh
        options["residual"] = data.residual
        own = jax.jit(partial(rms_norm_vjp, **options))
        got = [*rms_norm(*arrays, **options), *own((data.dy, data.dh), *arrays)]
        want = list(numpy_impl.rms_norm(*arrays, **options))
        gradients = numpy_impl.rms_norm_vjp((data.dy, data.dh), *arrays, **options)
    want += [gradient for gradient in gradients if gradient is not None]
    for one, other in zip((np.asarray(x) for x in got if x is not None), want, strict=True):
        assert_near(one, other)
    assert used == ["forward", "backward"]


@pytest.mark.parametrize("branch", BRANCHES)
def test_every_division_of_rows(branch: str, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    widest, most_rows = BRANCHES[branch]
    few = {kind: limits._replace(widest=widest, chunk=32) for kind, limits in plan._LIMITS.items()}
    for name, value in {"_LIMITS": few, "_MOST_ROWS": most_rows, "_ALL_AT_ONCE": 2, "_TILES_EACH": 3}.items():
        monkeypatch.setattr(plan, name, value)
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 21, 80), np.float32)  # the last tile is not whole
    x[3] = dy[3]  # a row of dx that cancels
    x[4, 70], x[5] = 1e30, 0
    scale, bias = random.standard_normal((2, 80), np.float32)
    y, *gradients = both(x, scale, bias, dy)
    dx, dscale, dbias = rms_norm_vjp(dy, x, scale, bias)
    assert used == ["forward", "backward", "backward"]
    assert_near(y, numpy_impl.rms_norm(x, scale, bias))
    for own, again, want in zip(
        gradients, (dx, dscale, dbias), numpy_impl.rms_norm_vjp(dy, x, scale, bias), strict=True
    ):
        assert_near(own, want)
        assert_near(np.asarray(again), want)


def test_most_of_float32_is_as_the_golden(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not without the errors of products: this test would see it."""
    random = np.random.default_rng(1)
    x, scale = random.standard_normal((64, 2048), np.float32), random.standard_normal(2048, np.float32)
    want = numpy_impl.rms_norm(x, scale)
    assert_near(np.asarray(rms_norm(x, scale)), want)
    from rmsnorm.gpu.pallas_pairs import Machine

    monkeypatch.setattr(Machine, "excess", lambda self, a, b, c: jnp.zeros_like(c))
    jax.clear_caches()
    with pytest.raises(AssertionError):
        assert_near(np.asarray(rms_norm(x, scale)), want)


needs_no_gpu = pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="JAX compiles for GPUs only where one is")


def lowered(function: Any, *arrays: Any) -> Any:
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


def gradient(x: Any, scale: Any, variant: str = "standard", **options: Any) -> Any:
    y, pull = jax.vjp(lambda x, scale: rms_norm(x, scale, variant=variant, **options), x, scale)
    return y, pull(jnp.ones_like(y))


@needs_no_gpu
def test_programs_for_a_gpu_call_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()
    x, scale = jnp.ones((4, 96), jnp.bfloat16), jnp.ones(96)
    program = lowered(gradient, x, scale).as_text()
    assert program.count(CUDA) == 3  # forward, backward, and the sum of the gain's gradient over programs:
    assert "stablehlo.reduce" not in program  # XLA adds up nothing, in an order that may depend on the card
    wide = lowered(gradient, jnp.ones((2, 2**17)), jnp.ones(2**17)).as_text()
    assert wide.count(CUDA) == 5  # and both passes add up first
    formula = lowered(lambda x, scale: rms_norm_vjp(x, x, scale)[0], x, scale)
    assert formula.as_text().count(CUDA) == 3  # 1 / rho again
    mesh, along, whole = Mesh(np.array(jax.devices()[:1]), ("rows",)), PartitionSpec("rows"), PartitionSpec()
    shared = jax.shard_map(gradient, mesh=mesh, in_specs=(along, whole), out_specs=(along, (along, whole)))
    assert lowered(shared, x, scale).as_text().count(CUDA) == 3
    several = lowered(jax.checkpoint(jax.vmap(gradient, (0, None))), x[None], scale).as_text()
    assert several.count(CUDA) == 1  # forward; each part has a gradient of the gain of its own
    assert CUDA not in jax.jit(gradient).lower(x, scale).as_text()  # for this machine
    for options in ({"mask": jnp.ones((4, 96), bool)}, {"variant": "keras_rms_scaling"}):
        assert CUDA not in lowered(partial(gradient, **options), x, scale).as_text()
    exported = jax.export.export(jax.jit(gradient), platforms=["cuda", "cpu"])(x, scale)
    assert CUDA not in exported.mlir_module()  # which may run with another version of XLA
    monkeypatch.setenv("RMSNORM_GPU_KERNELS", "0")
    gpu._is_usable.cache_clear()
    jax.clear_caches()
    assert CUDA not in lowered(gradient, x, scale).as_text()
    gpu._is_usable.cache_clear()


def test_an_old_gpu_has_plain_operations_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu._is_usable.cache_clear()
    monkeypatch.setattr(gpu, "_gpus", lambda: [type("Device", (), {"compute_capability": "7.5"})])
    with pytest.warns(UserWarning, match="capability of a GPU is 7.5, and the kernels need 8.0"):
        assert not gpu._is_usable()
    gpu._is_usable.cache_clear()


def test_where_jax_does_not_compile_for_the_gpu_operations_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs that Pallas does not know, or without its compiler, which JAX 0.12 says will be removed."""
    x, scale = jnp.ones((4, 96), jnp.bfloat16), jnp.ones(96)

    def compile_nothing() -> None:
        raise RuntimeError("No supported GPU devices found\nand more")

    monkeypatch.setattr(gpu, "_compile_nothing", compile_nothing)
    gpu._is_usable.cache_clear()
    jax.clear_caches()
    with pytest.warns(UserWarning, match=r"JAX does not compile kernels for it: No supported GPU devices found$"):
        program = lowered(gradient, x, scale).as_text()
    assert CUDA not in program
    gpu._is_usable.cache_clear()


@needs_no_gpu
@pytest.mark.skipif(not (TRITON.is_dir() or find_spec("triton")), reason="Triton is not installed")
def test_machine_code() -> None:
    """In a process of its own: Triton aborts after TensorFlow."""
    path = os.pathsep.join([str(TRITON), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/pallas_machine_code.py"]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "1 passed" in done.stdout
