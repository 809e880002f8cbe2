"""How the TensorFlow functions compute: eager calls by kernels and by the recipe, and rows of every magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from checks import check_near
from kit import BY_NAME, failures

from rmsnorm import cpu
from rmsnorm import numpy_impl as golden
from rmsnorm.parity.backends import open_backend

tf = pytest.importorskip("tensorflow")

from tf_arrays import to_tf  # noqa: E402
from tf_bounds import check_bounds  # noqa: E402
from tf_gradients import with_gradients  # noqa: E402

from rmsnorm.tf_impl import kernels, rms_norm  # noqa: E402

CALLS = {  # of the kit, and whether a kernel computes them
    "rows": ("float32", True), "gain bf16": ("float16", True), "gate": ("float32", True),
    "residual": ("bfloat16", True), "mask, partial": ("bfloat16", False), "middle axis": ("float16", False),
    "channels": ("float32", True),
}  # fmt: skip


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_and_recipe_are_the_golden(name: str, readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tape and without one, within the bounds of the kit; also on a device whose memory no kernel reads."""
    used = []
    kernel = kernels.forward
    monkeypatch.setattr(kernels, "forward", lambda *arguments: used.append(1) or kernel(*arguments))
    if not readable:
        monkeypatch.setattr(kernels, "are_readable", lambda *_: False)
    _, implementation = open_backend("tf", "cpu")
    case, (dtype, has_kernel) = BY_NAME[name], CALLS[name]
    failed, _ = failures(implementation, [(case, case.variants[-1], dtype)])
    assert not failed, "\n".join(failed)
    assert bool(used) == (has_kernel and readable and cpu.is_available())


@pytest.mark.skipif(not cpu.is_available(), reason="no kernels")
def test_a_residual_of_another_dtype() -> None:
    """The kernels take one dtype."""
    x, residual = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    y, h = rms_norm(to_tf(x.astype("bfloat16")), residual=to_tf(residual))
    wide = x.astype("bfloat16").astype(np.float32)
    np.testing.assert_array_equal(h, wide + residual)
    check_near(y.numpy(), golden.rms_norm(wide, residual=residual)[0], 2.0**-20 * np.abs(y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_magnitude_compiled(dtype: str) -> None:
    """Also if 1 / rho is below the normal numbers of float32, which XLA takes as 0; without an eps."""
    rng = np.random.default_rng(0)
    for magnitude in (1e15, 1e20, 1e38, 2e38, 1e-15, 1e-30, 1e-37):
        x = (rng.uniform(0.5, 1.5, (16, 64)) * magnitude).astype(dtype)
        dy = (rng.standard_normal(x.shape) * max(1, magnitude) ** 0.9).astype(dtype)
        scale = rng.standard_normal(64).astype(dtype)
        y, dx, dscale = tf.function(with_gradients, jit_compile=True)(*map(to_tf, (x, dy, scale)), eps=0.0)
        check_bounds({"y": y, "dx": dx, "dscale": dscale}, x, scale, dy=dy, variant="paper")
