"""The operators rmsnorm::forward and rmsnorm::backward: one node each wherever a program is traced, with eager bits."""

from __future__ import annotations

import json
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
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch_arrays import randn  # noqa: E402
from torch_layers import randomised  # noqa: E402

from rmsnorm import PRESETS  # noqa: E402
from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp  # noqa: E402

pytest.importorskip("rmsnorm.cpu._native", reason="without the kernels a program has plain operations")
pytestmark = [
    pytest.mark.usefixtures("_fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # from inside the compiler
]

FORWARD, BACKWARD = torch.ops.rmsnorm.forward.default, torch.ops.rmsnorm.backward.default
F64 = torch.float64
DECOMPOSES = pytest.mark.needs("torch>=2.9", "before it nobody can ask whether run_decompositions traces")
# Float64, on numbers of the size of 1: some 60 operations and sums over 6 elements, on either side
NEAR = 2.0**-53 * 2 * (60 + 6) * 2**4
GATE = {"gate": None, "gate_function": "silu", "gate_position": "after"}


def settings(dtype: Any, position: str = "inside", k: int | None = None, gate: str | None = None) -> Any:
    name = str(dtype).removeprefix("torch.")
    fields = {"axes": 1, "features": 1, "axes_after": 0, "eps": 1e-3, "eps_position": position, "scale_offset": 0.5}
    return json.dumps({**fields, "norm": None, "product": name, "result": name, **GATE, "gate": gate}), k


@pytest.mark.parametrize("dtype", [torch.bfloat16, F64])
def test_opcheck(dtype: Any) -> None:
    x, residual, dy = (randn(3, 6, dtype=dtype, seed=seed).requires_grad_() for seed in range(3))
    scale, bias = (randn(6, dtype=dtype, seed=seed).requires_grad_() for seed in (3, 4))
    mask, inverse_rms = randn(3, 6) > 0, randn(3, 1, dtype=F64).abs()
    gate, own = randn(3, 6, dtype=dtype, seed=5).requires_grad_(), str(dtype).removeprefix("torch.")
    wide = "float32" if own == "bfloat16" else own
    plain, gated = settings(dtype, k=4), settings(dtype, k=4, gate=wide)
    for arguments in (
        (x, None, scale, None, None, None, *plain), (x, residual, scale, bias, mask, None, *plain),
        (x, None, None, None, None, None, *plain), (x, residual, scale, bias, mask, gate, *gated),
    ):  # fmt: skip
        torch.library.opcheck(FORWARD, arguments)
    for arguments in (
        (dy, None, x, inverse_rms, scale, bias, None, None, *plain),
        (dy, residual, x, inverse_rms, None, None, mask, None, *plain),
        (dy, residual, x, inverse_rms, scale, bias, mask, gate, *gated),
    ):
        torch.library.opcheck(BACKWARD, arguments)


@pytest.mark.parametrize("position", ["inside", "outside", "clamp"])
def test_every_derivative_of_the_operator(position: str) -> None:
    """First and second derivatives in both modes, and batches of these."""
    x, residual = (randn(2, 3, dtype=F64, seed=seed).requires_grad_() for seed in (0, 1))
    scale, bias = (randn(3, dtype=F64, seed=seed).requires_grad_() for seed in (2, 3))

    def call(x: Any, residual: Any, scale: Any, bias: Any) -> Any:
        y, h, _ = FORWARD(x, residual, scale, bias, None, None, *settings(F64, position))
        return y, h

    leaves = (x, residual, scale, bias)
    assert torch.autograd.gradcheck(
        call, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(call, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("has_scale", [False, True])
def test_torch_func_on_the_operator(has_scale: bool) -> None:
    """Nested transforms, against plain operations."""
    x, scale = randn(2, 3, dtype=F64), randn(3, dtype=F64, seed=1) if has_scale else None

    def ours(x: Any) -> Any:
        return FORWARD(x, None, scale, None, None, None, *settings(F64))[0].sin()

    def plain(x: Any) -> Any:
        return (x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (1 if scale is None else 0.5 + scale)).sin()

    transforms = [lambda f, a=a, b=b: a(b(f))(x) for a in (jacfwd, jacrev) for b in (jacfwd, jacrev)] + [
        lambda f: vmap(lambda row: jvp(grad(lambda v: f(v).sum()), (row,), (row + 1,))[1])(x),
        lambda f: jvp(vmap(grad(lambda v: f(v).sum())), (x,), (x + 1,))[1],
        lambda f: vmap(f, in_dims=1)(x[:, None].expand(2, 4, 3)),
    ]
    for transform in transforms:
        got, want = transform(ours), transform(plain)
        assert (got - want).abs().max() <= NEAR * max(1, want.abs().max())


def test_one_node_each() -> None:
    """In a program of make_fx, of torch.export and of Dynamo; and its bits are those of eager calls."""
    layer, x, dy = randomised(RMSNorm(6, variant="llama", bias=True)), randn(4, 6).requires_grad_(), randn(4, 6, seed=1)

    def step(x: Any, weight: Any) -> Any:
        y, h = rms_norm(x, weight, residual=dy)
        return torch.autograd.grad((y, h), (x, weight), (dy, dy))

    traced = make_fx(step)(x, layer.weight)
    assert targets(traced) == [FORWARD, BACKWARD]
    assert all(map(torch.equal, traced(x, layer.weight), step(x, layer.weight)))
    for strict in (False, True):
        program = torch.export.export(layer, (x,), strict=strict)
        assert targets(program) == [FORWARD]
        assert torch.equal(program.module()(x), layer(x))
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
    assert all(map(torch.equal, *results))
    assert [targets(graph) for graph in graphs] == [[FORWARD], [BACKWARD]]


def targets(program: Any) -> list[Any]:
    """The calls of a program that compute."""
    return [
        node.target
        for node in program.graph.nodes
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "rmsnorm"
    ]


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


def test_selective_checkpoints_by_operator() -> None:
    """The policy is asked about the operator; what it keeps is not computed again."""
    layer, linear, seen = randomised(RMSNorm(6)), torch.nn.Linear(6, 6), []

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> Any:
        seen.append((operator, context.is_recompute))
        return CheckpointPolicy.MUST_SAVE if operator is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    gradients = []
    for kept in (False, True):
        x = randn(4, 6).requires_grad_()
        options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if kept else {}
        checkpoint(lambda x: linear(layer(linear(x))), x, use_reentrant=False, **options).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert (FORWARD, False) in seen


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
        assert all(map(torch.equal, *results))


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
    assert all(map(torch.equal, compiled(x, dy), derivatives(x, dy)))


@DECOMPOSES
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decomposed_program_needs_no_rmsnorm(dtype: Any, tmp_path: Path) -> None:
    """Any backend takes it, and a process without this package; the exported program itself has the operator."""
    layer = RMSNorm(8, variant="gemma", bias=True, partial=0.6, dtype=dtype)
    x, residual, gate = (randn(4, 8, dtype=dtype, seed=seed) for seed in range(3))
    tensors = x, randn(4, 8, seed=3) > 0, residual
    if dtype == torch.bfloat16:  # PyTorch's own decomposition of silu has other last bits in float32
        tensors += (gate,)
    sizes = {0: torch.export.Dim("rows", min=2)}
    for strict in (True, False):
        exported = torch.export.export(layer, tensors, dynamic_shapes=(sizes,) * len(tensors), strict=strict)
        assert "rmsnorm." in str(exported.graph)
        program = exported.run_decompositions()
        calls = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        assert {call.namespace for call in calls} == {"aten"}
        want = exported.module()(*tensors)  # of the operator
        compiled = torch.compile(program.module(), backend="aot_eager")
        for each in (program.module(), compiled):
            for got, expected in zip(each(*tensors), want, strict=True):
                assert torch.equal(got, expected)
        torch.export.save(program, tmp_path / f"{strict}.pt2")
    torch.save((tensors, want), tmp_path / "tensors.pt")
    code = (
        "import sys, torch; a, w = torch.load('tensors.pt')\n"
        "for name in ('True.pt2', 'False.pt2'):\n"
        "    y = torch.export.load(name).module()(*a)\n"
        "    print(len(y), 'rmsnorm' in sys.modules, all(map(torch.equal, y, w)))"
    )
    assert printed("-W", "ignore", "-c", code, cwd=tmp_path).split() == ["2", "False", "True"] * 2


@DECOMPOSES
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_results_of_a_decomposed_program_lie_as_those_of_the_operator() -> None:
    """The program was written for these strides, and may take a view of them."""

    class Swapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x.transpose(0, 1)).view(-1)

    model, x = Swapped(), randn(3, 4, 8)
    program = torch.export.export(model, (x,)).run_decompositions()
    assert torch.equal(program.module()(x), model(x))
