"""Initial weights of the authors' models, by the names of their archives."""

from __future__ import annotations

import numpy as np

from rmsnorm.nematus.cells import Shapes


def initial(shapes: Shapes, seed: int) -> dict[str, np.ndarray]:
    """Gains 1, matrices of states orthogonal, other matrices and vectors that multiply uniform, all else 0.

    Norms of the same seed have the same matrices. Uniform is between ±√(6 / (rows + columns)).

    >>> weights = initial({"encoder_U": (2, 4), "encoder_s1": (4,)}, 0)
    >>> bool(np.allclose(weights["encoder_U"][:, 2:].T @ weights["encoder_U"][:, 2:], np.eye(2), atol=1e-6))
    True
    """
    rng = np.random.default_rng(seed)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        leaf = name.rpartition("_")[2]
        if len(shape) == 1 and leaf != "proj":
            return np.full(shape, float(leaf[0] == "s"))
        if leaf in ("U", "Ux"):
            squares = [np.linalg.qr(rng.standard_normal((shape[0], shape[0])))[0] for _ in range(shape[1] // shape[0])]
            return np.concatenate(squares, axis=1)
        return rng.uniform(-1, 1, shape) * np.sqrt(6 / sum(shape))

    return {name: values(name, shape).astype(np.float32) for name, shape in shapes.items()}
