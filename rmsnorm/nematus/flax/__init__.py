"""Nematus's recurrent cells, RNNSearch and Transformer in Flax."""

from rmsnorm.nematus.flax.recurrent import GRU, LSTM, NematusGRU, gru, lstm, nematus_gru
from rmsnorm.nematus.flax.rnnsearch import RNNSearch
from rmsnorm.nematus.flax.transformer import Transformer

__all__ = ["GRU", "LSTM", "NematusGRU", "RNNSearch", "Transformer", "gru", "lstm", "nematus_gru"]
