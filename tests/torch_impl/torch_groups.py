"""The checks of a group of PyTorch's processes, and one of these; test_torch_distributed starts and reads all.

Of models, parameters lie in parts (FSDP) or rows do (DDP); of the functions, any part of any tensor (DTensor).
"""

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
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_arrays import are_alike, to_numpy, to_torch

from rmsnorm.parity.judge import Outcome, compare, expect
from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp

ROWS = (3, 2, 4)
WIDTHS = {2: (8, 9), 4: (9,)}  # 9 on four processes is 3, 3, 3 and nothing
WITH: dict[str, dict[str, str]] = {  # levels of the table of calls
    "rows": {}, "partial": {"partial": "0.3"}, "mask of rows": {"mask": "column mask"}, "mask": {"mask": "mask"},
    "mask, partial": {"mask": "mask", "partial": "0.3"},
}  # fmt: skip
ASKED = [
    *((dtype, "llama", name) for dtype in ("float32", "bfloat16") for name in WITH),
    *(("float64", variant, "rows") for variant in ("standard", "gemma", "zhang_torch", "x_transformers")),
]


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


def mesh() -> Any:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_over_features() -> None:
    """Shard(-1): values and gradients are the golden's, and only sums over the devices travel."""
    devices = mesh()
    for (dtype, variant, name), width in itertools.product(ASKED, WIDTHS[devices.size()]):
        calls.LAYOUTS[f"rows of {width}"] = ((*ROWS, width), {})
        row = {"variant": variant, "x": dtype, "layout": f"rows of {width}", "bias": "bias", **WITH[name]}
        data = calls.arguments_of(row)
        x, scale, bias, dy = (
            distribute_tensor(to_torch(each), devices, [Shard(each.ndim - 1)])
            for each in (data.x, data.scale, data.bias, data.dy)
        )
        leaves = [each.requires_grad_() for each in (x, scale, bias)]
        options = dict(data.options)
        if data.mask is not None:
            at = Replicate() if name == "mask of rows" else Shard(3)
            options["mask"] = distribute_tensor(torch.from_numpy(data.mask), devices, [at])
        with Traffic() as forward:
            y = rms_norm(*leaves, **options)
        with Traffic() as backward:
            y.backward(dy)
        for traffic in (forward, backward):  # one number a row
            assert traffic.sent, "nothing travelled"
            assert all(each == ("all_reduce", np.prod(ROWS)) for each in traffic.sent), traffic.sent
        if (variant, dtype, name) == ("llama", "float32", "rows"):
            assert len(forward.sent) == len(backward.sent) == 1
        assert y.placements == x.grad.placements == (Shard(3),)
        assert all(leaf.grad.placements == (Shard(0),) for leaf in leaves[1:])
        by_formula = rms_norm_vjp(dy, *(leaf.detach() for leaf in leaves), **options)
        results = {"y": [y], "dx": [x.grad], "dscale": [scale.grad], "dbias": [bias.grad]}
        for found, gradient in zip([*results.values()][1:], by_formula, strict=True):
            found.append(gradient)
        outcome = Outcome({key: [to_numpy(whole(t.detach())) for t in found] for key, found in results.items()})
        expected = {key: want for key, want in expect(data).items() if key in results}
        failed = [verdict for verdict in compare(outcome, expected) if not verdict.passed]
        assert not failed, (dtype, variant, name, failed)


