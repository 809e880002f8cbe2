"""Nematus's recurrent cells, RNNSearch and Transformer in JAX and Flax."""
