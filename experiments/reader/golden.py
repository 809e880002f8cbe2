"""The attentive reader in NumPy: the golden. The dtype is that of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from experiments.reader.config import SMALL, Config, Outputs, check_batch
from rmsnorm.nematus.numpy_models import lstm
from rmsnorm.nematus.numpy_operations import Array, softmax
from rmsnorm.nematus.sentences import check_ids

__all__ = ["AttentiveReader"]

Parameters: TypeAlias = Mapping[str, Array]


class AttentiveReader:
    """The authors' attentive reader, in evaluation.

    states = [LSTM of the words, LSTM of the words from the last to the first],   query = [last states of both]
    h = tanh(states Wc + b + query Wq + (states B)·(query B)),   alpha = softmax(h·w),   context = alpha·states
    logits = tanh(context W1 + query W2 + b + mean of states W3) W + b

    Args:
        config, parameters: as ``experiments.reader.config.load`` returns them.

    Raises:
        TypeError, ValueError: a batch does not fit the configuration.
    """

    def __init__(self, config: Config, parameters: Mapping[str, Any]) -> None:
        self.config, self.parameters = config, dict(parameters)

    def __call__(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any) -> Outputs:
        """All outputs for a batch: desc (words, batch) or (words, sentences, batch), q (words, batch), their masks."""
        config, p = self.config, self.parameters
        check_batch(config, desc, desc_mask, q, q_mask)
        dtype = p["Wemb_word"].dtype
        word_mask = np.asarray(desc_mask, dtype)
        words = self._embed(p, np.asarray(desc).reshape(len(desc), -1))
        document, mask = self._encode(p, "encoder_desc_word", words, word_mask.reshape(len(desc), -1)), word_mask
        if config.use_sent_reps:
            document, mask = self._sentences(p, document, word_mask)
        q_states = self._encode(p, "encoder_q", self._embed(p, np.asarray(q)), np.asarray(q_mask, dtype))
        query = np.concatenate((q_states[-1, :, : config.dim], q_states[0, :, config.dim :]), axis=-1)
        alphas, context = _attend(p, document, mask, query)
        logits = self._answer(p, document, mask, query, context)
        return Outputs(document, query, alphas[..., None], context, logits, softmax(logits, 1))

    def cost(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any, ans: Any) -> Any:
        """The mean of -log(probability of the answer + 1e-8)."""
        probs, answers = self(desc, desc_mask, q, q_mask).probs, np.asarray(ans)
        check_ids("reader", "ans", answers, self.config.n_words_ans)
        return -np.log(probs[np.arange(len(answers)), answers.astype(int)] + np.asarray(SMALL, probs.dtype)).mean()

    def _embed(self, p: Parameters, ids: Array) -> Array:
        table = p["Wemb_word"]
        return table[ids] * np.asarray(self.config.keep, table.dtype)

    def _encode(self, p: Parameters, name: str, x: Array, mask: Array) -> Array:
        """States (length, batch, width) of the LSTM of this name, and of that from the last to the first."""
        forward = self._cell(p, name, name, x, mask)
        if not self.config.use_bidir:
            return forward
        backward = self._cell(p, name, f"{name}_r", x[::-1], mask[::-1])
        return np.concatenate((forward, backward[::-1]), axis=-1)

    def _cell(self, p: Parameters, name: str, prefix: str, x: Array, mask: Array) -> Array:
        zeros = np.zeros((x.shape[1], self.config.dim), x.dtype)
        h0 = zeros + p[f"{prefix}_h0"] if self.config.learn_h0 else zeros
        own = {
            key.removeprefix(f"{prefix}_"): value
            for key, value in p.items()
            if key.rpartition("_")[0] == prefix and not key.endswith("_h0")
        }
        return lstm(x, h0, zeros, own, mask=mask, norm=self.config.norm(name))[0]

    def _sentences(self, p: Parameters, words: Array, mask: Array) -> tuple[Array, Array]:
        """States of the sentences: of LSTMs over the projected means of their words."""
        weights = (mask / (mask.sum(axis=0) + np.asarray(SMALL, mask.dtype)))[..., None]
        means = (words.reshape(*mask.shape, -1) * weights).sum(axis=0)
        sentence_mask = (mask.sum(axis=0) > 0).astype(mask.dtype)
        return self._encode(p, "encoder_desc_sent", means @ p["Wemb_sent"], sentence_mask), sentence_mask

    def _answer(self, p: Parameters, document: Array, mask: Array, query: Array, context: Array) -> Array:
        before = context @ p["ff_out_ctx_W"] + query @ p["ff_out_q_W"] + p["ff_out_q_b"]
        if self.config.use_desc_skip_c_g:
            weights = (mask / mask.sum(axis=0))[..., None]
            before = before + (document * weights).sum(axis=0) @ p["ff_out_mean_d_W"]
        elu = np.where(before >= 0, before, np.expm1(np.minimum(before, 0)))
        g = elu if self.config.use_elu_g else np.tanh(before)
        return g * np.asarray(self.config.keep, g.dtype) @ p["ff_logit_W"] + p["ff_logit_b"]


def _attend(p: Parameters, document: Array, mask: Array, query: Array) -> tuple[Array, Array]:
    """Weights (length, batch), and their sum of the document."""
    masked = document * mask[..., None]
    before = document @ p["ff_att_ctx_W"] + p["ff_att_ctx_b"] + query @ p["ff_att_q_W"]
    if "ff_att_bi_dq" in p:
        before = before + (masked @ p["ff_att_bi_dq"] * (query @ p["ff_att_bi_dq"])).sum(axis=-1, keepdims=True)
    scores = (np.tanh(before) * p["ff_att_proj"]).sum(axis=-1)
    alphas = mask * np.exp(scores - scores.max(axis=0))
    alphas = alphas / alphas.sum(axis=0)
    return alphas, (masked * alphas[..., None]).sum(axis=0)
