"""The calls in which the golden is compared with exact arithmetic, and the recipe with the golden: one table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rmsnorm import PRESETS
from rmsnorm.parity.cases import Case
from rmsnorm.specification import dtypes
from rmsnorm.specification.variants import CHOICES


def case(name: str, shape: tuple[int, ...], *variants: str, **fields: Any) -> Case:
    return Case(name, shape, variants or ("standard",), **fields)


def drawn(count: int) -> Iterator[Case]:
    """Fields of the variant, options and arrays that no preset and no other case combines."""
    random = np.random.default_rng(9)

    def one_of(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    for number in range(count):
        fields = {name: one_of(*choices) for name, choices in CHOICES.items() if name != "scale_dtype"}
        fields["scale_dtype"] = CHOICES["scale_dtype"][number % 2]
        fields |= {"scale_offset": one_of(0.0, 1.0, -0.75), "eps": one_of(None, 0.0, 1e-5, 0.3)}
        layout = one_of({}, {"axis": (-2, -1)}, {"axis": -1, "feature_axis": (-2, -1)}, {"axis": 1})
        yield case(
            f"drawn {number}", (5, 6, 12), data=one_of("rows", "alike"), fields=fields,
            gate=one_of(None, (fields["gate_function"], fields["gate_position"])),
            scale=one_of(True, True, False), bias=one_of(True, False), parameters=one_of(None, "float32", "bfloat16"),
            mask=one_of(True, False), residual=one_of(True, False),
            options=layout | one_of({}, {"partial": 0.4}) | one_of({}, {"out_dtype": "float32"}),
        )  # fmt: skip


GROUPS = {"axis": -1, "feature_axis": (-2, -1)}
CASES = (
    case("rows", (12, 40), *PRESETS),
    case("gain of 32 bits", (12, 40), *PRESETS, parameters="float32", dtypes=dtypes.HALF),
    case("gain of 16 bits", (12, 40), "t5", "llama", "onnx", "mlx", "standard", "apex", parameters="bfloat16",
         dtypes=("float16", "float32")),
    case("out f32", (12, 40), "standard", "llama", dtypes=dtypes.HALF, options={"out_dtype": "float32"}),
    case("out bf16", (12, 40), "standard", "apex", dtypes=("float32", "float64"), options={"out_dtype": "bfloat16"}),
    case("wide", (3, 700), "standard", "llama"),
    case("five axes", (2, 3, 5, 7, 8), "standard", "torch"),
    case("one row", (1, 40), "lasagne"),
    case("width 1", (7, 1), "standard", "gemma"),  # the gradient cancels but for eps
    case("vector", (64,), "standard", "llama"),
    case("strided", (12, 30), "standard", "llama", strided=True),
    case("huge", (8, 33), "standard", "llama", "gemma", "paper", "zhang_torch", "x_transformers", data="huge"),
    case("tiny", (8, 33), "standard", "paper", "zhang_torch", data="tiny"),
    case("clamped", (8, 33), "x_transformers", data="clamped", dtypes=("bfloat16", "float32", "float64")),
    case("at the clamp", (12, 5), "x_transformers", data="at_clamp", options={"eps": 5.0}),
    case("zero rows", (3, 2, 20), *(name for name in PRESETS if PRESETS[name].eps != 0), data="zero_rows"),
    case("constant", (2, 3, 5, 16), "standard", "paper", "llama", "gemma", data="constant"),
    case("one sign", (200, 8), "standard", "llama", data="one_sign"),  # a sum of gradients that grows with every row
    case("bias", (12, 40), "standard", "llama", "gemma", bias=True),
    case("no gain", (12, 40), "standard", "llama", "gemma", "onnx", scale=False),
    case("bias alone", (12, 40), "standard", "apex", scale=False, bias=True),
    *(case(f"partial {part}", (6, n), *variants, options={"partial": part})
      for part, n in ((0.3, 48), (0.07, 100), (0.29, 100), (0.001, 10))
      for variants in [("paper", "zhang_tf") if n != 48 else ("paper", "zhang_torch", "llama", "x_transformers")]),
    case("mask", (12, 40), "standard", "flax", "llama", "x_transformers", mask=True),
    case("mask, partial, 2 axes", (5, 6, 9), "paper", mask=True, options={"partial": 0.7, "axis": (-1, -2)}),
    case("mask, residual", (12, 40), "standard", "llama", mask=True, residual=True),
    case("residual", (12, 40), "standard", "llama", "gemma", residual=True),
    case("exact sum", (12, 40), "standard", "llama", residual=True, fields={"residual_rounding": "after"}),
    case("eps 0.1", (12, 40), "standard", "zhang_torch", options={"eps": 0.1}),
    case("channels", (3, 6, 5, 7), "lasagne", "standard", options={"axis": (2, 3), "feature_axis": 1}),
    case("middle axis", (4, 6, 5), "keras", "llama", options={"axis": 1}),
    case("two axes", (5, 4, 6), "torch", "equinox", options={"axis": (-1, -2)}),
    case("apart", (5, 4, 6), "flax", options={"axis": (1, 2), "feature_axis": -1}),
    case("groups", (6, 4, 12), "standard", "llama", options=GROUPS),
    case("groups of two axes", (3, 4, 3, 5), "lasagne", "llama", options={"axis": (2, 3), "feature_axis": (1, 2, 3)}),
    case("one group of all", (2, 3, 2, 5), "standard", residual=True,
         options={"axis": -1, "feature_axis": (0, 1, 2, 3), "partial": 0.5}),
    *(case(f"gate, {' '.join(rule)}", (12, 40), "standard", "apex", gate=rule)
      for rule in (("silu", "after"), ("sigmoid", "after"), ("sigmoid", "before"))),
    case("gate in groups", (6, 4, 12), "llama", gate=("silu", "before"), options=GROUPS),
    case("gate, mask", (12, 40), "standard", "llama", mask=True, gate=("silu", "after")),
    case("gate, residual", (12, 40), "standard", "apex", residual=True, gate=("silu", "after")),
    case("gate of a masked sum", (6, 4, 12), "llama", mask=True, residual=True, gate=("silu", "before"),
         options=GROUPS),
    case("gate of an exact sum", (12, 40), residual=True, gate=("sigmoid", "before"),
         fields={"residual_rounding": "after"}),
    *drawn(24),
)  # fmt: skip
