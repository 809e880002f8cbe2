"""The attentive reader as a PyTorch module, as ``golden`` computes it, and with dropout in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.reader.config import SMALL, Config, Outputs, check_batch
from rmsnorm.nematus.sentences import check_ids
from rmsnorm.nematus.torch_models import Named, lstm
from rmsnorm.nematus.torch_operations import on_host
from rmsnorm.torch_impl.private import is_transformed

__all__ = ["AttentiveReader"]


class AttentiveReader(Named):
    """The authors' attentive reader: see golden.AttentiveReader.

    A new model is in evaluation mode. Its state dict has the names of the authors' archives.

    Args:
        config, parameters: as ``experiments.reader.config.load`` returns them.

    Raises:
        TypeError, ValueError: a batch does not fit the configuration.

    Example:
        >>> config = Config(n_words_q=9, n_words_ans=5, dim=4, dim_word_desc=3, dim_word_ans=2)
        >>> model = AttentiveReader(config, {name: torch.zeros(shape) for name, shape in config.shapes().items()})
        >>> ids, mask = torch.ones(6, 2, dtype=torch.long), torch.ones(6, 2)
        >>> model(ids, mask, ids, mask).probs[0].detach()
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000])
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.config = config
        self.eval()

    def forward(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any) -> Outputs:
        """All outputs for a batch: desc (words, batch) or (words, sentences, batch), q (words, batch), their masks."""
        config, p = self.config, self.by_name()
        if not is_transformed():  # in a graph there are no values to check
            check_batch(config, *map(on_host, (desc, desc_mask, q, q_mask)))
        like = p["Wemb_word"]
        desc, q = (torch.as_tensor(ids, device=like.device).long() for ids in (desc, q))
        word_mask, q_mask = (torch.as_tensor(mask).to(like) for mask in (desc_mask, q_mask))
        words = self._drop(functional.embedding(desc.flatten(1), like))
        document, mask = self._encode(p, "encoder_desc_word", words, word_mask.flatten(1)), word_mask
        if config.use_sent_reps:
            document, mask = self._sentences(p, document, word_mask)
        states = self._encode(p, "encoder_q", self._drop(functional.embedding(q, like)), q_mask)
        query = torch.cat((states[-1, :, : config.dim], states[0, :, config.dim :]), -1)
        alphas, context = _attend(p, document, mask, query)
        logits = self._answer(p, document, mask, query, context)
        return Outputs(document, query, alphas[..., None], context, logits, logits.softmax(-1))

    def cost(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any, ans: Any) -> Tensor:
        """The mean of -log(probability of the answer + 1e-8)."""
        if not is_transformed():
            check_ids("reader", "ans", on_host(ans), self.config.n_words_ans)
        probs = self(desc, desc_mask, q, q_mask).probs
        answers = torch.as_tensor(ans, device=probs.device).long()
        return -(probs.gather(1, answers[:, None]) + SMALL).log().mean()

    def _drop(self, x: Tensor) -> Tensor:
        """The authors' dropout: it does not scale what it keeps; evaluation multiplies by the probability to keep."""
        if self.training and self.config.use_dropout:
            return x * torch.full_like(x, self.config.keep).bernoulli()
        return x * self.config.keep if self.config.use_dropout else x

    def _encode(self, p: Mapping[str, Tensor], name: str, x: Tensor, mask: Tensor) -> Tensor:
        """States (length, batch, width) of the LSTM of this name, and of that from the last to the first."""
        forward = self._cell(p, name, name, x, mask)
        if not self.config.use_bidir:
            return forward
        backward = self._cell(p, name, f"{name}_r", x.flip(0), mask.flip(0))
        return torch.cat((forward, backward.flip(0)), -1)

    def _cell(self, p: Mapping[str, Tensor], name: str, prefix: str, x: Tensor, mask: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[1], self.config.dim)
        h0 = zeros + p[f"{prefix}_h0"] if self.config.learn_h0 else zeros
        own = {
            key.removeprefix(f"{prefix}_"): value
            for key, value in p.items()
            if key.rpartition("_")[0] == prefix and not key.endswith("_h0")
        }
        return lstm(x, h0, zeros, own, mask=mask, norm=self.config.norm(name))[0]

    def _sentences(self, p: Mapping[str, Tensor], words: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """States of the sentences: of LSTMs over the projected means of their words."""
        weights = (mask / (mask.sum(0) + SMALL))[..., None]
        means = (words.reshape(*mask.shape, -1) * weights).sum(0)
        sentence_mask = (mask.sum(0) > 0).to(mask)
        return self._encode(p, "encoder_desc_sent", means @ p["Wemb_sent"], sentence_mask), sentence_mask

    def _answer(
        self, p: Mapping[str, Tensor], document: Tensor, mask: Tensor, query: Tensor, context: Tensor
    ) -> Tensor:
        before = context @ p["ff_out_ctx_W"] + query @ p["ff_out_q_W"] + p["ff_out_q_b"]
        if self.config.use_desc_skip_c_g:
            before = before + (document * (mask / mask.sum(0))[..., None]).sum(0) @ p["ff_out_mean_d_W"]
        g = functional.elu(before) if self.config.use_elu_g else before.tanh()
        return self._drop(g) @ p["ff_logit_W"] + p["ff_logit_b"]


def _attend(p: Mapping[str, Tensor], document: Tensor, mask: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (length, batch), and their sum of the document."""
    masked = document * mask[..., None]
    before = document @ p["ff_att_ctx_W"] + p["ff_att_ctx_b"] + query @ p["ff_att_q_W"]
    if "ff_att_bi_dq" in p:
        similarity = (masked @ p["ff_att_bi_dq"]) * (query @ p["ff_att_bi_dq"])
        before = before + similarity.sum(-1, keepdim=True)
    scores = before.tanh() @ p["ff_att_proj"]
    alphas = mask * (scores - scores.amax(0)).exp()
    alphas = alphas / alphas.sum(0)
    return alphas, (masked * alphas[..., None]).sum(0)
