"""What is done to torch.nn.RMSNorm is done to ours: moved, cast, parametrized, quantised, in encoders and workers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import rmsnorm

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import are_alike, hold, randn  # noqa: E402
from torch_layers import LlamaRMSNorm, randomised, ulp_bound  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402

GATED = rmsnorm.Variant.get("llama").replace(gate_function="silu", gate_position="after")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MPS = pytest.param("mps", marks=pytest.mark.needs("torch!=2.6.*", "whose built-in takes no fake tensors of mps"))
OF_THE_BUILT_IN = "ignore:Mismatch dtype between input and weight:UserWarning"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inside the compiler


@pytest.mark.parametrize("shape", [8, (8,), [8], torch.Size([3, 8]), (2, 3, 8)])
def test_it_says_what_the_built_in_says(shape: Any) -> None:
    for arguments in ((), (1e-3,), (None, False)):
        ours, theirs = (cls(shape, *arguments) for cls in (RMSNorm, nn.RMSNorm))
        assert isinstance(ours, nn.RMSNorm)
        for name in ("normalized_shape", "eps", "elementwise_affine", "__constants__"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert repr(ours) == repr(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.filterwarnings(OF_THE_BUILT_IN)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_result_dtypes_are_those_of_the_built_in(autocast: Any) -> None:
    for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        x, layers = randn(2, 8, dtype=x_dtype), [cls(8, dtype=weight_dtype) for cls in (RMSNorm, nn.RMSNorm)]
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            ours, again, theirs = layers[0](x), layers[0](x), layers[1](x)
        assert ours.dtype == again.dtype == theirs.dtype


@contextlib.contextmanager
def autocast_on(device: str) -> Iterator[None]:
    """Also on a device that is not there, of fake tensors: torch.autocast would stay off."""
    try:
        torch.set_autocast_enabled(device, True)
    except RuntimeError:
        pytest.skip(f"PyTorch {torch.__version__} has no autocast of {device}")
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.filterwarnings(OF_THE_BUILT_IN)
@pytest.mark.filterwarnings("ignore:rmsnorm. triton is not installed:UserWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", MPS, "mtia"])
def test_autocast_of_every_device_gives_the_dtypes_of_the_built_in(device: str) -> None:
    """Those of which there can be a fake tensor. LLaMA's class has no such list."""
    for x_dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        with autocast_on(device):
            x = torch.empty(2, 8, dtype=x_dtype, device=device)
            layers = [cls(8, dtype=weight_dtype, device=device) for cls in (RMSNorm, nn.RMSNorm)]
            ours, theirs = (layer(x) for layer in layers)
            with torch.device(device):
                llamas = [layer(x) for layer in (RMSNorm(8, variant="llama"), LlamaRMSNorm(8))]
        assert ours.dtype == theirs.dtype
        assert llamas[0].dtype == llamas[1].dtype


def test_state_dicts_of_other_classes() -> None:
    x, theirs, ours = randn(4, 8), randomised(LlamaRMSNorm(8)), RMSNorm(8, variant="llama")
    assert ours.load_state_dict(theirs.state_dict(), strict=True)
    assert ((ours(x) - theirs(x)).abs() <= ulp_bound(8, torch.float32) * theirs(x).abs()).all()
    theirs.load_state_dict(randomised(ours, seed=5).state_dict(), strict=True)
    assert torch.equal(ours.weight, theirs.weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        RMSNorm(8, bias=True).load_state_dict(nn.RMSNorm(8).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        RMSNorm(8).load_state_dict(nn.RMSNorm(6).state_dict())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: RMSNorm(8)(torch.ones(4, 6)),
            ValueError,
            r"RMSNorm: the end of x has shape \(6,\), expected \(8,\) to ma",
        ),
        (lambda: RMSNorm((4, 8))(torch.ones(8)), ValueError, r"shape \(8,\), expected \(4, 8\) .* x being f32\[8\]"),
        (lambda: RMSNorm(8)(torch.tensor(1.0)), ValueError, r"the end of x has shape \(\), expected \(8,\)"),
        (lambda: RMSNorm(8)([1.0]), TypeError, r"x is \[1.0\] \(list\), expected a torch.Tensor"),
        (lambda: RMSNorm(()), ValueError, r"RMSNorm: normalized_shape is \(\), expected one size >= 0 or a sequence"),
        (lambda: RMSNorm(3.5), ValueError, "normalized_shape is 3.5, expected one size"),
        (lambda: RMSNorm((4, -1)), ValueError, r"normalized_shape is \(4, -1\), expected one size"),
    ],
)
def test_errors(make: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_shape_error_is_that_of_the_built_in_too() -> None:
    for layer in (RMSNorm(8), torch.nn.RMSNorm(8)):
        with pytest.raises(RuntimeError):
            layer(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match="mask has shape"):
        rms_norm(torch.ones(2, 6), mask=torch.ones(5, dtype=torch.bool))


@pytest.mark.parametrize("swapping", [False, True])  # the way of module.to that keeps the parameter objects
def test_moves_between_dtypes(swapping: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        layer = randomised(RMSNorm(8, bias=True))
        weight = layer.weight
        torch.__future__.set_swap_module_params_on_conversion(swapping)
        try:
            layer.to(dtype)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert layer.weight is weight
        assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
        assert layer(randn(2, 8, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gain_for_each_head_before_the_positions(dtype: Any) -> None:
    """The axes of the gain are not the last ones: the kernels compute it on another view, and y is contiguous."""
    x, dy = (randn(2, 3, 5, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    scale, gate = randn(3, 8, dtype=dtype, seed=2), randn(2, 3, 5, 8, dtype=dtype, seed=3)
    for tensors in ([x, scale], [x, scale, gate]):
        results = []
        for last in (False, True):
            leaves = [t.clone().requires_grad_() for t in tensors]
            moved = [t.transpose(1, 2) if last and t.ndim == 4 else t for t in leaves]
            options = {"variant": GATED, "axis": -1, "feature_axis": (-2, -1) if last else (1, -1)}
            y = rms_norm(*moved[:2], gate=dict(enumerate(moved)).get(2), **options)
            assert y.is_contiguous()
            y = y.transpose(1, 2) if last else y
            results.append((y, *torch.autograd.grad(y, leaves, dy)))
        assert all(map(are_alike, *results))


@pytest.mark.parametrize("axis", [(2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_gain_for_each_channel(axis: Any, layout: Any) -> None:
    """Images: y and the gradients, eager and in a program, lie as x does."""
    x, dy = (randn(3, 4, 5, 8, seed=seed).to(memory_format=layout) for seed in (0, 1))
    leaves = [x.requires_grad_(), *(randn(4, seed=seed).requires_grad_() for seed in (2, 3))]
    options = {"variant": "lasagne", "axis": axis, "feature_axis": 1}

    def step(*tensors: Any) -> Any:
        y = rms_norm(*tensors, **options)
        return y, *torch.autograd.grad(y, tensors, dy)

    for results in (step(*leaves), make_fx(step)(*leaves)(*leaves)):
        assert results[0].is_contiguous(memory_format=layout)
        hold(dict(zip(("y", "dx", "dscale", "dbias"), results, strict=True)), *leaves, dy=dy, **options)
