"""Calls of PyTorch's layer on a GPU made again, with what was kept of the first; run as gpu_kernels.py is."""

from __future__ import annotations

import pytest
import torch
from gpu_kernels import DEVICE, WIDTH, array, choose, new_plans, same_bits, used  # noqa: F401  (fixtures)

from rmsnorm.engines import prepare
from rmsnorm.torch_impl import RMSNorm, gpu, kernels, rms_norm, rms_norm_vjp

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of infinite numbers in the interpreter


def test_a_kernel_is_compiled_again_for_other_pointers():
    """What is compiled for pointers that 16 divides reads 16 bytes at once, which others do not allow."""
    numbers, scale = torch.randn(64 * 64 + 1, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)), None
    aligned, other = numbers[:-1].view(64, 64), numbers[1:].view(64, 64)
    known = kernels.kept_of(prepare("rms_norm", ("llama", None, None, -1, None, None), aligned), aligned)
    started = known.launch.started
    for x in (aligned, other) * 2:
        y = known.forward(False, x, None, scale, None)[0]
        assert same_bits(array(y), array(rms_norm(x.clone(), variant="llama"))).all()
    assert len(started) == 2


def kept(layer, x):
    """y of a call that the layer makes with what it kept of the one before."""
    settings = layer.eps, layer.variant, layer.normalized_shape
    assert any(then == settings and call.matches(x, None, layer.weight, layer.bias) for then, call in layer._kept)
    return layer(x)


@pytest.mark.parametrize(("branch", "variant", "dtype"), [
    ("many", "torch", "bfloat16"), ("split", "lasagne", "float32"), ("one", "gemma", "float16"),
])  # fmt: skip
def test_a_kept_call_has_the_bits_of_the_first(branch, variant, dtype, monkeypatch):
    choose(branch, monkeypatch)
    layer = RMSNorm(WIDTH, variant=variant, device=DEVICE, dtype=dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, dy = torch.randn(2, 20, WIDTH, device=DEVICE, dtype=layer.weight.dtype)
    x.requires_grad_()
    first, *gradients = [y := layer(x), *torch.autograd.grad(y, (x, *layer.parameters()), dy)]
    again, *others = [y := kept(layer, x), *torch.autograd.grad(y, (x, *layer.parameters()), dy, retain_graph=True)]
    assert y.grad_fn.name() == "KernelNormBackward"
    others += torch.autograd.grad(y, (x, *layer.parameters()), dy)
    for got, want in zip((again, *others), (first, *gradients, *gradients), strict=True):
        assert same_bits(array(got), array(want)).all()
    with torch.no_grad():
        assert torch.equal(kept(layer, x), first)
    with torch.inference_mode():
        assert kept(layer, x).is_inference()
        assert torch.equal(layer(x), first)


def test_a_call_unlike_the_kept_one_is_computed_as_it_is():
    layer = RMSNorm(32, device=DEVICE)
    numbers = torch.randn(6 * 32 + 1, device=DEVICE)
    x = numbers[:-1].view(6, 32)
    layer(x)
    others = [
        x[:3], numbers[1:].view(6, 32), torch.randn(6, 64, device=DEVICE)[:, ::2], x.bfloat16(), x.view(2, 3, 32),
        torch._efficientzerotensor(6, 32, device=DEVICE), x,
    ]  # fmt: skip
    for other in others:
        want = rms_norm(other.clone(), layer.weight, variant="torch", eps=layer.eps)
        assert torch.equal(layer(other), want)
    layer.eps = 0.5
    rows = torch.rand(33, device=DEVICE)
    for weight in (layer.weight, rows[:-1], rows[1:], rows[1:].half()):
        layer.weight = torch.nn.Parameter(weight.detach())
        assert torch.equal(layer(x), rms_norm(x, weight.clone(), variant="torch", eps=0.5))
    with pytest.raises(ValueError, match="meta"):
        layer(x.to("meta"))


@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "bias")])
def test_gradients_that_are_not_needed_are_not_computed(frozen, monkeypatch):
    started, own = [], gpu._start
    monkeypatch.setattr(gpu, "_start", lambda *given: (started.append(given[2]), own(*given))[1])
    layer = RMSNorm(32, variant="lasagne", device=DEVICE)
    x, dy = torch.randn(2, 6, 32, device=DEVICE)
    want = rms_norm_vjp(dy, x, layer.weight.detach(), layer.bias, variant="lasagne", eps=layer.eps)
    layer(x)
    started.clear()
    x.requires_grad_()
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    kept(layer, x).backward(dy)
    assert started == ["forward", "backward", *(["add_up"] if len(frozen) < 2 else [])]
    for got, wanted, name in zip((x, layer.weight, layer.bias), want, ("x", "weight", "bias"), strict=True):
        assert got.grad is None if name in frozen else torch.equal(got.grad, wanted)


def test_each_card_starts_its_own_function(monkeypatch):
    """A launch is kept for a call, whatever its card: a function is loaded on one of them alone."""

    class On:
        def __init__(self, card):
            self.card = card

        def get_device(self):
            return self.card

        def data_ptr(self):
            return 16

    started = []
    make = lambda launch, kind, name, sizes, tensors: lambda *_: started.append(tensors[0].card)  # noqa: E731
    monkeypatch.setattr(gpu, "_compiled", make)
    call = prepare("rms_norm", ("llama", None, None, -1, None, None), torch.ones(4, 8)).call
    launch = gpu.launch_of(call, None, None)
    for card in (0, 1, 0, 1):
        gpu._start(launch, "forward", "forward", (8, None, 8), On(card), None)
    assert started == [0, 1]
    assert len(launch.started) == 2
