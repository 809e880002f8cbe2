"""What the beam searches of Nematus's versions and of zero keep, on probabilities of single words."""

from __future__ import annotations

from typing import Any

import numpy as np
from nematus_models import CONFIGS

from rmsnorm.nematus import beam


def search(kind: str, p: Any, words: list[int], size: int, *, later: Any = None, **changes: Any) -> beam.Translations:
    """A search by probabilities of words, (sentences, vocabulary), of the first ones and of those ``later``."""
    config = CONFIGS[kind].replace(**{"normalization_alpha": 0.0, **changes})
    plan = beam.plan(config, words, size, None, None)

    def step(states: list[Any], previous: Any) -> tuple[Any, list[Any]]:
        return np.repeat(np.log(p if previous is None or later is None else later), size, axis=0), states

    return beam.search(plan, step, [np.zeros((len(words) * size, 1))])


def test_the_search_of_v03_never_gives_up_what_is_finished() -> None:
    """However bad it is, nor its score."""
    how = {"translation_maxlen": 3, "normalization_alpha": 1.0}
    result = search("deep v0.3", [[0.3, 0.69, 0.01]], [3], 2, later=[[0.001, 0.5, 0.499]], **how)
    np.testing.assert_array_equal(result.sequences, [[[1, 1, 1, 0], [0, 0, 0, 0]]])
    np.testing.assert_allclose(result.scores, [[np.log(0.69 * 0.5**2) / 4, np.log(0.3)]])


def test_when_the_sampler_stops() -> None:
    """When no living hypothesis can overtake the worst finished one, even if some of the beam is still empty."""
    result = search("plain", [[0.6, 0.3, 0.1]], [3], 2, translation_maxlen=10)
    np.testing.assert_array_equal(result.sequences, [[[0], [0]]])
    np.testing.assert_allclose(result.scores, [[np.log(0.6), -1e7]])
    result = search("plain", [[0.3, 0.6, 0.1]], [3], 2, translation_maxlen=10)
    np.testing.assert_array_equal(result.sequences, [[[0, 0, 0, 0], [1, 0, 0, 0]]])  # log .3 + log .6 > 4 log .6
    np.testing.assert_allclose(result.scores, np.log([[0.3, 0.3 * 0.6]]))


def test_the_search_of_zero() -> None:
    """No end in the first place; the shorter sentence ends by force one word later; the longest one stays alive."""
    result = search("zero rms", [[0.1, 0.6, 0.0001, 0.2999]] * 2, [1, 3], 1, translation_maxlen=1)
    np.testing.assert_array_equal(result.sequences[:, 0], [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_allclose(result.scores[:, 0], np.log(0.6) * np.array([3, 4]), rtol=1e-6)
    p = np.array([[0.02, 0.04, 0.9, 0.04]])
    result = search("zero rms", p, [3], 2, translation_maxlen=1)
    np.testing.assert_array_equal(result.sequences[0, 0], [1, 2])
    cooler = search("zero rms", p, [3], 2, translation_maxlen=1, beam_temperature=2.0)
    p = np.sqrt(p[0])
    np.testing.assert_allclose(cooler.scores[0, 0], np.log(p[1] * p[2] / p.sum() ** 2), rtol=1e-6)
