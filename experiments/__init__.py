"""The paper's experiments: python -m experiments NAME --help. They are no part of the package and use its norms."""
