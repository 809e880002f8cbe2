"""Golden vectors of functions that normalise and quantise: the calls whose result is exact in any order of the sum.

In these 1 / rho, every scale and every code are known, so that a program must return just these numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rmsnorm.accuracy.bounds import Bound
from rmsnorm.numpy_impl import rms_norm_quantised
from rmsnorm.parity.cases import Array
from rmsnorm.parity.judge import Expected
from rmsnorm.parity.quantised_cases import cases_of
from rmsnorm.specification.quantisation import get_quantisation

NAMES = ("q", "scales")
_EXACT = Bound(0.0, 1.0)


def quantised(
    quantisations: Sequence[str], types: Sequence[str]
) -> Iterator[tuple[Mapping[str, str], Mapping[str, Array], Mapping[str, Expected]]]:
    """The metadata, inputs and expected results of every exact case, for x of these dtypes."""
    for name in quantisations:
        preset = get_quantisation("rmsnorm vectors write", name)
        for dtype in types:
            for case in cases_of(preset, dtype, residual=False, always=False):
                if case.slack or case.reciprocal_slack:
                    continue
                q, scales, *_ = rms_norm_quantised(case.x, case.gain, eps=case.eps, quantisation=preset, **case.options)
                results = {"q": q, "scales": np.atleast_1d(scales)}
                values = {name: array.astype(np.float32) for name, array in results.items()}
                expected = {name: Expected(value, np.ones(value.shape), _EXACT) for name, value in values.items()}
                metadata: dict[str, Any] = {"variant": name, "dtype": dtype, "case": case.name, "eps": case.eps}
                fields = {field: value for field, value in asdict(preset).items() if field not in ("name", "source")}
                metadata |= case.options | {f"quantisation.{field}": value for field, value in fields.items()}
                texts = {name: str(value) for name, value in metadata.items()}
                yield texts, {"x": case.x, "scale": case.gain}, expected
