"""Nematus's recurrent cells, RNNSearch and Transformer in NumPy: the golden, with analytic gradients."""

from rmsnorm.nematus.numpy.recurrent import gru, gru_vjp, lstm, lstm_vjp, nematus_gru, nematus_gru_vjp
from rmsnorm.nematus.numpy.rnnsearch import RNNSearch
from rmsnorm.nematus.numpy.transformer import Transformer

__all__ = ["RNNSearch", "Transformer", "gru", "gru_vjp", "lstm", "lstm_vjp", "nematus_gru", "nematus_gru_vjp"]
