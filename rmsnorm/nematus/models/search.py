"""Translation by a beam search, whose steps the network of a model computes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from rmsnorm.nematus import beam
from rmsnorm.nematus.beam import Translations
from rmsnorm.nematus.dialects import first_word
from rmsnorm.nematus.models.operations import Array, Operations

if TYPE_CHECKING:
    from rmsnorm.nematus.config import Config


def translate(
    network: Any, config: Config, ops: Operations, run: Callable[..., Any], x: Array, mask: Array,
    beam_size: int | None, max_length: int | None, alpha: float | None,
) -> Translations:  # fmt: skip
    """See protocol.RNNSearch.translate.

    Args:
        network: the module rnnsearch or transformer.
        run: calls a function of the network with the parameters and the config, and these arrays and options.
    """
    plan = beam.plan(config, ops.to_host(mask != 0).sum(axis=0), beam_size, max_length, alpha)
    rows, length = len(plan.lengths) * plan.beam_size, plan.steps if ops.FIXED_CACHES else 0
    memory, states = run(network.begin, x, mask, beam_size=plan.beam_size, length=length)
    times = count()

    def step(states: list[Array], previous: Any) -> tuple[Any, list[Array]]:
        words = np.full(rows, first_word(config)) if beam.is_first(config, previous) else previous
        log_p, states = run(network.step, memory, states, ops.words(words, x), next(times))
        return ops.to_host(log_p), states

    return beam.search(plan, step, states, ops.rows)
