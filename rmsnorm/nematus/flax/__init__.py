"""Nematus's recurrent cells, RNNSearch and Transformer in Flax."""

from rmsnorm.nematus.flax.model import RNNSearch, Transformer
from rmsnorm.nematus.flax.recurrent import GRU, LSTM, NematusGRU, gru, lstm, nematus_gru

__all__ = ["GRU", "LSTM", "NematusGRU", "RNNSearch", "Transformer", "gru", "lstm", "nematus_gru"]
