"""Tensors whose numbers are not in memory as they are; and results on the device of x with any default device."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from rmsnorm import numpy_impl as golden  # noqa: E402
from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402

X = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
GAIN = np.random.default_rng(1).normal(size=8).astype("float32")
DY = np.random.default_rng(2).normal(size=(3, 8)).astype("float32")


def negative_view(array):
    return torch._neg_view(torch.from_numpy(-array))


def imaginary_part_of_a_conjugate(array):
    return torch.complex(torch.zeros(array.shape), torch.from_numpy(-array)).conj().imag


def inference(array):
    with torch.inference_mode():
        return torch.from_numpy(array) + 0


def strided(array):
    return torch.from_numpy(np.repeat(array, 2, axis=-1))[..., ::2]


STORED = [negative_view, imaginary_part_of_a_conjugate, inference, strided]


@pytest.mark.parametrize("part", ["x", "gain", "dy", "residual", "dh"])
@pytest.mark.parametrize("stored", STORED, ids=lambda function: function.__name__)
def test_however_the_numbers_are_stored(stored, part):
    """y and every gradient are the golden's, by autograd and by the formula."""
    arrays = {"x": X, "gain": GAIN, "dy": DY, "residual": X[::-1].copy(), "dh": DY[::-1].copy()}
    tensors = {name: stored(array) if name == part else torch.from_numpy(array) for name, array in arrays.items()}
    x, gain, dy, residual, dh = tensors.values()
    want_y, want_h = golden.rms_norm(X, GAIN, variant="llama", residual=arrays["residual"])
    want = golden.rms_norm_vjp((DY, arrays["dh"]), X, GAIN, variant="llama", residual=arrays["residual"])
    y, h = rms_norm(x, gain, variant="llama", residual=residual)
    assert np.array_equal(y.numpy(), want_y)
    assert np.array_equal(h.numpy(), want_h)
    for gradient, expected in zip(
        rms_norm_vjp((dy, dh), x, gain, variant="llama", residual=residual), want, strict=True
    ):
        assert expected is None or np.array_equal(gradient.numpy(), expected)
    if stored is inference:
        return  # PyTorch does not save inference tensors for a backward pass
    leaves = [tensor.detach().requires_grad_() for tensor in (x, gain, residual)]
    outputs = rms_norm(leaves[0], leaves[1], variant="llama", residual=leaves[2])
    dx, dgain, dresidual = torch.autograd.grad(outputs, leaves, (dy, dh))
    for gradient, expected in zip((dx, dgain, dresidual), (want[0], want[1], want[3]), strict=True):
        assert np.array_equal(gradient.resolve_neg().numpy(), expected)


def test_a_gradient_of_zeros_that_are_not_stored():
    x, gain = torch.from_numpy(X).requires_grad_(), torch.from_numpy(GAIN).requires_grad_()
    zeros = torch._efficientzerotensor(X.shape)
    for gradient in torch.autograd.grad(rms_norm(x, gain), (x, gain), zeros):
        assert not gradient.any()
    for gradient in rms_norm_vjp(zeros, x.detach(), gain.detach())[:2]:
        assert not gradient.any()


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("device", [default_device, torch.device], ids=["set_default_device", "with"])
@pytest.mark.parametrize("rows", [3, 2**16], ids=["small", "large"])
@pytest.mark.parametrize("axis", [-1, 0], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_where_x_is(device, rows, axis, dtype):
    """With meta as the default device: an allocation there has no memory to write to."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    gain = torch.linspace(0.5, 2, x.shape[axis], dtype=dtype)
    options = {"variant": "x_transformers", "axis": axis}

    def results():
        leaves = [tensor.clone().requires_grad_() for tensor in (x, gain, x)]
        y, h, inverse_rms = rms_norm(*leaves[:2], residual=leaves[2], return_inverse_rms=True, **options)
        gradients = torch.autograd.grad((y, h), leaves, (x, x))
        return [y, h, inverse_rms, *gradients, *rms_norm_vjp(x, x, gain, **options)[:2]]

    want = results()
    with device("meta"):
        got = results()
    for tensor, expected in zip(got, want, strict=True):
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, expected)


def test_a_layer_on_the_cpu_with_another_default_device():
    layer, x = RMSNorm(8), torch.from_numpy(X)
    want = layer(x)
    with torch.device("meta"):
        assert torch.equal(layer(x), want)
        assert layer.to("meta")(x.to("meta")).device.type == "meta"
