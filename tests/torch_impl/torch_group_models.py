"""Checks of models whose parameters or rows lie in a group of PyTorch's processes; torch_groups runs them."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_arrays import are_alike, to_torch

from rmsnorm.torch_impl import RMSNorm


def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def draw(width: int, dtype: str, seed: int = 0, rows: tuple[int, ...] = (6, 4)) -> list[Any]:
    """x, dy, scale and bias, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*rows, width)) * np.exp(rng.standard_normal((*rows, 1)))
    dy, scale, bias = (rng.standard_normal(shape) for shape in (x.shape, width, width))
    return [each.astype("float16").astype(dtype) for each in (x, dy, scale, bias)]  # exact in every format but bf16


class Block(nn.Module):
    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.last = cls(8, 1e-5), nn.Linear(8, 12), nn.Linear(12, 8), cls(8, 1e-5)

    def forward(self, x: Any) -> Any:
        return self.last(x + self.down(self.up(self.norm(x)).relu()))


def block(cls: Any = RMSNorm, seed: int = 0, dtype: Any = torch.float64) -> Any:
    torch.manual_seed(seed)
    model = Block(cls)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model.to(dtype)


def batch(seed: int, dtype: Any = torch.float64) -> Any:
    return torch.randn((8, 4, 8), generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(model: Any, steps: int = 3, shard: Any = lambda x: x, seed: int = 0) -> list[float]:
    """Losses of a few steps of Adam, each on another batch."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.05), []
    for step in range(steps):
        loss = (model(shard(batch(seed + step))) - shard(batch(seed + step).roll(1, 0))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(whole(loss).item())
    return losses


def same_parameters(model: Any, other: Any) -> None:
    """Float64 in another order; Adam takes steps of 0.05 whatever the size of a gradient, so a wrong one would show."""
    found, wanted = dict(model.named_parameters()), dict(other.named_parameters())
    assert [name.removeprefix("module.") for name in found] == list(wanted)
    for (name, got), want in zip(found.items(), wanted.values(), strict=True):
        assert (whole(got) - want).abs().max() <= 1e-9, name


def rows_of_this_process(x: Any) -> Any:
    return x.chunk(distributed.get_world_size())[distributed.get_rank()]


def data_parallel() -> None:
    """DDP: each process has its rows; the parameters become those of one process with all of them."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True, "gradient_as_bucket_view": True}):
        want, model = block(), block(seed=distributed.get_rank())  # DDP sends those of process 0 to the others
        train(want)
        spread = nn.parallel.DistributedDataParallel(model, **options)
        train(spread, shard=rows_of_this_process)
        same_parameters(spread, want)


def fully_sharded() -> None:
    """FSDP2: parameters lie in parts, are gathered for a layer's turn, and its gradients are scattered again."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = mesh_of(distributed.get_world_size())
    for reshard in (True, False):
        want, model = block(), block()
        train(want)
        for layer in (model.norm, model.last):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        assert isinstance(model.norm.weight, DTensor)
        train(model, shard=rows_of_this_process)
        same_parameters(model, want)
        assert isinstance(model.norm, RMSNorm)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for cls in (RMSNorm, nn.RMSNorm):
        model = block(cls, dtype=torch.float32)
        fully_shard(model, mesh=mesh, mp_policy=half)
        y = model(rows_of_this_process(batch(0, torch.float32)))
        y.square().mean().backward()
        found.append(
            (y.dtype, model.norm.weight.dtype, model.norm.weight.grad.dtype, model.norm.weight.grad.placements)
        )
    assert found[0] == found[1]
    assert found[0][0] == torch.bfloat16
    with torch.device("meta"):
        model = Block(RMSNorm)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.norm.reset_parameters()
    assert torch.equal(whole(model.norm.weight), torch.ones(8))


def feature_parallel_layer() -> None:
    """A layer whose weight distribute_module has spread; its state dict goes to and from an ordinary one."""
    from torch.distributed import checkpoint
    from torch.distributed.tensor import distribute_module

    mesh = mesh_of(distributed.get_world_size())

    def partition(name: str, module: Any, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))

    x, dy, scale, _ = map(to_torch, draw(9, "float32"))
    plain = RMSNorm(9, variant="llama")
    plain.load_state_dict({"weight": scale})
    layer = distribute_module(copy.deepcopy(plain), mesh, partition)
    assert layer.weight.placements == (Shard(0),)
    want, got = plain(x), layer(distribute_tensor(x, mesh, [Shard(2)]))
    want.backward(dy)
    got.backward(distribute_tensor(dy, mesh, [Shard(2)]))
    assert are_alike(whole(got), want)
    assert are_alike(whole(layer.weight.grad), plain.weight.grad)
    folder = Path(sys.argv[3]) / "checkpoint"
    empty = {"weight": torch.zeros(9)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # of checkpoints in PyTorch 2.5
        checkpoint.save({"weight": layer.state_dict()["weight"]}, checkpoint_id=folder)
        checkpoint.load(empty, checkpoint_id=folder)
    theirs = nn.RMSNorm(9)
    theirs.load_state_dict(empty)
    assert torch.equal(theirs.weight, scale)
