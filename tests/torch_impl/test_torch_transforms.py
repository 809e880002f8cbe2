"""What works around torch.nn.RMSNorm works around ours: compilers, transforms, precision, checkpoints, layouts."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_arrays import LAYOUTS, are_alike, randn  # noqa: E402
from torch_layers import randomised, ulp_bound  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, kernels, rms_norm, rms_norm_vjp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # forward_ad's own

F64 = torch.float64
# Float64 against autograd of the built-in: about 30 operations each and sums over 24 elements, on terms of the size of
# the largest result times at most 2^4, in either
NEAR = 2.0**-53 * 2 * (30 + 24) * 2**4


def pair(**options: Any) -> Any:
    """Ours and the built-in, in float64, with the same gain."""
    ours, theirs = RMSNorm((3, 8), 1e-3, dtype=F64, **options), nn.RMSNorm((3, 8), 1e-3, dtype=F64)
    theirs.load_state_dict(randomised(ours).state_dict(), strict=False)
    return ours, theirs


def close(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert (got - want).abs().max() <= NEAR * want.abs().max()


# Exported


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("variant", ["torch", "t5", "zhang_torch"])
def test_an_exported_layer(variant: str, strict: bool) -> None:
    """With any batch and length, also decomposed, and after a file."""
    layer = randomised(RMSNorm(8, variant=variant, partial=0.5)).bfloat16()
    sizes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}
    x = randn(4, 5, 8, dtype=torch.bfloat16)
    program = torch.export.export(layer, (x,), dynamic_shapes=({**sizes},), strict=strict)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    other = randn(2, 7, 8, dtype=torch.bfloat16, seed=1)
    for each in (program, program.run_decompositions(), torch.export.load(buffer)):
        assert torch.equal(each.module()(other), layer(other))
    assert list(program.state_dict) == ["weight"]


# torch.func


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize's, for constants
def test_func_on_a_layer() -> None:
    """functional_call under linearize, jacrev and hessian, of x and the parameters together."""
    ours, theirs = pair()
    x, dx = (randn(4, 3, 8, dtype=F64, seed=seed) for seed in range(2))
    parameters, tangents = {"weight": ours.weight.detach()}, {"weight": randn(3, 8, dtype=F64, seed=4)}
    options = {"variant": "torch", "eps": 1e-3, "axis": (1, 2)}

    def of(layer: Any) -> Any:
        return lambda parameters, x: torch.func.functional_call(layer, parameters, (x,))

    _, moved = torch.func.jvp(of(ours), (parameters, x), (tangents, dx))
    _, push = torch.func.linearize(of(ours), parameters, x)
    close(push(tangents, dx), moved)
    for got, expected in zip(
        torch.func.jacrev(of(ours), (0, 1))(parameters, x), torch.func.jacrev(of(theirs), (0, 1))(parameters, x),
        strict=True,
    ):  # fmt: skip
        close(*(each["weight"] if isinstance(each, dict) else each for each in (got, expected)))

    def loss(weight: Any) -> Any:
        return of(ours)({"weight": weight}, x).square().sum()

    # y = weight * z, so that the loss is the sum of weight_i^2 times the sum over rows of z_i^2
    normalised = rms_norm(x, **options)
    close(
        torch.func.hessian(loss)(parameters["weight"]).reshape(24, 24), normalised.square().sum(0).flatten().diag() * 2
    )


# Precision, memory


@pytest.mark.needs("torch>=2.11", "the built-in of 2.5 and 2.6 rounds float16 several times, and overflows elsewhere")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # the built-in's
def test_a_gradient_scaler_skips_what_overflows() -> None:
    """As with the built-in: float16 gradients are scaled up, and a step with an infinite one is left out."""
    states = []
    for cls in (RMSNorm, nn.RMSNorm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), cls(8), nn.Linear(8, 1))
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0**18)
        scales, before = [], model[1].weight.detach().clone()
        for step in range(6):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(randn(4, 8, seed=step)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step == 0:
                assert torch.equal(model[1].weight, before), "the first gradients overflow"
            scales.append(scaler.get_scale())
        assert scales[0] == 2.0**17
        assert not torch.equal(model[1].weight, before)
        states.append((scales, model[1].weight))
    assert states[0][0] == states[1][0]
    # gradients of float16 with 11 bits, each step at most 0.1 of a number of the size of the largest
    assert (states[0][1] - states[1][1]).abs().max() <= 6 * 0.1 * 8 * 2.0**-11 * 4


def test_a_reentrant_checkpoint_recomputes_the_same_bits() -> None:
    layer, found = randomised(RMSNorm(8, bias=True)), []
    for call in (layer, lambda *inputs: checkpoint(layer, *inputs, use_reentrant=True)):
        leaves = [randn(4, 8, seed=seed).requires_grad_() for seed in range(2)]
        y, h = call(leaves[0], None, leaves[1])
        (y.sum() + h.sum()).backward()
        found.append([y, h, *(leaf.grad for leaf in leaves), layer.weight.grad, layer.bias.grad])
        layer.zero_grad()
    assert all(map(torch.equal, *found))


LIES = pytest.mark.needs("torch>=2.11", "the built-in of 2.5 and 2.6 keeps the strides of x")
ORDERS = {
    **LAYOUTS,
    "heads after rows": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns first": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: t.repeat(1, 2, 1, 1)[:, : t.shape[1]],
    "channels_last, sliced": lambda t: LAYOUTS["channels_last"](t.repeat(1, 2, 1, 1))[:, : t.shape[1]],
    "channels_last, rows left out": lambda t: LAYOUTS["channels_last"](t)[:, :, ::2],
    "empty": lambda t: t[:0].transpose(1, 2),
    "volumes": lambda t: t[:, :, None].expand(-1, -1, 2, -1, -1).contiguous(memory_format=torch.channels_last_3d),
}


def _compiled(layer: Any, x: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager", **options)(x)


def _faked(layer: Any, x: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return layer(mode.from_tensor(x))


def _without_kernels(layer: Any, x: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "kept_of", lambda *_: None)
        return layer(x)


PLACES: dict[str, Any] = {
    "eager": lambda layer, x: layer(x),
    "without kernels": _without_kernels,
    "compiled": _compiled,
    "of any size": lambda layer, x: _compiled(layer, x, dynamic=True),
    "exported": lambda layer, x: torch.export.export(layer, (x,)).module()(x),
    "fake": _faked,
    "on meta": lambda layer, x: copy.deepcopy(layer).to("meta")(
        torch.empty_strided(x.shape, x.stride(), device="meta")
    ),
    "vmap": lambda layer, x: torch.vmap(layer)(x[None].expand(2, *x.shape)),
    "vmap of another axis": lambda layer, x: torch.vmap(layer, in_dims=2 if x.ndim == 4 else 0)(x),
    "vmap of gradients": lambda layer, x: torch.vmap(torch.func.vjp(layer, x)[1])(layer(torch.stack([x, x])))[0],
    "tangent": lambda layer, x: torch.func.jvp(layer, (x,), (x,))[1],
    "torch.func.vjp": lambda layer, x: torch.func.vjp(layer, x)[0],
    "traced": lambda layer, x: torch.jit.trace(layer, torch.ones(x.shape), check_trace=False)(x),
}


@LIES
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("place", PLACES)
def test_results_lie_as_those_of_the_built_in(place: str) -> None:
    """In the order of the axes without gaps, so that ``view`` takes y; or as channels_last."""
    for name, order in ORDERS.items():
        for dtype in (
            (torch.bfloat16, torch.float32, F64) if place in ("eager", "without kernels") else (torch.float32,)
        ):
            x = order(randn(2, 3, 5, 8, dtype=dtype))
            got, want = (PLACES[place](cls(8, dtype=dtype), x) for cls in (RMSNorm, nn.RMSNorm))
            if place == "traced":  # which sees no strides
                want = want.contiguous()
            assert got.shape == want.shape
            assert got.stride() == want.stride() or not x.numel(), (name, dtype)


@LIES
@pytest.mark.parametrize("name", ORDERS)
def test_gradients_lie_as_those_of_the_built_in(name: str) -> None:
    """Where the gradient of y lies as y does: that of the built-in one follows it, on a CPU."""
    for dtype, shape in itertools.product((torch.bfloat16, torch.float32, F64), (8, (5, 8))):
        x, found = ORDERS[name](randn(2, 3, 5, 8, dtype=dtype)), []
        if x.shape[-2] != 5:
            continue
        for cls in (RMSNorm, nn.RMSNorm):
            leaf, layer = x.detach().requires_grad_(), randomised(cls(shape, dtype=dtype))
            y = layer(leaf)
            dy = torch.empty_like(y).copy_(randn(*x.shape, dtype=dtype, seed=1))
            found.append((y, *torch.autograd.grad(y, (leaf, layer.weight), dy)))
        for got, want in zip(*found, strict=True):
            assert got.stride() == want.stride()
        assert ((found[0][0] - found[1][0]).abs() <= ulp_bound(40, dtype) * found[1][0].abs()).all()


@LIES
@pytest.mark.parametrize("name", ORDERS)
def test_every_result_lies_as_y_of_the_built_in(name: str) -> None:
    """Also h, y of other axes, with a gate or a mask, the formula of the gradients, and 1 / rho without gaps."""
    x = ORDERS[name](randn(2, 3, 5, 8))
    want, z = nn.RMSNorm(8)(x).stride(), ORDERS["columns first"](torch.ones(x.shape))
    ones = [torch.ones(size) for size in x.shape]
    outputs = [
        *rms_norm(x, residual=z), *rms_norm(x, ones[-1], residual=z.bfloat16()), rms_norm(x, gate=z),
        rms_norm(x, mask=z > 0), rms_norm(x, ones[1], axis=1), rms_norm(x, ones[1], axis=-1, feature_axis=1),
        *rms_norm(x, ones[1], axis=1, residual=z), rms_norm(x, ones[1], axis=1, gate=z),
        rms_norm(x, ones[0], axis=0, out_dtype=F64), rms_norm_vjp(z, x)[0], rms_norm_vjp(z, x, ones[1], axis=1)[0],
    ]  # fmt: skip
    assert [y.stride() for y in outputs] == [want] * len(outputs) or not x.numel()
    for options in ({"axis": 0}, {"axis": 1}, {"axis": -1, "feature_axis": (0, -1)}):
        assert rms_norm(x, return_inverse_rms=True, **options)[1].is_contiguous()


@pytest.mark.needs("torch>=2.6", "jagged tensors have no rms_norm in 2.5, the built-in one either")
def test_jagged_rows() -> None:
    """A nested tensor: sequences of different lengths, no padding."""
    layer, parts = randomised(RMSNorm(8)), [randn(2, 8), randn(5, 8, seed=1), randn(1, 8, seed=2)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    y = layer(nested)
    assert all(are_alike(got, layer(part)) for got, part in zip(y.unbind(), parts, strict=True))
    whole = torch.cat(parts).requires_grad_()
    y.values().square().sum().backward()
    gain, layer.weight.grad = layer.weight.grad, None
    layer(whole).square().sum().backward()
    assert are_alike(nested.grad.values(), whole.grad)
    assert are_alike(gain, layer.weight.grad)
