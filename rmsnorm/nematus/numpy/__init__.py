"""Nematus's recurrent cells, RNNSearch and Transformer in NumPy: the golden, written apart from the other frameworks.

It has no gradients. Those of the frameworks are judged by differences of its losses.
"""

from rmsnorm.nematus.numpy.recurrent import gru, lstm, nematus_gru
from rmsnorm.nematus.numpy.rnnsearch import RNNSearch
from rmsnorm.nematus.numpy.transformer import Transformer

__all__ = ["RNNSearch", "Transformer", "gru", "lstm", "nematus_gru"]
