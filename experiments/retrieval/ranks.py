"""How well captions find their images and images their captions: recall, median and mean rank, over folds."""

from __future__ import annotations

import numpy as np

from experiments.retrieval.captions import CAPTIONS

FOLDS = 5


def ranks(errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranks, from 0, of the image of every caption, and of the best of the five captions of every image.

    errors: (captions, images), where the captions of image i are 5 i to 5 i + 4; of equal errors the first counts.

    >>> image_of, caption_of = ranks(np.repeat([[0.0, 1.0], [2.0, 3.0]], 5, axis=0))
    >>> image_of.tolist(), caption_of.tolist()
    ([0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 5])
    """
    own = np.arange(len(errors)) // CAPTIONS
    image_of = (np.argsort(errors, axis=1, kind="stable") == own[:, None]).argmax(axis=1)
    order = np.argsort(errors, axis=0, kind="stable") // CAPTIONS
    return image_of, (order == np.arange(errors.shape[1])).argmax(axis=0)


def measures(ranks: np.ndarray) -> dict[str, float]:
    """Recall among the first 1, 5 and 10 in percent, and the median and the mean rank, counted from 1.

    >>> measures(np.array([0, 4, 20, 1]))["R@5"], measures(np.array([0, 4, 20, 1]))["median rank"]
    (75.0, 3.0)
    """
    recalls = {f"R@{count}": 100 * float((ranks < count).mean()) for count in (1, 5, 10)}
    return recalls | {"median rank": float(np.floor(np.median(ranks)) + 1), "mean rank": float(ranks.mean() + 1)}


def over_folds(fold_errors: list[np.ndarray]) -> dict[str, float]:
    """The means over the folds, of images that captions find and captions that images find; and of all recalls."""
    sides: dict[str, list[dict[str, float]]] = {"image": [], "caption": []}
    for errors in fold_errors:
        for rows, own in zip(sides.values(), ranks(errors), strict=True):
            rows.append(measures(own))
    result = {
        f"{side} {name}": float(np.mean([row[name] for row in rows]))
        for side, rows in sides.items()
        for name in rows[0]
    }
    return {"recall": float(np.mean([value for name, value in result.items() if "R@" in name])), **result}
