"""Translation by the Transformer, with norms before its blocks, as Nematus has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from experiments.experiment import Experiment, option
from experiments.translation import NORMS, TranslationOptions, open_task


@dataclass(frozen=True)
class TransformerOptions(TranslationOptions):
    """Sizes of the Transformer."""

    steps: int = option(800, "Training steps; the paper has 300,000.", least=1)
    every: int = option(100, "Steps from one evaluation to the next.", least=1)
    framework: str = option("torch", "Framework:", choices=("torch", "flax"))
    rate: float = option(0.003, "Learning rate of Adam; Nematus has 1e-4.", least=0)
    state: int = option(64, "Size of the states; Nematus has 512.", least=4)
    inner: int = option(256, "Size of the inner layers; Nematus has 2048.", least=1)
    heads: int = option(4, "Heads of attention; Nematus has 8.", least=1)
    depth: int = option(2, "Layers of the encoder and of the decoder; Nematus has 6.", least=1)

    def model(self) -> dict[str, Any]:
        sizes = {"embedding_size": self.state, "state_size": self.state, "transformer_ffn_hidden_size": self.inner}
        depths = {"transformer_enc_depth": self.depth, "transformer_dec_depth": self.depth}
        return {**sizes, **depths, "model_type": "transformer", "transformer_num_heads": self.heads}


EXPERIMENT = Experiment(
    name="transformer",
    title="translation by the Transformer",
    quality="BLEU",
    norms=NORMS,
    options=TransformerOptions,
    open=open_task,
    level=80.0,
    margin=5.0,
    paper={"rms": -6.9, "prms": -9.3},
)
