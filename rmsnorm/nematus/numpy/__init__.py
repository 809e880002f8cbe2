"""Nematus's recurrent cells, RNNSearch and Transformer in NumPy: the golden, written apart from the other frameworks.

It has no gradients, and so no dropout. The gradients of the frameworks are judged by differences of its losses.
"""

from rmsnorm.nematus.numpy.model import RNNSearch, Transformer
from rmsnorm.nematus.numpy.recurrent import gru, lstm, nematus_gru

__all__ = ["RNNSearch", "Transformer", "gru", "lstm", "nematus_gru"]
