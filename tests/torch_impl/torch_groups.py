"""The checks of a group of three processes of PyTorch; test_torch_distributed starts it.

Of models, parameters lie in parts (FSDP) or rows do (DDP); of the functions, any part of any tensor (DTensor).
"""

from __future__ import annotations

import itertools
import sys
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

WORLD, ROWS = 3, (3, 2, 4)
WIDTHS = {"float32": 8, "bfloat16": 4, "float64": 9}  # 3, 3 and 2 in a process, or 2, 2 and none, or 3 each
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
    return init_device_mesh("cpu", (WORLD,))


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def spread_over_features() -> None:
    """Shard(-1): values and gradients are the golden's, and only sums over the devices travel."""
    devices = mesh()
    for dtype, variant, name in ASKED:
        layout = f"rows of {WIDTHS[dtype]}"
        calls.LAYOUTS[layout] = ((*ROWS, WIDTHS[dtype]), {})
        data = calls.arguments_of({"variant": variant, "x": dtype, "layout": layout, "bias": "bias", **WITH[name]})
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
        assert scale.grad.placements == bias.grad.placements == (Shard(0),)
        by_formula = rms_norm_vjp(dy, *(leaf.detach() for leaf in leaves), **options)
        results = {"y": [y], **{f"d{key}": [leaf.grad, gradient] for key, leaf, gradient in
                                zip(("x", "scale", "bias"), leaves, by_formula, strict=True)}}  # fmt: skip
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
        pairs = (x, at_x), (scale, at_scale), (bias, Replicate()), (residual, at_residual)
        leaves = [placed(tensor, devices, at).requires_grad_() for tensor, at in pairs]
        y, h = rms_norm(*leaves[:3], residual=leaves[3], variant="llama")
        gradient = placed(dy, devices, Partial() if i % 2 else Replicate())
        torch.autograd.backward([y, h], [gradient, torch.ones_like(h)])
        assert all(map(are_alike, map(whole, [y, h, *(leaf.grad for leaf in leaves)]), want))


def placed(tensor: Any, devices: Any, at: Any) -> Any:
    """A DTensor of that value. As a sum to come, two processes hold half of it, which is exact, the others nothing."""
    if not at.is_partial():
        return distribute_tensor(tensor, devices, [at])
    return DTensor.from_local(tensor / 2 if devices.get_local_rank() < 2 else 0 * tensor, devices, [at])


class Block(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down, self.last = RMSNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), RMSNorm(8)

    def forward(self, x: Any) -> Any:
        return self.last(x + self.down(self.up(self.norm(x)).relu()))


def rows_of_this_process(x: Any) -> Any:
    return x.chunk(WORLD)[distributed.get_rank()]


def train(model: Any, shard: Any = lambda x: x) -> None:
    """A few steps of Adam, each on another batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(3):
        batch = torch.randn((6, 4, 8), generator=torch.Generator().manual_seed(step), dtype=torch.float64)
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

    want, model, half = Block().double(), Block().double(), Block()
    train(want)
    for layer in (model.norm, model.last, model):
        fully_shard(layer, mesh=mesh())
    assert isinstance(model.norm.weight, DTensor)
    train(model, rows_of_this_process)
    same_parameters(model, want)
    fully_shard(half, mesh=mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    y = half(torch.ones(2, 8))
    y.sum().backward()
    assert (y.dtype, half.norm.weight.grad.dtype) == (torch.bfloat16, torch.float32)


def run(rank: int, folder: str, names: list[str]) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    for name in names:
        globals()[name]()
    distributed.destroy_process_group()


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    torch.multiprocessing.start_processes(run, (folder, names), nprocs=WORLD, start_method="fork")
    print(*names)
