"""Conversion of the LayerNorm of an RNNSearch into RMSNorm, exactly, by centring the weights before it.

The mean over the features of y = x W + b is linear in W and b. With W' = W - mean(W) and b' = b - mean(b), where the
means are over the same features, y has mean zero. Then LayerNorm and RMSNorm with the same gain and offset are equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rmsnorm.nematus.config import Config
from rmsnorm.nematus.names import check, recurrent_maps
from rmsnorm.specification import errors


def to_rms_norm(config: Config, parameters: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """The same model with RMSNorm in place of LayerNorm: its config, and its parameters in their dtypes.

    Gains and offsets stay. In zero, whose RMSNorm has no offset, the offsets become parts of the biases that are added
    to the same sums. The arithmetic is float64, so the only error is the rounding to the dtype.

    Raises:
        ValueError: the model is no RNNSearch with LayerNorm, or the parameters are not those of the config.
    """
    if config.norm != "layer" or config.model_type != "rnn":
        got, why = f"{config.model_type} with {config.norm}", "only that can be converted"
        if config.model_type == "transformer":
            why = "the norms of a Transformer read sums with sinusoids of positions, whose mean is in no weight"
        raise errors.out_of_domain("to_rms_norm", "the model", got, "rnn with layer", why)
    rows = check("to_rms_norm", config, parameters)
    if config.rules.is_zero:
        return config.replace(norm="rms", norm_offset=False), _centred_of_zero(config, parameters)
    centred = dict(parameters)
    for name in [name for row in rows for name in row.normalised]:
        centred[name] = _centre(parameters[name]).astype(parameters[name].dtype)
    new = {name.replace("/new_std", "/scale").replace("/new_mean", "/offset"): centred[name] for name in centred}
    return config.replace(norm="rms", norm_offset=True), new


def _centre(array: Any) -> Any:
    wide = np.asarray(array, np.float64)
    return wide - wide.mean(axis=-1, keepdims=True)


def _centred_of_zero(config: Config, parameters: Mapping[str, Any]) -> dict[str, Any]:
    wide = {name: np.asarray(array, np.float64) for name, array in parameters.items()}
    for scope, inputs, _, _ in recurrent_maps(config.embedding_size, config.state_size):
        if scope.endswith("feed_logits"):  # which has no norm
            continue
        for i in range(len(inputs)):
            wide[f"{scope}/W_0_{i}"] = _centre(wide[f"{scope}/W_0_{i}"])
            # The result of a map without a bias is added to that of a map with one.
            biased = re.sub(r"fetch_state_(.+)_x$", r"cell_\1_h", scope).replace("context_att", "attention/feed_query")
            wide[f"{biased}/b_0"] = wide[f"{biased}/b_0"] + wide.pop(f"{scope}/ln_0_{i}/offset")
    return {name: array.astype(parameters[name].dtype) for name, array in wide.items()}
