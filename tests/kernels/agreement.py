"""What tests of the kernels for CPUs share: a call whose results are all compared with the golden's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.engines import prepare
from rmsnorm.numpy_impl import fast
from rmsnorm.specification import dtypes

ROUNDED = ("float16", "bfloat16", "float32")
OF_DTYPES = pytest.mark.parametrize("dtype", ROUNDED)
OF_HALF = pytest.mark.parametrize("dtype", dtypes.HALF)
OF_BOTH = pytest.mark.parametrize("variant", ["standard", "llama"])  # y rounded once, and before the gain, too


@pytest.fixture
def with_golden(monkeypatch: pytest.MonkeyPatch, by_kernels: None) -> None:
    """For calls that no kernel computes."""
    monkeypatch.setattr(fast, "golden", golden.functional)


class _NumPyOfNaN:
    """NumPy whose new arrays are NaN, or negative integers: an element that a kernel does not write shows."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def empty(shape: Any, dtype: Any = float) -> Any:
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)
        return array


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that uses the golden in place of a kernel fails. The tests themselves import the golden elsewhere."""
    monkeypatch.setattr(fast, "golden", None)
    monkeypatch.setattr(fast, "np", _NumPyOfNaN())


def check_same(got: Any, want: Any, doubtful: int = 0) -> None:
    """The same dtype, shape and numbers, NaN where NaN. Zeros may differ in sign, which the golden's sums lose.

    So many elements may be doubtful: their exact value is within about 2^-52 of the middle between two float32.
    """
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    apart = ulps(got, want)
    assert apart.max(initial=0) <= (1 if doubtful else 0)
    assert (apart != 0).sum() <= doubtful


def check_call(
    x: Any, scale: Any = None, bias: Any = None, *, dy: Any = None, dh: Any = None, forward: bool = True,
    doubtful: int = 0, wanted: tuple[str, ...] = ("dx", "dscale", "dbias", "dresidual"), **options: Any,
) -> list[Any]:  # fmt: skip
    """Every result of a call, forward and for an upstream dy backward, is the golden's; returns the kernels'."""
    got, want = [], []
    with np.errstate(all="ignore"):
        for results, own in ((got, fast), (want, golden)):
            if forward:
                results += own.rms_norm(x, scale, bias, return_inverse_rms=True, **options)
            if dy is not None:
                up = dy.astype(prepare_dtype(x, scale, bias, **options))
                gradients = own.rms_norm_vjp(up if dh is None else (up, dh), x, scale, bias, **options)
                names = ("dx", "dscale", "dbias", "dresidual")
                results += [g for name, g in zip(names, gradients, strict=False) if name in wanted]
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            check_same(g, w, doubtful if w.dtype == np.float32 else 0)
    return got


def prepare_dtype(x: Any, scale: Any, bias: Any, *, variant: Any = "standard", **options: Any) -> str:
    """The dtype of y."""
    given = (variant, None, None, options.get("axis", -1), options.get("feature_axis"), None)
    return prepare("test", given, x, scale, bias).call.result_dtype
