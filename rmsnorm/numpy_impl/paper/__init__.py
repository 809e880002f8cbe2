"""The paper, run: its derivation by matrices, the norms that it compares, and its table of invariances.

    derivation      R, the Jacobian and dL/dW as matrices
    norms           LayerNorm, BatchNorm and WeightNorm with gradients
    invariances     table 1 of the paper

Source: Zhang & Sennrich 2019, arXiv 1910.07467.
"""
