"""The kernels of every level of processors that this one has give the same bits."""

from __future__ import annotations

import pytest
from programs import finished

from rmsnorm import cpu

if not cpu.is_available():
    pytest.skip("there are no kernels here", allow_module_level=True)
from rmsnorm.cpu import _native

BITS = """
import hashlib, itertools
import numpy as np
from rmsnorm.cpu import _native
from rmsnorm.numpy_impl import fast

random, digest = np.random.default_rng(0), hashlib.sha256()
for x_dtype, g_dtype in itertools.product(("float16", "bfloat16", "float32"), repeat=2):
    for n, variant in itertools.product((3, 77, 768), ("standard", "llama", "gemma")):
        x, dy, z = random.normal(size=(3, 9, n)) * 10.0 ** random.integers(-4, 4, (3, 9, 1))
        gain = random.normal(size=n).astype(g_dtype)
        x, dy, z = x.astype(x_dtype), dy.astype("float32"), z.astype(x_dtype)
        for options in ({}, {"partial": 0.5}, {"residual": z}):
            y = fast.rms_norm(x, gain, variant=variant, return_inverse_rms=True, **options)
            upstream = dy.astype(y[0].dtype)
            for array in (*y, *fast.rms_norm_vjp(upstream, x, gain, variant=variant, **options)):
                digest.update(b"" if array is None else array.tobytes())
print(_native.level(), digest.hexdigest())
"""


@pytest.mark.slow
def test_every_level_gives_the_same_bits() -> None:
    """y, h, 1 / rho, dx and dscale, in every pair of dtypes of x and the gain."""
    digests = {}
    for name in ("v3", "v4", "v4-bf16", "arm64"):
        done = finished("-W", "ignore", "-c", BITS, timeout=200, RMSNORM_CPU_LEVEL=name)
        if done.returncode == 0 and done.stdout.split()[0] == name.replace("-", "_"):
            digests[name] = done.stdout.split()[1]
    assert digests
    assert len(set(digests.values())) == 1, digests


def test_a_level_that_is_none_is_refused() -> None:
    done = finished(
        "-c", "from rmsnorm.specification import environment; environment.check()", timeout=60, RMSNORM_CPU_LEVEL="v5"
    )
    assert "RMSNORM_CPU_LEVEL is 'v5', expected v3, v4, v4-bf16 or arm64" in done.stderr
    done = finished("-c", "import rmsnorm.numpy_impl.fast", timeout=60, RMSNORM_CPU_LEVEL="v5")
    assert "ValueError" in done.stderr
    assert "RMSNORM_CPU_LEVEL is 'v5', expected v3, v4, v4-bf16 or arm64; change or unset it" in done.stderr


def test_a_level_that_the_processor_lacks_is_said() -> None:
    other = "v3" if _native.level() == "arm64" else "arm64"
    done = finished("-c", "import rmsnorm.numpy_impl.fast", timeout=60, RMSNORM_CPU_LEVEL=other)
    assert done.returncode == 0
    assert f"there are no kernels of level {other} for this processor" in done.stderr
    assert "or unset RMSNORM_CPU_LEVEL" in done.stderr
