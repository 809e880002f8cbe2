"""The options of an attentive reader, the names and shapes of its parameters, and its archives. No framework."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from experiments import archives
from experiments.options import check_flags, check_layer, check_number, check_sizes, pick
from rmsnorm.nematus.cells import Shapes, cell_shapes
from rmsnorm.nematus.config import Norm
from rmsnorm.nematus.sentences import check_ids
from rmsnorm.specification import errors

# The authors' names of the recurrent layers; prlnlstm is ours, with pRMSNorm.
LAYERS: Final[dict[str, Norm]] = {"lstm": "none", "lnlstm": "layer", "rlnlstm": "rms", "prlnlstm": "prms"}
_ENCODERS: Final = ("encoder_desc_word", "encoder_q", "encoder_desc_sent")
SMALL: Final = 1e-8  # is added to a probability before its logarithm, and to a number of words that divides


@dataclass(frozen=True)
class Config:
    """Options of an attentive reader, under the authors' names.

    Attributes:
        n_words_q: size of the vocabulary of documents and queries.
        n_words_ans: number of possible answers.
        dim, dim_word_desc, dim_word_ans: sizes of a state of an LSTM, of a word, and of the layer before the logits.
        encoder_desc_word, encoder_q, encoder_desc_sent: layers that read the document, the query and, with
            use_sent_reps, the sentences of the document: lstm, lnlstm, rlnlstm or prlnlstm.
        use_bidir: documents and queries are read in both directions.
        use_dq_sims: the attention also adds a similarity of word and query.
        use_desc_skip_c_g: the answer also sees the mean of the document.
        use_elu_g: the layer before the logits has ELU, not tanh.
        use_sent_reps: documents are sentences of words.
        learn_h0: the first state of every LSTM is a parameter.
        use_dropout, dropout_rate: words and the layer before the logits are kept with this probability in training,
            and multiplied by it in evaluation.
        others: options that do not matter here; they are written back.
    """

    n_words_q: int
    n_words_ans: int
    dim: int
    dim_word_desc: int
    dim_word_ans: int
    encoder_desc_word: str = "lstm"
    encoder_q: str = "lstm"
    encoder_desc_sent: str = "lstm"
    use_bidir: bool = False
    use_dq_sims: bool = False
    use_desc_skip_c_g: bool = False
    use_elu_g: bool = False
    use_sent_reps: bool = False
    learn_h0: bool = False
    use_dropout: bool = True
    dropout_rate: float = 0.5
    others: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        op = "reader"
        sizes = ("n_words_q", "n_words_ans", "dim", "dim_word_desc", "dim_word_ans")
        flags = ("use_bidir", "use_dq_sims", "use_desc_skip_c_g", "use_elu_g", "use_sent_reps", "learn_h0")
        check_sizes(op, **{name: getattr(self, name) for name in sizes})
        check_flags(op, **{name: getattr(self, name) for name in (*flags, "use_dropout")})
        check_number(op, "dropout_rate", self.dropout_rate, 0.0, 1.0)
        for name in _ENCODERS:
            check_layer(op, name, getattr(self, name), LAYERS)
        if self.others.get("dim_word_q", self.dim_word_desc) != self.dim_word_desc:
            got, want = self.others["dim_word_q"], f"{self.dim_word_desc}, as dim_word_desc"
            raise errors.out_of_domain(op, "dim_word_q", got, want, "both read the same words")

    @property
    def width(self) -> int:
        """Features of a state of the document and of the query."""
        return (2 if self.use_bidir else 1) * self.dim

    @property
    def keep(self) -> float:
        """The factor of dropout in evaluation."""
        return self.dropout_rate if self.use_dropout else 1.0

    def norm(self, encoder: str) -> Norm:
        return LAYERS[getattr(self, encoder)]

    def cells(self) -> dict[str, tuple[Norm, int]]:
        """Norm and input size of every LSTM, by the prefix of its parameters."""
        inputs = {"encoder_desc_word": self.dim_word_desc, "encoder_q": self.dim_word_desc}
        if self.use_sent_reps:
            inputs["encoder_desc_sent"] = self.width
        suffixes = ("", "_r")[: 2 if self.use_bidir else 1]
        return {name + suffix: (self.norm(name), size) for name, size in inputs.items() for suffix in suffixes}

    def shapes(self) -> Shapes:
        """Shapes of all parameters, by the names of the authors' archives.

        >>> Config(n_words_q=9, n_words_ans=5, dim=4, dim_word_desc=3, dim_word_ans=2).shapes()["ff_logit_W"]
        (2, 5)
        """
        width, dim, answer = self.width, self.dim, self.dim_word_ans
        shapes: Shapes = {"Wemb_word": (self.n_words_q, self.dim_word_desc)}
        if self.use_sent_reps:
            shapes["Wemb_sent"] = (width, width)
        for prefix, (norm, size) in self.cells().items():
            shapes |= {f"{prefix}_{name}": shape for name, shape in cell_shapes("lstm", size, dim, norm).items()}
            if self.learn_h0:
                shapes[f"{prefix}_h0"] = (dim,)
        if self.use_dq_sims:
            shapes["ff_att_bi_dq"] = (width, width)
        shapes |= {"ff_att_ctx_W": (width, dim), "ff_att_ctx_b": (dim,), "ff_att_q_W": (width, dim)}
        shapes |= {"ff_att_proj": (dim,), "ff_out_ctx_W": (width, answer), "ff_out_q_W": (width, answer)}
        if self.use_desc_skip_c_g:
            shapes["ff_out_mean_d_W"] = (width, answer)
        return shapes | {
            "ff_out_q_b": (answer,),
            "ff_logit_W": (answer, self.n_words_ans),
            "ff_logit_b": (self.n_words_ans,),
        }

    def options(self) -> dict[str, Any]:
        """The options as the authors' program has them."""
        own = asdict(self)
        return {"dim_word_q": self.dim_word_desc, "n_words_desc": self.n_words_q} | own.pop("others") | own


