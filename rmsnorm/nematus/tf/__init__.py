"""Nematus's recurrent cells, RNNSearch and Transformer in Keras on TensorFlow, and layers for Nematus's own graphs."""

from rmsnorm.nematus.tf import recurrent
from rmsnorm.nematus.tf.model import RNNSearch, Transformer
from rmsnorm.nematus.tf.recurrent import *  # noqa: F403

__all__ = ["RNNSearch", "Transformer", *recurrent.__all__]