def mixed_placements() -> None:
    """Whatever lies where, pending sums among it: y, h and the gradients are those of one process."""
    devices = mesh()
    x, residual, dy = (to_torch(np.random.default_rng(i).normal(size=(6, 4, 9)).astype("float32")) for i in range(3))
    scale, bias = (to_torch(np.random.default_rng(i).normal(size=9).astype("float32")) for i in (3, 4))
    alone = [each.clone().requires_grad_() for each in (x, scale, bias, residual)]
    y, h = rms_norm(*alone[:3], residual=alone[3], variant="llama")
    torch.autograd.backward([y, h], [dy, torch.ones_like(h)])
    want = [y, h, *(leaf.grad for leaf in alone)]
    places = (Shard(0), Shard(1), Shard(2), Replicate())
    combinations = itertools.product((*places, Partial()), (Shard(0), Replicate()), places)
    for i, (at_x, at_scale, at_residual) in enumerate(combinations):
        leaves = [
            pending(x, devices) if at_x.is_partial() else distribute_tensor(x, devices, [at_x]),
            distribute_tensor(scale, devices, [at_scale]),
            distribute_tensor(bias, devices, [Replicate()]),
            distribute_tensor(residual, devices, [at_residual]),
        ]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        y, h = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
        gradient = pending(dy, devices) if i % 2 else distribute_tensor(dy, devices, [Replicate()])
        torch.autograd.backward([y, h], [gradient, torch.ones_like(h)])
        assert all(map(are_alike, map(whole, [y, h, *(leaf.grad for leaf in leaves)]), want))


def pending(tensor: Any, devices: Any) -> Any:
    """A DTensor of that value: two processes hold half of it, whose sum is exact in any order, the others nothing."""
    return DTensor.from_local(tensor / 2 if devices.get_local_rank() < 2 else 0 * tensor, devices, [Partial()])


class Block(nn.Module):
    def __init__(self, cls: Any = RMSNorm, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down, self.last = cls(8, 1e-5), nn.Linear(8, 12), nn.Linear(12, 8), cls(8, 1e-5)

    def forward(self, x: Any) -> Any:
        return self.last(x + self.down(self.up(self.norm(x)).relu()))


def rows_of_this_process(x: Any) -> Any:
    return x.chunk(distributed.get_world_size())[distributed.get_rank()]


def train(model: Any, shard: Any = lambda x: x) -> None:
    """A few steps of Adam, each on another batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(3):
        batch = torch.randn((8, 4, 8), generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (model(shard(batch)) - shard(batch.roll(1, 0))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def same_parameters(model: Any, other: Any) -> None:
    """Float64 in another order; Adam takes steps of 0.05 whatever the size of a gradient, so a wrong one would show."""
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (whole(got) - want).abs().max() <= 1e-9, name


def data_parallel() -> None:
    """DDP: each process has its rows; the parameters become those of one process with all of them."""
    want, model = Block().double(), Block(seed=distributed.get_rank()).double()  # it sends those of process 0
    train(want)
    spread = nn.parallel.DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)
    train(spread, rows_of_this_process)
    same_parameters(spread, want)


def fully_sharded() -> None:
    """FSDP2: parameters lie in parts, are gathered for a layer's turn, and its gradients are scattered again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    want, model = Block().double(), Block().double()
    train(want)
    for layer in (model.norm, model.last, model):
        fully_shard(layer, mesh=mesh())
    assert isinstance(model.norm.weight, DTensor)
    train(model, rows_of_this_process)
    same_parameters(model, want)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for cls in (RMSNorm, nn.RMSNorm):
        model = Block(cls)
        fully_shard(model, mesh=mesh(), mp_policy=half)
        y = model(torch.ones(2, 8))
        y.square().mean().backward()
        weight = model.norm.weight
        found.append((y.dtype, weight.dtype, weight.grad.dtype, weight.grad.placements))
    assert found[0] == found[1]
    assert found[0][0] == torch.bfloat16
    with torch.device("meta"):
        model = Block()
    fully_shard(model, mesh=mesh())
    model.to_empty(device="cpu")
    model.norm.reset_parameters()
    assert torch.equal(whole(model.norm.weight), torch.ones(8))


def run(rank: int, world: int, folder: Path, *names: str) -> None:
    """All checks in one group. A process that fails leaves, and the others lose it; they are ended from outside."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for name in names:
        try:
            globals()[name]()
        except BaseException:
            (folder / f"{name}.{rank}").write_text(traceback.format_exc())
            os._exit(1)
        distributed.barrier()
        (folder / f"{name}.{rank}").write_text("holds")
    distributed.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
