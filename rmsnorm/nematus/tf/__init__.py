"""Nematus's recurrent cells, RNNSearch and Transformer in Keras on TensorFlow, and layers for Nematus's own graphs."""

from rmsnorm.specification import errors
from rmsnorm.specification.frameworks import imported

with imported("tf"):
    import keras

    if keras.config.backend() != "tensorflow":
        raise errors.out_of_domain(
            "rmsnorm.nematus.tf", "the backend of Keras", keras.config.backend(), "'tensorflow', as these models need",
            "set KERAS_BACKEND=tensorflow before Python starts, or take the model for flax or torch",
        )  # fmt: skip
    from rmsnorm.nematus.tf import recurrent
    from rmsnorm.nematus.tf.model import RNNSearch, Transformer
    from rmsnorm.nematus.tf.recurrent import *  # noqa: F403

__all__ = ["RNNSearch", "Transformer", *recurrent.__all__]
