"""The options of an order embedding, the names and shapes of its parameters, and its archives. No framework."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from experiments import archives
from experiments.options import check_flags, check_layer, check_number, check_sizes, pick
from rmsnorm.nematus.cells import Shapes, cell_shapes
from rmsnorm.nematus.config import Norm
from rmsnorm.nematus.sentences import check_ids
from rmsnorm.specification import errors

# The authors' names of the recurrent layers; prlngru is ours, with pRMSNorm.
LAYERS: Final[dict[str, Norm]] = {"gru": "none", "lngru": "layer", "rlngru": "rms", "prlngru": "prms"}
METHODS: Final = ("order", "cosine")
_PREFIX: Final = "encoder"


@dataclass(frozen=True)
class Config:
    """Options of an order embedding, under the authors' names.

    Attributes:
        n_words: size of the vocabulary.
        dim, dim_word, dim_image: sizes of an embedding of a caption or an image, of a word, and of an image's features.
        encoder: layer that reads captions: gru, lngru, rlngru or prlngru.
        method: of comparing embeddings: order, or cosine.
        abs: embeddings have the absolute values.
        margin: of the contrastive cost.
        prefix: that the names of the encoder's parameters begin with.
        others: options that do not matter here; they are written back.
    """

    n_words: int
    dim: int
    dim_word: int
    dim_image: int
    encoder: str = "gru"
    method: str = "order"
    abs: bool = True
    margin: float = 0.05
    prefix: str = _PREFIX
    others: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        op = "retrieval"
        check_sizes(op, n_words=self.n_words, dim=self.dim, dim_word=self.dim_word, dim_image=self.dim_image)
        check_flags(op, abs=self.abs)
        check_number(op, "margin", self.margin, 0.0, 1e6)
        check_layer(op, "encoder", self.encoder, LAYERS)
        if self.method not in METHODS:
            raise errors.not_a_choice(op, "method", self.method, METHODS)
        if self.prefix not in (_PREFIX, *LAYERS):
            raise errors.not_a_choice(op, "prefix", self.prefix, (_PREFIX, *LAYERS))

    @property
    def norm(self) -> Norm:
        return LAYERS[self.encoder]

    def cell(self) -> dict[str, str]:
        """Names of the encoder's parameters in an archive, by their names in the cell."""
        return {name: f"{self.prefix}_{name}" for name in cell_shapes("gru", self.dim_word, self.dim, self.norm)}

    def shapes(self) -> Shapes:
        """Shapes of all parameters, by the names of the authors' archives.

        >>> Config(n_words=9, dim=4, dim_word=3, dim_image=2).shapes()["encoder_W"]
        (3, 8)
        """
        cell = cell_shapes("gru", self.dim_word, self.dim, self.norm)
        shapes: Shapes = {"Wemb": (self.n_words, self.dim_word)}
        shapes |= {f"{self.prefix}_{name}": shape for name, shape in cell.items()}
        return shapes | {"ff_image_W": (self.dim_image, self.dim), "ff_image_b": (self.dim,)}

    def options(self) -> dict[str, Any]:
        """The options as the authors' program has them."""
        own = asdict(self)
        del own["prefix"]
        return own.pop("others") | own


def load(
    path: str | os.PathLike[str], options: str | os.PathLike[str] | Mapping[str, Any] | None = None
) -> tuple[Config, dict[str, Any]]:
    """Read an order embedding that the authors' program wrote: configuration, and arrays by their names.

    Args:
        path: the archive.
        options: of the model, or their file (JSON, or a pickle of plain values), if it has no usual name.

    Raises:
        FileNotFoundError: there is no archive, or there are no options.
        TypeError: an array is not floating-point.
        ValueError: the files are damaged, contain objects, or do not fit each other.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from experiments.retrieval.golden import OrderEmbedding
        >>> config = Config(n_words=9, dim=4, dim_word=3, dim_image=2, encoder="rlngru")
        >>> with TemporaryDirectory() as folder:
        ...     save(f"{folder}/order.npz", config, {name: np.ones(shape) for name, shape in config.shapes().items()})
        ...     model = OrderEmbedding(*load(f"{folder}/order.npz"))
        >>> model.sentences(np.ones((6, 1), int), np.ones((6, 1)))
        array([[0.5, 0.5, 0.5, 0.5]])
    """
    op = "retrieval.load"
    archive = archives.read(op, path, options)
    prefix = next((name for name in (_PREFIX, *LAYERS) if f"{name}_U" in archive.shapes), _PREFIX)
    config = Config(**pick(op, Config, archive.options) | {"prefix": prefix})
    config = replace(config, encoder=archives.written_layer(config.encoder, prefix, archive.shapes))
    return config, archives.arrays(op, archive, config.shapes())


def words(
    path: str | os.PathLike[str], options: str | os.PathLike[str] | Mapping[str, Any] | None = None
) -> dict[str, int]:
    """The ids of the words, which the authors' program keeps beside the options; empty if there are none."""
    return archives.read("retrieval.words", path, options).words


def save(path: str | os.PathLike[str], config: Config, parameters: Mapping[str, Any]) -> None:
    """Write an archive for the authors' program, and its options as JSON in <path>.json.

    Raises:
        ValueError: these are not the parameters of the configuration.
    """
    archives.write("retrieval.save", path, config.options(), parameters, config.shapes())


def check_captions(config: Config, x: Any, mask: Any) -> None:
    """Raise TypeError or ValueError unless these are ids (words, batch) and their mask; arrays of NumPy."""
    if np.ndim(x) != 2 or not np.size(x):
        raise errors.out_of_domain("retrieval", "x", np.shape(x), "the shape (words, batch), none of them 0", "see x")
    check_ids("retrieval", "x", np.asarray(x), config.n_words)
    if np.shape(mask) != np.shape(x):
        raise errors.wrong_shape("retrieval", "mask", np.shape(mask), np.shape(x), "x")


def check_images(config: Config, images: Any) -> None:
    """Raise ValueError unless these are features (batch, dim_image)."""
    if np.ndim(images) != 2 or np.shape(images)[1] != config.dim_image:
        got, want = np.shape(images), f"the shape (batch, {config.dim_image})"
        raise errors.out_of_domain("retrieval", "images", got, want, "see dim_image")


def check_pairs(sentences: Any, images: Any) -> None:
    """Raise ValueError unless there is a caption for every image."""
    if np.shape(sentences) != np.shape(images):
        raise errors.wrong_shape("retrieval", "images", np.shape(images), np.shape(sentences), "one caption an image")
