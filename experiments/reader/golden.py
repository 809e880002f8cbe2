"""The attentive reader in NumPy: the golden, with analytic gradients. The dtype is that of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.reader.config import SMALL, Config, Outputs, check_batch
from rmsnorm.nematus.numpy.parameters import Array, Parameters, Pullback, identity, project, rows
from rmsnorm.nematus.numpy.recurrent import lstm, lstm_vjp
from rmsnorm.nematus.sentences import check_ids

__all__ = ["AttentiveReader"]


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
        return self._forward(Parameters(self.parameters), desc, desc_mask, q, q_mask)[0]

    def cost(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any, ans: Any) -> Any:
        """The mean of -log(probability of the answer + 1e-8)."""
        probs = self(desc, desc_mask, q, q_mask).probs
        return _cost(probs, self._answers(ans))[0]

    def gradients(self, desc: Any, desc_mask: Any, q: Any, q_mask: Any, ans: Any) -> dict[str, Array]:
        """The gradients of the cost, by the names of the parameters."""
        p = Parameters(self.parameters)
        outputs, pullback = self._forward(p, desc, desc_mask, q, q_mask)
        pullback(_cost(outputs.probs, self._answers(ans))[1])
        return p.gradients

    def _answers(self, ans: Any) -> Array:
        answers = np.asarray(ans)
        check_ids("reader", "ans", answers, self.config.n_words_ans)
        return answers.astype(int)

    def _forward(self, p: Parameters, desc: Any, desc_mask: Any, q: Any, q_mask: Any) -> tuple[Outputs, Any]:
        config = self.config
        check_batch(config, desc, desc_mask, q, q_mask)
        dtype = p["Wemb_word"].dtype
        words, words_pullback = self._embed(p, np.asarray(desc).reshape(len(desc), -1))
        word_mask = np.asarray(desc_mask, dtype)
        document, document_pullback = self._encode(p, "encoder_desc_word", words, word_mask.reshape(len(desc), -1))
        mask: Array = word_mask
        sentence_pullback: Pullback = identity
        if config.use_sent_reps:
            document, mask, sentence_pullback = self._sentences(p, document, word_mask)
        q_words, q_words_pullback = self._embed(p, np.asarray(q))
        q_states, q_pullback = self._encode(p, "encoder_q", q_words, np.asarray(q_mask, dtype))
        query = np.concatenate((q_states[-1, :, : config.dim], q_states[0, :, config.dim :]), axis=-1)
        alphas, context, attention_pullback = _attend(p, document, mask, query)
        logits, answer_pullback = self._answer(p, document, mask, query, context)

        def pullback(dlogits: Array) -> None:
            ddocument, dquery, dcontext = answer_pullback(dlogits)
            more, dquery_attention = attention_pullback(dcontext)
            dquery = dquery + dquery_attention
            dq_states = np.zeros_like(q_states)
            dq_states[-1, :, : config.dim] = dquery[:, : config.dim]
            dq_states[0, :, config.dim :] += dquery[:, config.dim :]
            q_words_pullback(q_pullback(dq_states))
            words_pullback(document_pullback(sentence_pullback(ddocument + more)))

        probs = np.exp(logits - logits.max(axis=1, keepdims=True))
        probs = probs / probs.sum(axis=1, keepdims=True)
        return Outputs(document, query, alphas[..., None], context, logits, probs), pullback

    def _embed(self, p: Parameters, ids: Array) -> tuple[Array, Callable[[Array], None]]:
        table = p["Wemb_word"]
        keep = np.asarray(self.config.keep, table.dtype)

        def pullback(dwords: Array) -> None:
            dtable = np.zeros_like(table)
            np.add.at(dtable, ids.ravel(), rows(dwords * keep))
            p.add("Wemb_word", dtable)

        return table[ids] * keep, pullback

    def _encode(self, p: Parameters, name: str, x: Array, mask: Array) -> tuple[Array, Pullback]:
        """States (length, batch, width) of the LSTM of this name, and of that from the last to the first."""
        forward, forward_pullback = self._cell(p, name, name, x, mask)
        if not self.config.use_bidir:
            return forward, forward_pullback
        backward, backward_pullback = self._cell(p, name, f"{name}_r", x[::-1], mask[::-1])
        dim = self.config.dim

        def pullback(dstates: Array) -> Array:
            return forward_pullback(dstates[..., :dim]) + backward_pullback(dstates[::-1, :, dim:])[::-1]

        return np.concatenate((forward, backward[::-1]), axis=-1), pullback

    def _cell(self, p: Parameters, name: str, prefix: str, x: Array, mask: Array) -> tuple[Array, Pullback]:
        zeros = np.zeros((x.shape[1], self.config.dim), x.dtype)
        h0 = zeros + p[f"{prefix}_h0"] if self.config.learn_h0 else zeros
        own = {
            key.removeprefix(f"{prefix}_"): value
            for key, value in p.values.items()
            if key.rpartition("_")[0] == prefix and not key.endswith("_h0")
        }
        options: dict[str, Any] = {"mask": mask, "norm": self.config.norm(name)}
        states, _ = lstm(x, h0, zeros, own, **options)

        def pullback(dstates: Array) -> Array:
            dx, dh0, _, gradients = lstm_vjp(dstates, np.zeros_like(states), x, h0, zeros, own, **options)
            for key, gradient in gradients.items():
                p.add(f"{prefix}_{key}", gradient)
            if self.config.learn_h0:
                p.add(f"{prefix}_h0", dh0.sum(axis=0))
            return dx

        return states, pullback

    def _sentences(self, p: Parameters, words: Array, mask: Array) -> tuple[Array, Array, Pullback]:
        """States of the sentences: of LSTMs over the projected means of their words."""
        shape = (*mask.shape, words.shape[-1])
        weights = (mask / (mask.sum(axis=0) + np.asarray(SMALL, mask.dtype)))[..., None]
        means = (words.reshape(shape) * weights).sum(axis=0)
        x, project_pullback = project(p, means, "Wemb_sent", None, None)
        sentence_mask = (mask.sum(axis=0) > 0).astype(mask.dtype)
        states, states_pullback = self._encode(p, "encoder_desc_sent", x, sentence_mask)

        def pullback(dstates: Array) -> Array:
            return (project_pullback(states_pullback(dstates)) * weights).reshape(words.shape)

        return states, sentence_mask, pullback

    def _answer(
        self, p: Parameters, document: Array, mask: Array, query: Array, context: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
        config = self.config
        before, context_pullback = project(p, context, "ff_out_ctx_W", None, None)
        from_query, query_pullback = project(p, query, "ff_out_q_W", "ff_out_q_b", None)
        before = before + from_query
        weights = (mask / mask.sum(axis=0))[..., None]
        if config.use_desc_skip_c_g:
            skipped, mean_pullback = project(p, (document * weights).sum(axis=0), "ff_out_mean_d_W", None, None)
            before = before + skipped
        g = np.where(before >= 0, before, np.expm1(np.minimum(before, 0))) if config.use_elu_g else np.tanh(before)
        keep = np.asarray(config.keep, g.dtype)
        logits, logits_pullback = project(p, g * keep, "ff_logit_W", "ff_logit_b", None)

        def pullback(dlogits: Array) -> tuple[Array, Array, Array]:
            slope = np.where(before >= 0, 1, g + 1).astype(g.dtype) if config.use_elu_g else 1 - g**2
            dbefore = logits_pullback(dlogits) * keep * slope
            ddocument = mean_pullback(dbefore) * weights if config.use_desc_skip_c_g else np.zeros_like(document)
            return ddocument, query_pullback(dbefore), context_pullback(dbefore)

        return logits, pullback


def _attend(
    p: Parameters, document: Array, mask: Array, query: Array
) -> tuple[Array, Array, Callable[[Array], tuple[Array, Array]]]:
    """Weights (length, batch), their sum of the document, and the pullback to document and query."""
    masked = document * mask[..., None]
    of_document, document_pullback = project(p, document, "ff_att_ctx_W", "ff_att_ctx_b", None)
    of_query, query_pullback = project(p, query, "ff_att_q_W", None, None)
    before = of_document + of_query
    if "ff_att_bi_dq" in p:
        left, left_pullback = project(p, masked, "ff_att_bi_dq", None, None)
        right, right_pullback = project(p, query, "ff_att_bi_dq", None, None)
        before = before + (left * right).sum(axis=-1, keepdims=True)
    hidden = np.tanh(before)
    scores = (hidden * p["ff_att_proj"]).sum(axis=-1)
    alphas = mask * np.exp(scores - scores.max(axis=0))
    alphas = alphas / alphas.sum(axis=0)
    weights = alphas[..., None]

    def pullback(dcontext: Array) -> tuple[Array, Array]:
        dmasked = weights * dcontext
        dalphas = (masked * dcontext).sum(axis=-1)
        dscores = (alphas * (dalphas - (alphas * dalphas).sum(axis=0)))[..., None]
        p.add("ff_att_proj", rows(dscores * hidden).sum(axis=0))
        dbefore = dscores * p["ff_att_proj"] * (1 - hidden**2)
        dquery = query_pullback(dbefore.sum(axis=0))
        if "ff_att_bi_dq" in p:
            dsimilarity = dbefore.sum(axis=-1, keepdims=True)
            dmasked = dmasked + left_pullback(dsimilarity * right)
            dquery = dquery + right_pullback((dsimilarity * left).sum(axis=0))
        return dmasked * mask[..., None] + document_pullback(dbefore), dquery

    return alphas, (masked * weights).sum(axis=0), pullback


def _cost(probs: Array, answers: Array) -> tuple[Any, Array]:
    """The cost, and its gradient by the logits."""
    index = np.arange(len(answers)), answers
    chosen = probs[index] + np.asarray(SMALL, probs.dtype)
    dprobs = np.zeros_like(probs)
    dprobs[index] = -1 / (len(answers) * chosen)
    return -np.log(chosen).mean(), probs * (dprobs - (probs * dprobs).sum(axis=1, keepdims=True))
