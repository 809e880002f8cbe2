"""The decoder in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timing.candidates import BUILTIN, LAYER_NORM, OURS, Call
from torch import nn
from torch.nn import functional

from rmsnorm.torch_impl import RMSNorm
from whole_models import RATE, VOCABULARY, Sizes, draw_decoding, draw_tokens

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    OURS: RMSNorm, BUILTIN: nn.RMSNorm, LAYER_NORM: nn.LayerNorm, "none": nn.Identity,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, sizes: Sizes, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.heads = sizes.heads
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Any, cache: Any = None) -> Any:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # (batch, heads, words, features)
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, norm) for _ in range(sizes.layers))
        self.norm = norm(sizes.width)
        self.output = nn.Linear(sizes.width, VOCABULARY, bias=False)

    def forward(self, tokens: Any, caches: Any = None) -> Any:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.output(self.norm(x)).float()


def step(op: str, norm: str, sizes: Sizes, dtype: str, mode: str) -> Call:
    torch.manual_seed(0)
    number_type = getattr(torch, dtype)
    model = Decoder(sizes, _NORMS[norm]).to(number_type)

    def loss_of(tokens: Any, targets: Any) -> Any:
        return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    run: Any = loss_of if op == "train" else model
    if mode == "compiled":
        run = torch.compile(run, dynamic=False)
    if op == "train":
        tokens, targets = (torch.from_numpy(array).long() for array in draw_tokens(sizes))
        optimizer = torch.optim.SGD(model.parameters(), RATE)

        def train() -> Any:
            loss = run(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return train
    word, drawn = draw_decoding(sizes)
    token = torch.from_numpy(word).long()
    caches = [tuple(torch.from_numpy(array).to(number_type).transpose(1, 2).contiguous() for array in pair)
              for pair in drawn]  # fmt: skip

    def decode() -> Any:
        with torch.inference_mode():
            return run(token, caches)

    return decode
