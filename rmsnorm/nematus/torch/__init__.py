"""Nematus's recurrent cells, RNNSearch and Transformer in PyTorch."""
