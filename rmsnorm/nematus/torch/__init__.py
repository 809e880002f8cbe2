"""Nematus's recurrent cells, RNNSearch and Transformer in PyTorch."""

from rmsnorm.nematus.torch.model import RNNSearch, Transformer
from rmsnorm.nematus.torch.recurrent import GRU, LSTM, NematusGRU, gru, lstm, nematus_gru

__all__ = ["GRU", "LSTM", "NematusGRU", "RNNSearch", "Transformer", "gru", "lstm", "nematus_gru"]
