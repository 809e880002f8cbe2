"""Nematus's recurrent cells, RNNSearch and Transformer in NumPy: the golden, with analytic gradients."""
