"""The checks of a group of PyTorch's processes, and one of these; test_torch_distributed starts and reads all."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_group_models
from kit import BY_NAME
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_arrays import are_alike, to_numpy, to_torch
from torch_group_models import draw, mesh_of, whole

import rmsnorm
from rmsnorm.parity.cases import Data, make
from rmsnorm.parity.judge import Outcome, compare, expect
from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp

ROWS = (3, 2, 4)
WIDTHS = {2: (8, 9), 4: (9,)}  # 9 on four processes is 3, 3, 3 and nothing
VARIANTS = ("standard", "gemma", "t5", "zhang_torch", "x_transformers")


class Traffic(CommDebugMode):
    """Name and number of elements of what every collective takes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.sent.append((name, args[0].numel()))
        return found


MASK_OF_ROWS = "mask of rows"  # every other name is that of a case of the parity kit


def drawn(name: str, width: int, variant: str, dtype: str) -> Data:
    """A case of the parity kit with a bias and with rows of that width."""
    case = BY_NAME["mask" if name == MASK_OF_ROWS else name]
    data = make(replace(case, shape=(*ROWS, width), bias=True), variant, dtype)
    if name == MASK_OF_ROWS:
        data = replace(data, mask=data.mask[..., :1], x=np.where(np.isnan(data.x), 1, data.x).astype(data.x.dtype))
    return data


def spread_over_features(dtype: str) -> None:
    """Shard(-1): values and gradients are the golden's, and only sums over the devices travel."""
    mesh = mesh_of(distributed.get_world_size())
    calls = [(variant, "rows") for variant in (rmsnorm.PRESETS if dtype == "float32" else VARIANTS)]
    calls += [("llama", name) for name in ("partial 0.3", MASK_OF_ROWS, "mask", "mask, partial")]
    for (variant, name), width in itertools.product(calls, WIDTHS[mesh.size()]):
        data = drawn(name, width, variant, dtype)
        x, scale, bias, dy = (
            distribute_tensor(to_torch(each), mesh, [Shard(each.ndim - 1)])
            for each in (data.x, data.scale, data.bias, data.dy)
        )
        leaves = [each.requires_grad_() for each in (x, scale, bias)]
        options = dict(data.options)
        if data.mask is not None:
            at = Replicate() if name == MASK_OF_ROWS else Shard(3)
            options["mask"] = distribute_tensor(torch.from_numpy(data.mask), mesh, [at])
        with Traffic() as forward:
            y = rms_norm(*leaves, **options)
        with Traffic() as backward:
            y.backward(dy)
        sums = np.prod(ROWS)  # one number a row
        for traffic in (forward, backward):
            assert traffic.sent, "nothing travelled"
            assert all(each == ("all_reduce", sums) for each in traffic.sent), traffic.sent
        if (variant, dtype, name) == ("llama", "float32", "rows"):
            assert len(forward.sent) == len(backward.sent) == 1
        assert y.placements == x.grad.placements == (Shard(3),)
        assert all(leaf.grad.placements == (Shard(0),) for leaf in leaves[1:])
        primals = [leaf.detach() for leaf in leaves]
        by_formula = rms_norm_vjp(dy, *primals, **options)
        names = ("dx", "dscale", "dbias")
        results = [("y", y), *zip(names, (leaf.grad for leaf in leaves), strict=True)]
        results += zip(names, by_formula, strict=True)
        expected = expect(data)
        for quantity, result in results:
            (verdict,) = compare(Outcome({quantity: [to_numpy(whole(result))]}), {quantity: expected[quantity]})
            assert verdict.passed, (variant, name, verdict)


def bfloat16() -> None:
    spread_over_features("bfloat16")


def float32() -> None:
    spread_over_features("float32")


def float64() -> None:
    spread_over_features("float64")


def mixed_placements() -> None:
    """Whatever lies where, pending sums among it: y, h and the gradients are those of one process."""
    world = distributed.get_world_size()
    mesh = mesh_of(world)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16)):
        x, dy, scale, bias = map(to_torch, draw(9, "float32", seed))
        residual, x = (2 * dy.roll(1)).to(torch.float32), x.to(dtype)
        want, h = one_process(x, scale, bias, residual, dy)
        places = (Shard(0), Shard(1), Shard(2), Replicate())
        combinations = itertools.product((*places, Partial()), (Shard(0), Replicate()), places)
        # of the second dtype every third, which has each placement of each tensor
        for at_x, at_scale, at_residual in list(combinations)[:: 1 + 2 * seed]:
            leaves = [
                pending(x, mesh) if at_x.is_partial() else distribute_tensor(x, mesh, [at_x]),
                distribute_tensor(scale, mesh, [at_scale]),
                distribute_tensor(bias, mesh, [Replicate()]),
                distribute_tensor(residual, mesh, [at_residual]),
            ]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            y, carried = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
            assert torch.equal(whole(carried), h)
            gradient = pending(dy.to(y.dtype), mesh) if seed else distribute_tensor(dy.to(y.dtype), mesh, [Replicate()])
            torch.autograd.backward([y, carried], [gradient, torch.ones_like(carried)])
            assert all(map(are_alike, map(whole, [y, *(leaf.grad for leaf in leaves)]), want))


