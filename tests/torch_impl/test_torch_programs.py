"""Programs of make_fx, torch.compile and torch.export, and every derivative of the functions."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from programs import printed

torch = pytest.importorskip("torch")
from functorch.compile import make_boxed_func  # noqa: E402
from torch.func import grad, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_arrays import are_alike, randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm import PRESETS, Variant  # noqa: E402
from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # from inside the compiler
]

F64 = torch.float64
# Float64, on numbers of the size of 1: some 60 operations and sums over 6 elements, on either side
NEAR = 2.0**-53 * 2 * (60 + 6) * 2**4
OF_EVERY_KIND = {
    "inside": {}, "outside": {"variant": "zhang_torch"}, "clamp": {"variant": "x_transformers"},
    "rounded": {"variant": "llama"}, "partial": {"partial": 0.6},
    "gate after": {"gate": True, "variant": Variant.get("llama").replace(gate_position="after", scale_offset=0.5)},
    "gate before": {"gate": True, "variant": Variant.get("llama").replace(gate_position="before")},
    "residual": {"residual": True}, "the sum itself": {"residual": True, "variant": "gemma"},
    "other axes": {"axis": 0, "feature_axis": 1},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own
@pytest.mark.parametrize("kind", OF_EVERY_KIND)
def test_every_derivative(kind: str) -> None:
    """First and second derivatives in both modes, and batches of these."""
    x, extra = (randn(2, 3, dtype=F64, seed=seed).requires_grad_() for seed in (0, 1))
    scale, bias = (randn(3, dtype=F64, seed=seed).requires_grad_() for seed in (2, 3))
    options = dict(OF_EVERY_KIND[kind])
    named = next((name for name in ("residual", "gate") if options.pop(name, False)), None)
    if options.get("variant") == "gemma":
        options["variant"] = PRESETS["gemma"].replace(residual_rounding="after")

    def call(x: Any, scale: Any, bias: Any, *more: Any) -> Any:
        return rms_norm(x, scale, bias, **({named: more[0]} if named else {}), **options)

    leaves = (x, scale, bias, *([extra] if named else []))
    assert torch.autograd.gradcheck(
        call, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("has_scale", [False, True])
def test_nested_transforms(has_scale: bool) -> None:
    """Against plain operations."""
    x, scale = randn(2, 3, dtype=F64), randn(3, dtype=F64, seed=1) if has_scale else None

    def ours(x: Any) -> Any:
        return rms_norm(x, scale, eps=1e-3).sin()

    def plain(x: Any) -> Any:
        return (x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 if scale is None else scale)).sin()

    transforms = [lambda f, a=a, b=b: a(b(f))(x) for a in (jacfwd, jacrev) for b in (jacfwd, jacrev)] + [
        lambda f: vmap(lambda row: jvp(grad(lambda v: f(v).sum()), (row,), (row + 1,))[1])(x),
        lambda f: jvp(vmap(grad(lambda v: f(v).sum())), (x,), (x + 1,))[1],
        lambda f: vmap(f, in_dims=1)(x[:, None].expand(2, 4, 3)),
    ]
    for transform in transforms:
        got, want = transform(ours), transform(plain)
        assert (got - want).abs().max() <= NEAR * max(1, want.abs().max())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-3, 1e12])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_derivatives_of_rows_of_every_size_are_finite(size: float, eps: float) -> None:
    """Powers of 1 / rho, which second derivatives and tangents have, stay in range in float32 wherever they can."""
    x = randn(2, 64) * size
    direction = randn(2, 64, seed=1) * size
    _, tangent = jvp(lambda x: rms_norm(x, eps=eps), (x,), (direction,))
    want = jvp(lambda x: rms_norm(x, eps=eps), (x.double(),), (direction.double(),))[1]
    assert are_alike(tangent, want.float())
    if size >= 1e-12:  # of 1e-30 a second derivative is 1e60

        def curvature(x: Any, direction: Any) -> Any:
            return jvp(grad(lambda x: rms_norm(x, eps=eps).sin().sum()), (x,), (direction,))[1]

        assert are_alike(curvature(x, direction), curvature(x.double(), direction.double()).float())


def test_one_piece_each() -> None:
    """In a program of make_fx, of torch.export and of Dynamo, whose backward pass has x and a number a row alone."""
    layer, x, dy = randomised(RMSNorm(64, variant="llama", bias=True)), randn(4, 64).requires_grad_(), randn(4, 64)

    def step(x: Any, weight: Any) -> Any:
        y, h = rms_norm(x, weight, residual=dy)
        return torch.autograd.grad((y, h), (x, weight), (dy, dy))

    traced = make_fx(step)(x, layer.weight)
    assert all(map(are_alike, traced(x, layer.weight), step(x, layer.weight)))
    for strict in (False, True):
        program = torch.export.export(layer, (x,), strict=strict)
        assert are_alike(program.module()(x), layer(x))
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    results = []
    for each in (layer, compiled):
        leaf = x.detach().clone().requires_grad_()
        y = each(leaf)
        y.backward(dy)
        results.append((y, leaf.grad, layer.weight.grad, layer.bias.grad))
        layer.zero_grad()
    assert all(map(are_alike, *results))
    inputs = [node.meta["val"].shape for node in graphs[1].graph.nodes if node.op == "placeholder"]
    assert sorted(map(tuple, inputs)) == sorted([(4, 64), (4, 64), (4, 1), (64,)])  # dy, x, 1 / rho, the gain


@pytest.mark.needs("torch>=2.13", "before it the layer has more guards, or none are counted; the numbers are the same")
def test_a_compiled_call_has_few_conditions() -> None:
    """Dynamo compares what it read of a call in every later one: 144 values if it traces the checks of arguments."""
    counts: list[int] = []

    def count(guards: Any) -> Any:
        counts.append(len(guards))
        return [True] * len(guards)

    for layer in (RMSNorm(6), torch.nn.RMSNorm(6)):
        torch.compile(layer, fullgraph=True, options={"guard_filter_fn": count})(randn(2, 6))
    ours, theirs = counts
    assert ours <= theirs * 1.25


def test_a_layer_that_dynamo_cannot_trace_into() -> None:
    """Dynamo does not trace this call of vmap, and would trace what the layer calls, function after function."""
    layer, x = RMSNorm(37), randn(3, 4, 37)  # of no other test: it is new in this call
    assert are_alike(torch.compile(lambda x: vmap(layer)(x), backend="aot_eager")(x), layer(x))


@pytest.mark.needs("torch>=2.9", "whose compiled autograd takes the compiler as a context")
@pytest.mark.parametrize("options", [{}, {"partial": 0.5, "bias": True}, {"variant": "gemma"}])
def test_the_backward_pass_alone_is_compiled_in_one_piece(options: dict[str, Any]) -> None:
    """By torch's compiled autograd, of calls that were not compiled; the second one is kept by the layer."""
    layer = randomised(RMSNorm(6, **options))
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for rows in (2, 2, 5):
        results = []
        for compiled in (False, True):
            x = randn(rows, 6).requires_grad_()
            with torch._dynamo.compiled_autograd._enable(compiler) if compiled else nullcontext():
                layer(x).square().sum().backward()
            results.append((x.grad, layer.weight.grad.clone()))
            layer.zero_grad()
        assert all(map(are_alike, *results))


