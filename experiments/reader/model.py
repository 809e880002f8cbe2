"""The attentive reader of the authors' Theano program in PyTorch, with the options that the paper has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm.nematus.cells import Shapes, cell_shapes
from rmsnorm.nematus.config import Norm
from rmsnorm.nematus.torch_models import Named, lstm

SMALL: Final = 1e-8  # is added to a probability before its logarithm
_ENCODERS: Final = ("encoder_desc_word", "encoder_q")


@dataclass(frozen=True)
class Config:
    """Sizes and norm of an attentive reader.

    Attributes:
        words: size of the vocabulary, which is also that of the answers.
        width, embedding, hidden: sizes of a state of an LSTM, of a word, and of the layer before the logits.
        norm: of every LSTM.
        keep: words and the layer before the logits are kept with this probability in training, and multiplied by it in
            evaluation.
    """

    words: int
    width: int
    embedding: int
    hidden: int
    norm: Norm
    keep: float = 1.0

    def shapes(self) -> Shapes:
        """Shapes of all parameters, by the names of the authors' archives."""
        both, width, hidden = 2 * self.width, self.width, self.hidden
        shapes: Shapes = {"Wemb_word": (self.words, self.embedding)}
        for prefix in (encoder + direction for encoder in _ENCODERS for direction in ("", "_r")):
            cell = cell_shapes("lstm", self.embedding, width, self.norm)
            shapes |= {f"{prefix}_{name}": shape for name, shape in cell.items()} | {f"{prefix}_h0": (width,)}
        shapes |= {"ff_att_bi_dq": (both, both), "ff_att_ctx_W": (both, width), "ff_att_ctx_b": (width,)}
        shapes |= {"ff_att_q_W": (both, width), "ff_att_proj": (width,), "ff_out_ctx_W": (both, hidden)}
        shapes |= {"ff_out_q_W": (both, hidden), "ff_out_mean_d_W": (both, hidden), "ff_out_q_b": (hidden,)}
        return shapes | {"ff_logit_W": (hidden, self.words), "ff_logit_b": (self.words,)}


class Outputs(NamedTuple):
    """What a reader computes, for a batch.

    Attributes:
        document_states: (length, batch, 2 width).
        query_representation: (batch, 2 width), the last states of both directions.
        alphas: (length, batch, 1), the attention.
        attended_document: (batch, 2 width).
        logits, probs: (batch, words).
    """

    document_states: Tensor
    query_representation: Tensor
    alphas: Tensor
    attended_document: Tensor
    logits: Tensor
    probs: Tensor


class AttentiveReader(Named):
    """Reads documents and queries in both directions; the answer sees the attended document, its mean and the query.

    Parameters have the names of the authors' archives.
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config
        self.eval()

    def forward(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any) -> Outputs:
        """All outputs for a batch: ids of documents and queries, (words, batch), and their masks."""
        width, p = self.config.width, self.by_name()
        like = p["Wemb_word"]
        desc, q = (torch.as_tensor(ids).long() for ids in (desc, q))
        mask, q_mask = (torch.as_tensor(mask).to(like) for mask in (desc_mask, q_mask))
        document = self._encode(p, "encoder_desc_word", self._drop(functional.embedding(desc, like)), mask)
        states = self._encode(p, "encoder_q", self._drop(functional.embedding(q, like)), q_mask)
        query = torch.cat((states[-1, :, :width], states[0, :, width:]), -1)
        alphas, context = _attend(p, document, mask, query)
        before = context @ p["ff_out_ctx_W"] + query @ p["ff_out_q_W"] + p["ff_out_q_b"]
        mean = (document * (mask / mask.sum(0))[..., None]).sum(0)
        logits = self._drop((before + mean @ p["ff_out_mean_d_W"]).tanh()) @ p["ff_logit_W"] + p["ff_logit_b"]
        return Outputs(document, query, alphas[..., None], context, logits, logits.softmax(-1))

    def cost(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any, ans: Any) -> Tensor:
        """The mean of -log(probability of the answer + 1e-8)."""
        probs = self(desc, desc_mask, q, q_mask).probs
        return -(probs.gather(1, torch.as_tensor(ans).long()[:, None]) + SMALL).log().mean()

    def _drop(self, x: Tensor) -> Tensor:
        """The authors' dropout: it does not scale what it keeps; evaluation multiplies by the probability to keep."""
        keep = self.config.keep
        return x * torch.full_like(x, keep).bernoulli() if self.training and keep < 1 else x * keep

    def _encode(self, p: Mapping[str, Tensor], name: str, x: Tensor, mask: Tensor) -> Tensor:
        """States (length, batch, 2 width) of the LSTM of this name, and of that from the last to the first."""
        forward = self._cell(p, name, x, mask)
        backward = self._cell(p, f"{name}_r", x.flip(0), mask.flip(0))
        return torch.cat((forward, backward.flip(0)), -1)

    def _cell(self, p: Mapping[str, Tensor], prefix: str, x: Tensor, mask: Tensor) -> Tensor:
        own = {name.removeprefix(f"{prefix}_"): p[name] for name in p if name.rpartition("_")[0] == prefix}
        zeros = x.new_zeros(x.shape[1], self.config.width)
        return lstm(x, zeros + own.pop("h0"), zeros, own, mask=mask, norm=self.config.norm)[0]


def _attend(p: Mapping[str, Tensor], document: Tensor, mask: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (length, batch), and their sum of the document."""
    masked = document * mask[..., None]
    before = document @ p["ff_att_ctx_W"] + p["ff_att_ctx_b"] + query @ p["ff_att_q_W"]
    similarity = (masked @ p["ff_att_bi_dq"]) * (query @ p["ff_att_bi_dq"])
    scores = (before + similarity.sum(-1, keepdim=True)).tanh() @ p["ff_att_proj"]
    alphas = mask * (scores - scores.amax(0)).exp()
    alphas = alphas / alphas.sum(0)
    return alphas, (masked * alphas[..., None]).sum(0)