class Outputs(NamedTuple):
    """What a reader computes, for a batch.

    Attributes:
        document_states: (length, batch, width), of words or of sentences.
        query_representation: (batch, width), the last states of both directions.
        alphas: (length, batch, 1), the attention.
        attended_document: (batch, width).
        logits, probs: (batch, n_words_ans).
    """

    document_states: Any
    query_representation: Any
    alphas: Any
    attended_document: Any
    logits: Any
    probs: Any


def load(
    path: str | os.PathLike[str], options: str | os.PathLike[str] | Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, Any]]:
    """Read an attentive reader that the authors' program wrote: configuration, and arrays by their names.

    Args:
        path: the archive.
        options: of the model, or their file (JSON, or a pickle of plain values), if it has no usual name.

    Raises:
        FileNotFoundError: there is no archive, or there are no options.
        TypeError: an array is not floating-point.
        ValueError: the files are damaged, contain objects, or do not fit each other.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from experiments.reader.golden import AttentiveReader
        >>> config = Config(n_words_q=9, n_words_ans=5, dim=4, dim_word_desc=3, dim_word_ans=2, encoder_q="rlnlstm")
        >>> with TemporaryDirectory() as folder:
        ...     save(f"{folder}/lstm_s1.npz", config, {name: np.ones(shape) for name, shape in config.shapes().items()})
        ...     model = AttentiveReader(*load(f"{folder}/lstm_s1.npz"))
        >>> model(np.ones((6, 1), int), np.ones((6, 1)), np.ones((2, 1), int), np.ones((2, 1))).probs.round(2)
        array([[0.2, 0.2, 0.2, 0.2, 0.2]])
    """
    op = "reader.load"
    archive = archives.read(op, path, options)
    config = Config(**pick(op, Config, archive.options))
    layers: dict[str, Any] = {
        name: archives.written_layer(getattr(config, name), name, archive.shapes) for name in _ENCODERS
    }
    config = replace(config, **layers)
    return config, archives.arrays(op, archive, config.shapes())


def save(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write an archive for the authors' program, and its options as JSON in <path>.json.

    Raises:
        ValueError: these are not the parameters of the configuration.
    """
    archives.write("reader.save", path, config.options(), parameters, config.shapes())


def check_batch(config: Config, desc: Any, desc_mask: Any, q: Any, q_mask: Any) -> None:
    """Raise TypeError or ValueError unless these are a batch of documents and queries; arrays of NumPy.

    Args:
        desc: ids (words, batch), with use_sent_reps (words, sentences, batch); desc_mask has the same shape.
        q, q_mask: (words, batch).
    """
    op = "reader"
    rank = 3 if config.use_sent_reps else 2
    if np.ndim(desc) != rank or np.ndim(q) != 2 or not np.size(desc) or not np.size(q):
        want = f"{'(words, sentences, batch)' if rank == 3 else '(words, batch)'} and (words, batch), none of them 0"
        raise errors.out_of_domain(op, "desc and q", (np.shape(desc), np.shape(q)), want, "see use_sent_reps")
    if np.shape(desc)[-1] != np.shape(q)[1]:
        raise errors.wrong_shape(op, "q", np.shape(q), (len(q), np.shape(desc)[-1]), "the batch of desc")
    for name, ids, mask in (("desc", desc, desc_mask), ("q", q, q_mask)):
        check_ids(op, name, np.asarray(ids), config.n_words_q)
        if np.shape(mask) != np.shape(ids):
            raise errors.wrong_shape(op, f"{name}_mask", np.shape(mask), np.shape(ids), name)
    if not np.asarray(desc_mask).any(axis=tuple(range(rank - 1))).all():
        raise errors.out_of_domain(op, "desc_mask", 0, "a word in every document", "leave empty documents out")