@pytest.mark.parametrize(
    "options", [{}, {"partial": 0.5}, {"partial": Fraction(1, 3)}, {"variant": PRESETS["gemma"], "axis": [1, 2]}]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_formulas_of_the_gradients_are_compiled_in_one_piece(options: dict[str, Any], dynamic: bool) -> None:
    x, dy = randn(2, 3, 6), randn(2, 3, 6, seed=1)
    scale = randn(*(3, 6) if "axis" in options else (6,), seed=2)

    def derivatives(x: Any, dy: Any) -> Any:
        return rms_norm_vjp(dy, x, scale, **options)[:2]

    compiled = torch.compile(derivatives, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert all(map(are_alike, compiled(x, dy), derivatives(x, dy)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_exported_program_needs_no_rmsnorm(dtype: Any, tmp_path: Path) -> None:
    """Any backend takes it, and a process without this package. It may be trained."""
    layer = RMSNorm(8, variant="gemma", bias=True, partial=0.6, dtype=dtype)
    x, residual, gate = (randn(4, 8, dtype=dtype, seed=seed) for seed in range(3))
    tensors = x, randn(4, 8, seed=3) > 0, residual, gate
    want = layer(*tensors)
    sizes = {0: torch.export.Dim("rows", min=2)}
    for strict in (True, False):
        exported = torch.export.export(layer, tensors, dynamic_shapes=(sizes,) * len(tensors), strict=strict)
        for program in (exported, exported.run_decompositions()):
            calls = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
            assert {call.namespace for call in calls} == {"aten"}
            assert all(map(are_alike, program.module()(*tensors), want))
        gradients = []
        for each in (layer, exported.module()):  # decomposed, it has no constants to derivatives
            leaf = x.clone().requires_grad_()
            y, _ = each(leaf, *tensors[1:])
            gradients.append(torch.autograd.grad(y.float().square().sum(), (leaf, each.weight)))
        assert all(map(are_alike, *gradients))
        torch.export.save(exported, tmp_path / f"{strict}.pt2")
    torch.save((tensors, [t.detach() for t in exported.module()(*tensors)]), tmp_path / "tensors.pt")
    code = (
        "import sys, torch; a, w = torch.load('tensors.pt')\n"
        "for name in ('True.pt2', 'False.pt2'):\n"
        "    y = torch.export.load(name).module()(*a)\n"
        "    print(len(y), 'rmsnorm' in sys.modules, all(map(torch.equal, y, w)))"
    )
    assert printed("-W", "ignore", "-c", code, cwd=tmp_path).split() == ["2", "False", "True"] * 2


def test_results_of_an_exported_program_lie_as_those_of_the_layer() -> None:
    """The program was written for these strides, and may take a view of them."""

    class Swapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(0, 1)).view(-1)

    model, x = Swapped(), randn(3, 4, 8)
    for program in (each := torch.export.export(model, (x,)), each.run_decompositions()):
        assert are_alike(program.module()(x), model(x))


def test_a_checkpoint_computes_again_what_was_computed() -> None:
    layer, linear, gradients = randomised(RMSNorm(6)), torch.nn.Linear(6, 6), []
    run = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    for call in (lambda f, x: f(x), run):
        x = randn(4, 6).requires_grad_()
        call(lambda x: linear(layer(linear(x))), x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
