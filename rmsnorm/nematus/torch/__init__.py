"""Nematus's recurrent cells, RNNSearch and Transformer in PyTorch."""

from rmsnorm.nematus.torch.recurrent import GRU, LSTM, NematusGRU, gru, lstm, nematus_gru
from rmsnorm.nematus.torch.rnnsearch import RNNSearch
from rmsnorm.nematus.torch.transformer import Transformer

__all__ = ["GRU", "LSTM", "NematusGRU", "RNNSearch", "Transformer", "gru", "lstm", "nematus_gru"]
