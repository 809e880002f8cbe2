"""The PyTorch functions against the golden: values, gradients and tangents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit import hold
from options import ENDS, hard_to_round

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl.double_double import DoubleDouble
from rmsnorm.parity.cases import Data, select
from rmsnorm.parity.judge import Outcome
from rmsnorm.specification import dtypes

torch = pytest.importorskip("torch")
from torch_arrays import to_numpy, to_torch  # noqa: E402

from rmsnorm.torch_impl import rms_norm  # noqa: E402
from rmsnorm.torch_impl.rounding import cast, straight_through  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own


INPUTS = ("x", "scale", "bias", "residual", "gate")


def by_transforms(data: Data) -> Outcome:
    """y and its derivatives by torch.func, which differentiates the plain operations."""
    # forward mode of torch.func takes no expanded tensor, whatever the function
    inputs = {name: to_torch(getattr(data, name)).contiguous() for name in INPUTS if getattr(data, name) is not None}
    directions = dict(zip(INPUTS, data.tangents, strict=False))
    options = {**data.options, "mask": to_torch(data.mask), "return_inverse_rms": True}

    def function(*values: Any) -> Any:
        *outputs, inverse_rms = rms_norm(**dict(zip(inputs, values, strict=True)), **options)
        return tuple(outputs), inverse_rms

    tangents = tuple(
        torch.zeros_like(value) if directions.get(name) is None else to_torch(directions[name])
        for name, value in inputs.items()
    )
    outputs, pull_back, inverse_rms = torch.func.vjp(function, *inputs.values(), has_aux=True)
    gradients = pull_back(tuple(to_torch(v) for v in (data.dy, data.dh) if v is not None))
    with torch.no_grad():  # which must not hide the mask from a forward derivative
        jvp = torch.func.jvp(lambda *values: function(*values)[0][0], tuple(inputs.values()), tangents)[1]
    results = {"y": outputs[0], "inverse_rms": inverse_rms, "jvp": jvp}
    results |= {f"d{name}": gradient for name, gradient in zip(inputs, gradients, strict=True)}
    return Outcome({name: [to_numpy(value)] for name, value in results.items()})


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_what_transforms_derive_is_the_goldens(dtype: str) -> None:
    hold("torch.func", by_transforms, select(types=(dtype,), brief=True))


def test_one_rounding_to_16_bits() -> None:
    for dtype in dtypes.HALF:
        values = torch.from_numpy(hard_to_round(dtype))
        with np.errstate(all="ignore"):
            want = DoubleDouble(values.numpy()).round(dtype)
        got = cast(values, dtype)
        assert ulps(to_numpy(got), want).max() == 0
        assert ulps(to_numpy(values.to(getattr(torch, dtype))), want).max() > 0  # the values can tell
        assert (got.signbit() == torch.from_numpy(np.signbit(want)))[~got.isnan()].all()

        def through(x: Any, dtype: str = dtype) -> Any:
            return straight_through(cast(x, dtype).double(), x)

        for function in (lambda x, dtype=dtype: cast(x, dtype), through):
            value, tangent = torch.func.jvp(function, (values,), (torch.full_like(values, 0.5),))
            assert torch.equal(value.double().nan_to_num(7), got.double().nan_to_num(7))
            assert (value.signbit() == got.signbit())[~got.isnan()].all()
            assert (tangent[: -len(ENDS)] == 0.5).all()
        fine = torch.full_like(values, 1 + 2.0**-40)
        assert torch.equal(torch.func.vjp(through, values)[1](fine)[0][: -len(ENDS)], fine[: -len(ENDS)])
