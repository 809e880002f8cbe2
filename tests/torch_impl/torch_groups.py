"""The checks of a group of PyTorch's processes, and one of these; test_torch_distributed starts and reads all."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import calls
import numpy as np
import torch
import torch_group_models
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_arrays import are_alike, to_numpy, to_torch
from torch_group_models import draw, mesh_of, whole

import rmsnorm
from rmsnorm.parity.judge import Outcome, compare, expect
from rmsnorm.torch_impl import rms_norm, rms_norm_vjp

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


WITH: dict[str, dict[str, str]] = {  # levels of the table of calls
    "rows": {}, "partial": {"partial": "0.3"}, "mask of rows": {"mask": "column mask"}, "mask": {"mask": "mask"},
    "mask, partial": {"mask": "mask", "partial": "0.3"},
}  # fmt: skip


def drawn(name: str, width: int, variant: str, dtype: str) -> calls.Arguments:
    """A call with a bias and with rows of that width."""
    calls.LAYOUTS[f"rows of {width}"] = ((*ROWS, width), {})
    row = {"variant": variant, "x": dtype, "layout": f"rows of {width}", "bias": "bias", **WITH[name]}
    return calls.arguments_of(row)


def spread_over_features(dtype: str) -> None:
    """Shard(-1): values and gradients are the golden's, and only sums over the devices travel."""
    mesh = mesh_of(distributed.get_world_size())
    asked = [(variant, "rows") for variant in (rmsnorm.PRESETS if dtype == "float32" else VARIANTS)]
    asked += [("llama", name) for name in WITH]
    for (variant, name), width in itertools.product(asked, WIDTHS[mesh.size()]):
        data = drawn(name, width, variant, dtype)
        x, scale, bias, dy = (
            distribute_tensor(to_torch(each), mesh, [Shard(each.ndim - 1)])
            for each in (data.x, data.scale, data.bias, data.dy)
        )
        leaves = [each.requires_grad_() for each in (x, scale, bias)]
        options = dict(data.options)
        if data.mask is not None:
            at = Replicate() if name == "mask of rows" else Shard(3)
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
