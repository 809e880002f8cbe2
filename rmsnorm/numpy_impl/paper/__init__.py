"""The paper's derivation by matrices: R, the Jacobian and dL/dW.

Source: Zhang & Sennrich 2019, arXiv 1910.07467.
"""
