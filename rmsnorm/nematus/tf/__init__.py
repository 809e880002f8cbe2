"""Nematus's recurrent cells, RNNSearch and Transformer in Keras on TensorFlow, and layers for Nematus's own graphs."""

from rmsnorm.nematus.tf.recurrent import (
    GRU,
    LSTM,
    GRUCell,
    LSTMCell,
    NematusGRU,
    NematusGRUCell,
    gru,
    lstm,
    nematus_gru,
)
from rmsnorm.nematus.tf.rnnsearch import RNNSearch
from rmsnorm.nematus.tf.transformer import Transformer

__all__ = [
    "GRU",
    "LSTM",
    "GRUCell",
    "LSTMCell",
    "NematusGRU",
    "NematusGRUCell",
    "RNNSearch",
    "Transformer",
    "gru",
    "lstm",
    "nematus_gru",
]
