"""Prints the tables of docs/how-close.md: how wide the intervals are, and what the tolerances of other suites let pass.

python tools/how_close.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rmsnorm import Variant
from rmsnorm.identify import mistakes
from rmsnorm.identify.mistakes import Mistake
from rmsnorm.parity.arrays import arrays_of
from rmsnorm.parity.equations import candidate
from rmsnorm.testing import assert_rms_norm, rms_norm_interval

WIDTHS = (64, 768, 4096, 16384)
ULPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
_LEAST = 0.1  # of |y|: below it a relative tolerance says nothing


class Suite(NamedTuple):
    """The test of a kernel: its data, and what it takes for equal."""

    source: str
    dtype: str
    shape: tuple[int, ...]
    size: Callable[[int], float]  # of x, by the width
    gain: tuple[float, float]  # mean and deviation
    eps: float
    quantities: tuple[str, ...]
    close: Callable[[Any, Any], bool]


def within(atol: float, rtol: float) -> Callable[[Any, Any], bool]:
    """As torch.testing.assert_close and torch.allclose."""
    return lambda got, want: bool(np.all(np.abs(got - want) <= atol + rtol * np.abs(want)))


def ratio(most: float) -> Callable[[Any, Any], bool]:
    """The root mean square of the error over that of the right numbers."""
    return lambda got, want: bool(np.sqrt(np.mean((got - want) ** 2)) <= most * np.sqrt(np.mean(want**2)))


_VLLM = "vLLM tests/kernels/core/test_layernorm.py, 041b9f5: atol 1e-2, rtol 1e-2"
_LIGER = "Liger-Kernel test/transformers/test_rms_norm.py, 030cb71: "
_EVERY = ("y", "dx", "dscale")
SUITES = (
    Suite(_VLLM, "float16", (83, 768), lambda n: 0.5 / n, (1.0, 0.1), 1e-6, ("y",), within(1e-2, 1e-2)),
    Suite(_VLLM, "bfloat16", (83, 768), lambda n: 0.5 / n, (1.0, 0.1), 1e-6, ("y",), within(1e-2, 1e-2)),
    Suite(_VLLM, "float32", (83, 768), lambda n: 0.5 / n, (1.0, 0.1), 1e-6, ("y",), within(1e-2, 1e-2)),
    Suite(_LIGER + "atol 5, rtol 1e-5", "bfloat16", (3, 423, 213), lambda n: 1.0, (1.0, 0.0), 1e-6, _EVERY,
          within(5.0, 1e-5)),
    Suite(_LIGER + "atol 1e-4, rtol 1e-7", "float32", (3, 423, 213), lambda n: 1.0, (1.0, 0.0), 1e-6, _EVERY,
          within(1e-4, 1e-7)),
    Suite("flash-linear-attention tests/modules/test_layernorm.py, 00759f7: ratio 1e-3", "float32", (2, 2, 512, 64),
          lambda n: 1.0, (0.0, 1.0), 0.0, _EVERY, ratio(1e-3)),
)  # fmt: skip


def wrong(dtype: str, n: int, rows: int, quantities: tuple[str, ...]) -> Iterator[Mistake]:
    """Wrong norms: every mistake that the judge knows, of y and of the gradients that are asked for."""
    yield from (mistakes.GAIN_DROPPED, mistakes.GAIN_FIRST, mistakes.CENTRED, mistakes.OF_SUM)
    yield mistakes.divisor("n - 1", lambda s: s.n - 1)
    yield from (mistakes.eps_of(f"eps is {eps:g}", lambda s, eps=eps: eps) for eps in (0.0, 1e-8, 1e-5))  # type: ignore[misc]
    yield mistakes.factor("0.1 % too large", lambda s: 1.001)
    yield mistakes.eps_of_max(1e-6)
    yield from mistakes.of_statistic(dtype)
    yield from mistakes.of_range()
    yield from mistakes.of_width(n)
    yield from mistakes.of_rows(rows)
    if "dx" in quantities:
        yield from mistakes.of_dx(n)
        yield from mistakes.of_parameter("dscale")


def arrays(seed: int, shape: tuple[int, ...], dtype: str, size: float, gain: tuple[float, float]) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    x, scale = random.normal(size=shape) * size, random.normal(*gain, shape[-1])
    return {"x": x.astype(dtype), "scale": scale.astype(dtype), "dy": random.normal(size=shape).astype(dtype)}


def counted(suite: Suite) -> tuple[int, int, int]:
    """How many wrong norms have other bits than the right one, how many of them a suite lets pass, and how many we."""
    n, variant = suite.shape[-1], Variant.get("llama").replace(eps=suite.eps)
    given = arrays(0, suite.shape, suite.dtype, suite.size(n), suite.gain)
    data = arrays_of("how close", given, variant, -1, None, None).data()
    right = _results(data, {}, suite.quantities)
    differ = passed = held = 0
    for mistake in wrong(suite.dtype, n, int(np.prod(suite.shape[:-1])), suite.quantities):
        got = _results(data, mistake.changes, suite.quantities)
        if all(got[name].tobytes() == right[name].tobytes() for name in right):
            continue
        differ += 1
        pairs = [(got[name].astype(np.float64), right[name].astype(np.float64)) for name in right]
        passed += all(suite.close(*pair) for pair in pairs)
        try:
            assert_rms_norm(got["y"], given["x"], given["scale"], variant=variant, dy=given["dy"],
                            **{name: got[name] for name in got if name != "y"})  # fmt: skip
            held += 1
        except AssertionError:
            pass
    return differ, passed, held


def _results(data: Any, changes: Mapping[str, Any], quantities: tuple[str, ...]) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        results = candidate(data, changes).results
    return {name: results[name][0] for name in quantities}


def widths(variant: str, dtype: str, n: int, of: str = "y", rows: int = 8, *, exact: bool) -> str:
    """How wide the intervals of a quantity are, from the right number: in ulps and as rtol and atol."""
    given = arrays(1, (rows, n), dtype, 1.0, (0.0, 1.0))
    low, high = rms_norm_interval(given["x"], given["scale"], variant=variant, of=of, dy=given["dy"], exact=exact)
    wide, middle = (high.astype(np.float64) - low) / 2, np.abs(high.astype(np.float64) + low) / 2
    is_large = middle > _LEAST * np.max(middle)
    unit = ULPS[dtype] * 2.0 ** np.floor(np.log2(np.maximum(middle, 1e-30)))
    ulps, share = np.max((wide / unit)[is_large]), np.max(wide[is_large] / middle[is_large])
    return f"{ulps:.3g} ulp, rtol {share:.1e}, atol {np.max(wide):.1e}"


def main() -> None:
    print("| dtype | variant | " + " | ".join(f"n = {n}" for n in WIDTHS) + " |")
    print("|---|---|" + "---|" * len(WIDTHS))
    for dtype in ULPS:
        for variant in ("standard", "llama"):
            cells = [widths(variant, dtype, n, exact=False) for n in WIDTHS]
            print(f"| {dtype} | {variant} | {' | '.join(cells)} |")
    cells = [widths("standard", "float32", n, exact=True) for n in WIDTHS]
    print(f"| float32, `exact=True` | standard | {' | '.join(cells)} |\n")
    print("| dtype | dscale over 64 rows | over 1,024 rows | over 16,384 rows |\n|---|---|---|---|")
    for dtype in ULPS:
        cells = [widths("standard", dtype, 64, "dscale", rows, exact=True) for rows in (64, 1024, 16384)]
        print(f"| {dtype}, `exact=True` | {' | '.join(cells)} |")
    print("\n| test | dtype | wrong norms with other bits | it lets pass | assert_rms_norm lets pass |")
    print("|---|---|---|---|---|")
    for suite in SUITES:
        print(f"| {suite.source} | {suite.dtype} | {' | '.join(map(str, counted(suite)))} |")


if __name__ == "__main__":
    main()
