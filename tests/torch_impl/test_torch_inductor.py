"""What Inductor writes for a layer in a compiled program."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch._inductor import config  # noqa: E402
from torch._inductor.utils import run_and_get_code  # noqa: E402
from torch.func import vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402

pytest.importorskip("rmsnorm.cpu._native", reason="without the kernels a program has plain operations")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # from inside the compiler


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


def run(function: Any, layer: Any, x: Any) -> list[Any]:
    """y and the gradients for x and the parameters."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = function(x)
    y.backward(torch.cos(torch.arange(y.numel())).reshape(y.shape).to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


BF16, F64 = torch.bfloat16, torch.float64
LAYERS = {
    "float32": (RMSNorm(64), randn(4, 64), True),
    "symbols": (RMSNorm(64), randn(7, 3, 64), True),
    "several threads": (RMSNorm(768), randn(96, 768), True),
    "bfloat16 and float32": (RMSNorm(24, bias=True), randn(5, 24, dtype=BF16), True),
    "two axes": (RMSNorm((3, 8), dtype=F64), randn(2, 5, 3, 8, dtype=F64), True),
    "one element": (RMSNorm(1, elementwise_affine=False), randn(4, 1), True),
    "one row": (RMSNorm(9, variant="llama"), randn(9), True),
    "no rows": (RMSNorm(6), randn(0, 6), None),  # plain operations: no kernel computes it
    "gaps": (RMSNorm(6), randn(6, 4).t(), False),
}


@pytest.mark.needs("torch>=2.13", "before it Inductor may not be told what to write; a program calls the operators")
@pytest.mark.parametrize("name", LAYERS)
def test_a_program_calls_the_kernels_without_the_dispatcher(name: str) -> None:
    layer, x, served = LAYERS[name]
    want = run(randomised(layer), layer, x)
    got, codes = run_and_get_code(run, torch.compile(layer, dynamic=name == "symbols"), layer, x)
    code = "".join(codes)
    assert code.count(".in_program(") == (2 if served else 0)
    assert ("rmsnorm.forward.default(" in code) is (served is False)
    for result, expected in zip(got, want, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_program_calls_the_operators_for_what_it_cannot_plan() -> None:
    """A residual, a mask, and results that a program uses although they have no elements."""
    x, residual, scale = randn(4, 6), randn(4, 6), randn(6)
    graph = make_fx(RMSNorm(6))(x).graph
    (arguments,) = (node.args[6:] for node in graph.nodes if node.target is torch.ops.rmsnorm.forward.default)
    assert not {'"', "\\"} & set(arguments[0])  # the C++ that Inductor writes has strings without escapes

    def function(x: Any, residual: Any, scale: Any) -> Any:
        y, h = rms_norm(x, scale, residual=residual)
        masked = rms_norm(x, scale, mask=residual > 0)
        results = torch.ops.rmsnorm.forward.default(x, None, scale, None, None, None, *arguments)
        gradients = torch.ops.rmsnorm.backward.default(x, None, y, results[2], None, None, None, None, *arguments)
        return y, h, masked, *results, *gradients

    want = function(x, residual, scale)
    got, codes = run_and_get_code(torch.compile(function), x, residual, scale)
    assert ".in_program(" not in "".join(codes)
    for result, expected in zip(got, want, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_code_that_cannot_be_traced_runs_as_it_is() -> None:
    """Dynamo cannot trace this call of vmap, and would trace what the layer calls, function after function."""
    layer, x = RMSNorm(37), randn(3, 4, 37)  # of no other test: it is new in this call
    result = torch.compile(lambda x: vmap(layer)(x))(x)
    torch.testing.assert_close(result, layer(x), rtol=0, atol=0)


def test_a_call_in_a_program_is_launched_on_the_device_of_its_tensors() -> None:
    """The kernels for the CPU would read the address of a tensor on another device as one of theirs."""
    layer = RMSNorm(6)
    graph = make_fx(layer)(randn(4, 6)).graph
    (arguments,) = (node.args[6:] for node in graph.nodes if node.target is torch.ops.rmsnorm.forward.default)
    key = "float32", "float32", None, None, *arguments, (6,), None
    x, scale = torch.ones(4, 6, device="meta"), torch.ones(6, device="meta")
    y, _, inverse_rms = torch.ops.rmsnorm.forward.default.in_program(key, x, scale, None, None, True)
    dx, dscale, *_ = torch.ops.rmsnorm.backward.default.in_program(key, y, x, inverse_rms, scale, None, None)
    assert all(tensor.is_meta for tensor in (y, inverse_rms, dx, dscale))
