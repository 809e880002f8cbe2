"""Nematus's recurrent cells, RNNSearch and Transformer in Keras on TensorFlow, and layers for Nematus's own graphs."""
