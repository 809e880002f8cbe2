"""Makes small untrained models, with which every command of docs/porting.md runs: python examples/nematus_models.py.

It writes into the current folder, or into the one that is named:

- model/, of Nematus v0.3 in TensorFlow with LayerNorm, and texts: test.src, test.trg, train.src, train.trg;
- theano/, of Theano Nematus with LayerNorm, whose options do not say so, and translations that were drawn from it:
  dev.src, dev.trg;
- output_dir/, an RNNSearch of zero with RMSNorm.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rmsnorm import nematus
from rmsnorm.nematus.names import variables
from rmsnorm.nematus.numpy_models import RNNSearch
from rmsnorm.nematus.vocabulary import batch, vocabularies

SIZES: dict[str, Any] = {"embedding_size": 6, "state_size": 5, "source_vocab_sizes": (9,), "target_vocab_size": 8}
NAMES = ("src.json", "trg.json")


def parameters_of(config: nematus.Config) -> dict[str, Any]:
    """Matrices whose products are about as large as their inputs; gains about 1, biases about 0."""
    rng, parameters = np.random.default_rng(6), {}
    for row in variables(config):
        value = rng.standard_normal(row.shape)
        if row.name.endswith(("/scale", "/new_std")):
            value = 1 + 0.3 * value
        else:
            value *= 0.4 if len(row.shape) == 1 else 1.5 / np.sqrt(row.shape[0])
        parameters[row.name] = value.astype("float32")
    return parameters


def save(folder: Path, name: str, **options: Any) -> None:
    """A model with dictionaries whose words are w2, w3 and so on."""
    folder.mkdir()
    config = nematus.Config(**SIZES, **options)
    for file, size in zip(NAMES, (9, 8), strict=True):
        words = ["eos", "UNK", *(f"w{index}" for index in range(2, size))]
        zeros = "".join(f"w{index}\n" for index in range(3, size))  # zero has three words before these
        entries = {word: index for index, word in enumerate(words)}
        (folder / file).write_text(zeros if config.dialect == "zero" else json.dumps(entries))
    form = nematus.save_theano if config.dialect == "theano" else nematus.save_tensorflow
    form(folder / name, config, parameters_of(config))


def main(folder: Path) -> None:
    dictionaries = {"dictionaries": list(NAMES)}
    v03 = {"dialect": "tensorflow-v0.3", "search": "costs", "rnn_enc_depth": 2, "rnn_dropout_hidden": 0.1}
    save(folder / "model", "model.npz", norm="layer", options=dictionaries, **v03)
    of_zero = {"src_vocab_file": NAMES[0], "tgt_vocab_file": NAMES[1], "scope_name": "nmt"}
    as_zero = {"dialect": "zero", "search": "zero", "eps": 1e-8, "masked_score": -1e8, "translation_maxlen": 4}
    save(folder / "output_dir", "model-7", norm="rms", options=of_zero, **as_zero)
    for name in ("train", "test"):
        (folder / f"{name}.src").write_text("w3 w4 w3\nw5\nw6 w7\n")
        (folder / f"{name}.trg").write_text("w2 w3 w4\nw5\nw7 w6\n")

    save(folder / "theano", "model.npz", norm="layer", dialect="theano", options=dictionaries)
    model = nematus.load(folder / "theano")
    rng, count = np.random.default_rng(0), 100
    lines = [" ".join(f"w{index}" for index in rng.integers(2, 9, 5)) for _ in range(count)]
    sources, target = vocabularies(model)
    x, x_mask = batch(lines, sources)
    y = np.zeros((6, count), np.int64)
    for time in range(len(y)):  # each word is drawn from what the model says of it
        logits = RNNSearch(model.config, model.parameters).logits(x, x_mask, y)[time]
        y[time] = (logits + rng.gumbel(size=logits.shape)).argmax(axis=-1)
    (folder / "dev.src").write_text("".join(f"{line}\n" for line in lines))
    (folder / "dev.trg").write_text("".join(f"{target.words(words)}\n" for words in y.T))
    path = folder / "theano" / "model.npz.json"
    options = {key: value for key, value in json.loads(path.read_text()).items() if "norm" not in key}
    path.write_text(json.dumps(options))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(Path(*sys.argv[1:2]))
