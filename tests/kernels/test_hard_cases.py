"""The rows of hard_cases.json, for which random calls once gave another y than the golden's."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rmsnorm.accuracy.ulps import ulps
from rmsnorm.numpy_impl import fast, rms_norm
from rmsnorm.specification.variants import PRESETS

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("hard_cases.json").read_text())
ARRAYS = ("x", "residual", "mask")


def is_subnormal(array: Any) -> Any:
    """Of bfloat16 and float32: every subnormal number of float16 is a normal one in float32."""
    if array.dtype == np.float16:
        return np.zeros(array.shape, bool)
    return (array != 0) & (np.abs(array.astype(np.float64)) < float(ml_dtypes.finfo(array.dtype).smallest_normal))


def call_of(hard: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The arguments of rms_norm for a row of the corpus, and its variant."""
    eps, partial = hard["variant"]["eps"], hard["variant"]["partial"]
    fields = {"eps": None if eps is None else float(eps), "partial": None if partial is None else Fraction(partial)}
    arrays = {
        name: np.array([float.fromhex(number) for number in numbers]).astype(dtype)
        for name, (dtype, numbers) in hard["arrays"].items()
    }
    return arrays, PRESETS[hard["variant"]["name"]].replace(**fields)


def in_two_places(arrays: dict[str, Any]) -> dict[str, Any]:
    """The row twice, between ordinary ones."""
    random = np.random.default_rng(0)
    placed = dict(arrays)
    for name in ARRAYS:
        if name in arrays:
            others = random.normal(size=(5, len(arrays[name]))).astype(arrays[name].dtype)
            others[1] = others[3] = arrays[name]
            placed[name] = others
    return placed


def test_each_is_within_an_ulp(framework: Any) -> None:
    """Where TensorFlow and JAX take subnormal numbers as 0, the rows without any."""
    compared = 0
    for case in CASES:
        arrays, variant = call_of(case)
        if framework.name in ("tf", "flax") and any(is_subnormal(array).any() for array in arrays.values()):
            continue
        arrays = in_two_places(arrays)
        function = fast.rms_norm if framework.name == "numpy" else framework.rms_norm
        got, want = (f(**arrays, variant=variant) for f in (function, rms_norm))
        if "residual" in arrays:
            got, want = got[0], want[0]
        assert ulps(got, want).max() <= 1, case
        compared += 1
    assert compared >= len(CASES) // 2