def pending(tensor: Any, mesh: Any) -> Any:
    """A DTensor of that value: two processes hold half of it, whose sum is exact in any order, the others nothing."""
    return DTensor.from_local(tensor / 2 if mesh.get_local_rank() < 2 else 0 * tensor, mesh, [Partial()])


def one_process(x: Any, scale: Any, bias: Any, residual: Any, dy: Any) -> Any:
    leaves = [each.clone().requires_grad_() for each in (x, scale, bias, residual)]
    y, h = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
    torch.autograd.backward([y, h], [dy.to(y.dtype), torch.ones_like(h)])
    return [y, *(leaf.grad for leaf in leaves)], h.detach()


def two_dimensions() -> None:
    """Rows over one dimension of the mesh, features over the other; several axes; an axis that is not the last."""
    mesh = mesh_of(2, distributed.get_world_size() // 2)
    x, dy, scale, _ = map(to_torch, draw(9, "float32"))
    cases = [
        ({}, scale, [Shard(0), Shard(2)], [Replicate(), Shard(0)]),
        ({}, scale, [Shard(2), Shard(2)], [Shard(0), Shard(0)]),
        ({"axis": (1, 2)}, dy[0].clone(), [Shard(0), Shard(2)], [Replicate(), Shard(1)]),
        ({"axis": (1, 2)}, dy[1].clone(), [Shard(1), Shard(2)], [Shard(0), Shard(1)]),
        ({"axis": 1}, scale[:4].clone(), [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
        ({"axis": (0, 2), "feature_axis": 2}, scale, [Shard(0), Shard(2)], [Replicate(), Shard(0)]),
    ]
    for options, gain, at_x, at_gain in cases:
        plain = [each.clone().requires_grad_() for each in (x, gain)]
        want = rms_norm(*plain, **options)
        want.backward(dy)
        leaves = [distribute_tensor(each, mesh, at).requires_grad_() for each, at in ((x, at_x), (gain, at_gain))]
        with Traffic() as traffic:
            y = rms_norm(*leaves, **options)
            y.backward(distribute_tensor(dy, mesh, at_x))
        assert {name for name, _ in traffic.sent} == {"all_reduce"}, traffic.sent
        got = map(whole, [y, *(leaf.grad for leaf in leaves)])
        assert all(map(are_alike, got, [want, *(leaf.grad for leaf in plain)]))


def second_derivatives() -> None:
    """The gradient of |dx|^2, features spread."""
    mesh = mesh_of(distributed.get_world_size())
    x, dy, scale, _ = map(to_torch, draw(9, "float64"))

    def product(x: Any, scale: Any, dy: Any) -> Any:
        y = rms_norm(x, scale, variant="gemma")
        (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, scale))

    want = product(*(each.clone().requires_grad_() for each in (x, scale)), dy)
    leaves = [distribute_tensor(each, mesh, [Shard(each.ndim - 1)]).requires_grad_() for each in (x, scale)]
    got = product(*leaves, distribute_tensor(dy, mesh, [Shard(2)]))
    for g, w in zip(got, want, strict=True):  # some hundred operations of 2^-53 on terms of the size of the largest
        assert (whole(g) - w).abs().max() <= 2.0**-44 * w.abs().max()


def compiled() -> None:
    """torch.compile takes distributed tensors through the composite, and in its graphs only sums travel, too."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    sent: list[set[tuple[str, int]]] = []

    def keep(graph: Any, _: Any) -> Any:
        found = [node for node in graph.graph.nodes if "_c10d_functional" in str(node.target)]
        sent.append({(str(node.target), node.args[0].meta["val"].numel()) for node in found})
        return make_boxed_func(graph)

    mesh = mesh_of(distributed.get_world_size())
    x, dy, scale, _ = map(to_torch, draw(9, "float32"))
    layer = RMSNorm(9, 1e-5, variant="gemma")
    layer.weight = nn.Parameter(distribute_tensor(scale, mesh, [Shard(0)]))
    plain = [each.clone().requires_grad_() for each in (x, scale)]
    want = rms_norm(*plain, variant="gemma", eps=1e-5)
    want.backward(dy)
    leaf = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    y = torch.compile(lambda x: layer(x), fullgraph=True, backend=aot_autograd(fw_compiler=keep))(leaf)
    y.backward(distribute_tensor(dy, mesh, [Shard(2)]))
    rows = x[..., 0].numel()
    travels = {("_c10d_functional.all_reduce.default", rows), ("_c10d_functional.wait_tensor.default", rows)}
    assert sent == [travels, travels], sent
    got = map(whole, (y, leaf.grad, layer.weight.grad))
    assert all(map(are_alike, got, (want, *(each.grad for each in plain))))


def run(rank: int, world: int, folder: Path, *names: str) -> None:
    """All checks in one group. A process that fails leaves, and the others lose it; they are ended from outside."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for name in names:
        try:
            getattr(torch_group_models, name, globals().get(name))()
        except BaseException:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
            os._exit(1)
        distributed.barrier()
        (folder / f"{name}.{rank}").write_text("holds")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
