"""Programs of make_fx, torch.compile, torch.export, torch.jit.trace and torch.fx; and how results lie in memory."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from programs import printed

from rmsnorm import PRESETS

torch = pytest.importorskip("torch")
from functorch.compile import make_boxed_func  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_arrays import LAYOUTS, are_alike, randn  # noqa: E402
from torch_layers import randomised, ulp_bound  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402
from rmsnorm.torch_impl.space import _rounded_by_sums  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),  # forward_ad's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # from inside the compiler
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
F64 = torch.float64


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_backward_pass_of_a_compiled_layer_has_x_and_a_number_a_row_alone() -> None:
    layer, x, dy = randomised(RMSNorm(64, variant="llama", bias=True)), randn(4, 64), randn(4, 64, seed=1)
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)
    results = []
    for each in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        results.append((y, *torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy)))
    assert all(map(are_alike, *results))
    inputs = [tuple(node.meta["val"].shape) for node in graphs[1].graph.nodes if node.op == "placeholder"]
    assert sorted(inputs) == sorted([(4, 64), (4, 64), (4, 1), (64,)])  # dy, x, 1 / rho, the gain


def test_an_exported_program_needs_no_rmsnorm(tmp_path: Path) -> None:
    """Any backend takes it, and a process without this package. It may be trained."""
    dtype = torch.bfloat16
    layer = RMSNorm(8, variant="gemma", bias=True, partial=0.6, dtype=dtype)
    x, residual, gate = (randn(4, 8, dtype=dtype, seed=seed) for seed in range(3))
    tensors = x, randn(4, 8, seed=3) > 0, residual, gate
    want = layer(*tensors)
    sizes = {0: torch.export.Dim("rows", min=2)}
    exported = torch.export.export(layer, tensors, dynamic_shapes=(sizes,) * len(tensors))
    for program in (exported, exported.run_decompositions()):
        calls = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        assert {call.namespace for call in calls} == {"aten"}
        assert all(map(are_alike, program.module()(*tensors), want))
    gradients = []
    for each in (layer, exported.module()):  # decomposed, it has no constants to derivatives
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(each(leaf, *tensors[1:])[0].float().norm(), (leaf, each.weight)))
    assert all(map(are_alike, *gradients))
    torch.export.save(exported, tmp_path / "program.pt2")
    torch.save((tensors, [t.detach() for t in exported.module()(*tensors)]), tmp_path / "tensors.pt")
    code = (
        "import sys, torch; a, w = torch.load('tensors.pt')\n"
        "y = torch.export.load('program.pt2').module()(*a)\n"
        "print(len(y), 'rmsnorm' in sys.modules, all(map(torch.equal, y, w)))"
    )
    assert printed("-W", "ignore", "-c", code, cwd=tmp_path).split() == ["2", "False", "True"]


def test_compile_the_function_itself() -> None:
    """Options that are arguments become symbols with dynamic=True; one graph serves every batch."""
    counter = CompileCounter()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=counter)
    x = randn(4, 8, dtype=torch.float64)
    for a in (x, x[:3], x.float(), torch.cat([x, x], 1).float()):
        assert torch.equal(compiled(a), rms_norm(a))
    assert counter.frame_count == 2  # one for each dtype
    x, third = x.float(), Fraction(1, 3)
    for options in ({"axis": 0}, {"variant": "llama", "eps": 1e-3}, {"partial": 0.6}, {"partial": third}):
        assert all(map(torch.equal, *(f(x, return_inverse_rms=True, **options) for f in (compiled, rms_norm))))
    formula = torch.compile(rms_norm_vjp, backend="aot_eager", fullgraph=True, dynamic=True)
    options = {"variant": PRESETS["gemma"], "axis": [0, 1], "partial": third}
    assert all(map(are_alike, *(f(x, x + 1, x, **options)[:2] for f in (formula, rms_norm_vjp))))


@pytest.mark.parametrize(("variant", "dtype"), [("llama", "bfloat16"), ("zhang_torch", "float64")])
def test_a_trace_has_operations_of_pytorch_alone(variant: str, dtype: str) -> None:
    """In every dtype, for any number of rows, through a file, and its gradients; in float32 arithmetic, or float64."""
    dtype = getattr(torch, dtype)
    layer = randomised(RMSNorm(8, variant=variant, bias=True, dtype=dtype))
    traced = torch.jit.trace(layer, (randn(4, 8, dtype=dtype),))
    assert not any("rmsnorm::" in str(node) for node in traced.inlined_graph.nodes())
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    x, results = randn(7, 8, dtype=dtype, seed=1), []
    for each in (layer, traced, torch.jit.load(buffer)):
        leaf = x.clone().requires_grad_()
        y = each(leaf)
        y.float().square().sum().backward()
        results.append((y, leaf.grad))
    for got in results[1:]:
        for one, other in zip(got, results[0], strict=True):  # dx is the difference of terms of the size of its largest
            assert (one.double() - other.double()).abs().max() <= ulp_bound(40, dtype) * other.double().abs().max()


def test_a_symbolic_trace_has_one_node() -> None:
    """torch.fx takes the layer as a leaf, as it takes the built-in, and the function, with any options."""
    plain = [nn.Sequential(cls(8), nn.Linear(8, 8)) for cls in (RMSNorm, nn.RMSNorm)]
    ours, theirs = map(torch.fx.symbolic_trace, plain)
    assert ours.code == theirs.code
    assert torch.equal(ours(randn(4, 8)), plain[0](randn(4, 8)))
    given = randn(4, 8), randn(4, 8, seed=1), randn(4, 8, seed=2) > 0
    options = {"variant": PRESETS["gemma"], "eps": 1e-3, "partial": Fraction(1, 3), "axis": (0, 1)}
    function = lambda x, residual, mask: rms_norm(x, residual=residual, mask=mask, **options)  # noqa: E731
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(function)))
    assert all(map(torch.equal, traced(*given), function(*given)))


LIES = pytest.mark.needs("torch>=2.11", "the built-in of 2.5 and 2.6 keeps the strides of x")
ORDERS = {
    **LAYOUTS,
    "heads after rows": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "channels_last, sliced": lambda t: LAYOUTS["channels_last"](t.repeat(1, 2, 1, 1))[:, : t.shape[1]],
    "volumes": lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).contiguous(memory_format=torch.channels_last_3d),
}


def _compiled(layer: Any, x: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager", **options)(x)


def _faked(layer: Any, x: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return layer(mode.from_tensor(x))


PLACES: dict[str, Any] = {
    "eager": lambda layer, x: layer(x),
    "compiled": _compiled,
    "of any size": lambda layer, x: _compiled(layer, x, dynamic=True),
    "exported": lambda layer, x: torch.export.export(layer, (x,)).module()(x),
    "fake": _faked,
    "vmap": lambda layer, x: torch.vmap(layer)(x[None].expand(2, *x.shape)),
    "vmap of another axis": lambda layer, x: torch.vmap(layer, in_dims=2 if x.ndim == 4 else 0)(x),
    "tangent": lambda layer, x: torch.func.jvp(layer, (x,), (x,))[1],
    "torch.func.vjp": lambda layer, x: torch.func.vjp(layer, x)[0],
}


@LIES
@pytest.mark.parametrize("place", PLACES)
def test_results_lie_as_those_of_the_built_in(place: str) -> None:
    """In the order of the axes without gaps, so that ``view`` takes y; or as channels_last. Eagerly by one layer."""
    kept = RMSNorm(8), nn.RMSNorm(8)
    for name in list(ORDERS)[:: 4 if place in ("compiled", "of any size", "exported") else 1]:
        x = ORDERS[name](randn(2, 3, 5, 8))
        layers = kept if place == "eager" else (RMSNorm(8), nn.RMSNorm(8))
        got, want = (PLACES[place](layer, x) for layer in layers)
        assert (got.shape, got.stride()) == (want.shape, want.stride()), name


@LIES
@pytest.mark.parametrize("name", ORDERS)
def test_every_result_lies_as_y_of_the_built_in(name: str) -> None:
    """Also h, y of other axes, with a gate or a mask, the formula of the gradients, and 1 / rho without gaps."""
    x = ORDERS[name](randn(2, 3, 5, 8))
    want, z = nn.RMSNorm(8)(x).stride(), torch.ones(x.mT.shape).mT
    ones = [torch.ones(size) for size in x.shape]
    outputs = [
        *rms_norm(x, residual=z), *rms_norm(x, ones[-1], residual=z.bfloat16()), rms_norm(x, gate=z),
        rms_norm(x, mask=z > 0), rms_norm(x, ones[1], axis=1), rms_norm(x, ones[1], axis=-1, feature_axis=1),
        *rms_norm(x, ones[1], axis=1, residual=z), rms_norm(x, ones[1], axis=1, gate=z),
        rms_norm(x, ones[0], axis=0, out_dtype=F64), rms_norm_vjp(z, x)[0], rms_norm_vjp(z, x, ones[1], axis=1)[0],
    ]  # fmt: skip
    assert [y.stride() for y in outputs] == [want] * len(outputs)
    for options in ({"axis": 0}, {"axis": 1}, {"axis": -1, "feature_axis": (0, -1)}):
        assert rms_norm(x, return_inverse_rms=True, **options)[1].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_is_rounded_by_sums_has_the_bits_of_a_cast(dtype: torch.dtype) -> None:
    """In a compiled program, whose compiler leaves casts out: also ties, subnormal numbers, and what overflows."""
    ends = [0.0, 2.0**-25, 3 * 2.0**-25, 2.0**-14, 65504.0, 65519.99, 65520.0, 1 + 2.0**-11, 1 + 2.0**-8, torch.inf]
    x = torch.cat([torch.tensor(ends), torch.exp2(randn(4000, seed=3) * 6) * randn(4000, seed=4)])
    x = torch.cat([x, -x])
    x = x[x.isfinite()] if dtype == torch.bfloat16 else x  # there a number above 2^111 becomes NaN
    assert torch.equal(_rounded_by_sums(x, str(dtype).removeprefix("torch.")), x.to(dtype).float())
