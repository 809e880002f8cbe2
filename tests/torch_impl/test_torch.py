"""The PyTorch functions against the golden: values, gradients and tangents."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kit import hold
from options import make

import rmsnorm
from rmsnorm import dtypes
from rmsnorm import numpy_impl as golden
from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl.double_double import DoubleDouble
from rmsnorm.parity.cases import Data, select
from rmsnorm.parity.judge import Outcome

torch = pytest.importorskip("torch")
from torch_arrays import to_numpy, to_torch  # noqa: E402
from torch_checks import check_gradient  # noqa: E402
from torch_gradients import by_autograd, by_func, by_vjp  # noqa: E402

from rmsnorm.torch_impl import rms_norm, rms_norm_vjp  # noqa: E402
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
@pytest.mark.sample(2)
def test_what_transforms_derive_is_the_goldens(dtype: str) -> None:
    hold("torch.func", by_transforms, select(types=(dtype,), brief=True))


def test_half_gradients_are_rounded_once() -> None:
    rng = np.random.default_rng(0)
    for dtype in dtypes.HALF:
        x, dy = (rng.standard_normal((64, 512)).astype(dtype) for _ in range(2))
        scale, bias = (rng.standard_normal(512).astype(dtype) for _ in range(2))
        want = golden.rms_norm_vjp(dy, x, scale, bias, variant="llama")
        for gradients in (by_vjp, by_autograd):
            got = gradients(to_torch(dy), [*map(to_torch, (x, scale, bias))], {"variant": "llama"})
            assert all((ulps(to_numpy(g), w) == 0).all() for g, w in zip(got, want, strict=True))
        # torch.func casts through float32 where it accumulates: one element in 10^4 rounded twice
        for g, w in zip(
            by_func(to_torch(dy), [*map(to_torch, (x, scale, bias))], {"variant": "llama"}), want, strict=True
        ):
            apart = ulps(to_numpy(g), w)
            assert apart.max() <= 1
            assert (apart == 0).mean() >= 0.999


def test_residual_takes_both_gradients() -> None:
    x, scale, bias, options = make({"residual": "float32"}, "bfloat16", "float32", 0)
    dy, dh = (np.random.default_rng(s).standard_normal(x.shape).astype(np.float32) for s in (1, 2))
    want = golden.rms_norm_vjp((dy, dh), x, scale, bias, variant="llama", **options)
    leaves = [to_torch(value).requires_grad_() for value in (x, scale, bias, options["residual"])]
    y, h = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
    got = torch.autograd.grad((y, h), leaves, (to_torch(dy), to_torch(dh)))
    direct = rms_norm_vjp((to_torch(dy), to_torch(dh)), *leaves[:3], residual=leaves[3], variant="llama")
    for g, w in zip(direct, want, strict=True):
        assert ulps(to_numpy(g), w).max() <= 1
    terms = np.abs(golden.rms_norm_vjp(dy, x, scale, bias, variant="llama", **options)[0].astype(np.float64)) + np.abs(
        dh
    )
    for g, w, t in zip(got, want, (terms, 0.0, 0.0, terms), strict=True):
        check_gradient(g, w, t, 2**29)  # autograd rounds dx to float32, then its sum with dh
    assert h.dtype == torch.float32
    only = torch.autograd.grad(rms_norm(*leaves[:3], residual=leaves[3])[1].sum(), leaves[3])[0]
    assert torch.equal(only, torch.ones_like(only))


def test_nothing_under_the_mask_reaches_a_derivative() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, 4, 6), generator=generator)
    mask = torch.rand((3, 4, 6), generator=generator) > 0.4
    mask[1] = False
    for variant, eps, filler in itertools.product(rmsnorm.PRESETS, (None, 0.0), (float("nan"), float("inf"), 1e38)):
        spoilt = torch.where(mask, x, filler)
        options = {"variant": variant, "eps": eps, "mask": mask}
        for gradients in (by_vjp, by_autograd, by_func):
            clean, dirty = (
                gradients(torch.ones(3, 4, 6), [values, torch.ones(6), torch.ones(6)], options)
                for values in (x, spoilt)
            )
            for c, d in zip(clean, dirty, strict=True):  # NaN: the variance of one element is 0, as eps
                torch.testing.assert_close(c, d, rtol=0, atol=0, equal_nan=variant == "keras_rms_scaling" and eps == 0)
            assert (dirty[0][~mask] == 0).all()


def test_strides_and_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn((2, 3, 4, 5), generator=generator)
    layouts = {
        "channels last": dense.to(memory_format=torch.channels_last),
        "transposed": dense.transpose(1, 3).contiguous().transpose(1, 3),
        "strided": dense.repeat_interleave(2, -1)[..., ::2],
        "expanded": dense[:1].expand(2, 3, 4, 5),
        "offset": torch.cat([dense[:1], dense])[1:],
    }
    for name, x in layouts.items():
        for dtype, axis in itertools.product((torch.bfloat16, torch.float64), (-1, 1, (2, 3))):
            a = x.to(dtype) if name != "expanded" else dense[:1].to(dtype).expand(2, 3, 4, 5)
            before, version = a.clone(), a._version
            y = rms_norm(a, axis=axis, variant="llama")
            assert torch.equal(y, rms_norm(before.contiguous(), axis=axis, variant="llama"))
            assert torch.equal(a, before)
            assert a._version == version
            if name in ("channels last", "transposed"):
                assert y.stride() == a.stride()
    frozen = [dense.clone() for _ in range(3)]
    dy, x, residual = (array.requires_grad_() for array in frozen)
    rms_norm(x, residual=residual, mask=dense > 0)[0].backward(dy)
    assert all(torch.equal(array, dense) and array._version == 0 for array in frozen)


def test_one_rounding_to_16_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(20_000, dtype=torch.float64, generator=generator) * torch.logspace(
        -50, 40, 20_000, dtype=torch.float64
    )
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-60, -1e-60, 1e300, 65519.999999999, 65520.0, 3.3961775292304957e38]
    for dtype in dtypes.HALF:
        near = torch.randn(20_000, generator=generator).to(getattr(torch, dtype)).double()
        tie = near + dtypes.unit_roundoff(dtype) * 2.0 ** (near.frexp().exponent - 1)
        tie = tie * (1 + 1e-14 * torch.randn(20_000, dtype=torch.float64, generator=generator))
        values = torch.cat([wide, tie, torch.tensor(edges, dtype=torch.float64)])
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
            assert (tangent[: -len(edges)] == 0.5).all()
        fine = torch.full_like(values, 1 + 2.0**-40)
        assert torch.equal(torch.func.vjp(through, values)[1](fine)[0][: -len(edges)], fine[: -len(edges)])


def test_errors_name_the_tensor() -> None:
    x = torch.ones(4, 16)
    for arguments, error, words in (
        ((x.int(),), TypeError, "x has dtype int32, expected float16"),
        ((x.to(torch.complex64),), TypeError, "x has dtype complex64, expected float16"),
        ((x, torch.ones(16, dtype=torch.int64)), TypeError, "scale has dtype int64, expected float16"),
        (
            (x, torch.ones(8)),
            ValueError,
            r"scale has shape \(8,\), expected \(16,\) to match axis -1 of x f32\[4, 16\]",
        ),
        (([1.0],), TypeError, r"x is \[1.0\] \(list\), expected a torch.Tensor"),
        ((None,), TypeError, "x is None .* expected a torch.Tensor"),
        ((torch.tensor(1.0),), ValueError, "x is 0-d"),
    ):
        with pytest.raises(error, match=words):
            rms_norm(*arguments)
    with pytest.raises(TypeError, match="mask has dtype int64, expected bool"):
        rms_norm(x, mask=torch.ones(16, dtype=torch.int64))
    with pytest.raises(ValueError, match="out_dtype is 'int32', expected 'float16'"):
        rms_norm(x, out_dtype=torch.int32)
    with pytest.raises(TypeError, match=r"dy is \(tensor"):
        rms_norm_vjp((x, x), x)
