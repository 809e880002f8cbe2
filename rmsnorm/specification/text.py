"""A checked call as a text, which a program of another framework holds: all but shape and dtype of x, and k."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from rmsnorm.specification import dtypes
from rmsnorm.specification.call import Call, Shape
from rmsnorm.specification.variants import Variant
from rmsnorm.specification.version import VERSION

# ``axes`` and ``features`` are how many there are, ``axes_after`` is how many follow those of the parameters.
_FIELDS: Final = (
    "axes", "features", "axes_after", "eps", "eps_position", "scale_offset", "norm", "product", "result",
    "gate", "gate_function", "gate_position",
)  # fmt: skip


def fields_of(call: Call) -> tuple[Any, ...]:
    """The fields of the text of a call whose axes are in the order of kernels."""
    variant = call.variant
    return (
        len(call.axes), len(call.feature_axes), len(call.shape) - 1 - call.feature_axes[-1], call.eps,
        variant.eps_position, variant.scale_offset, call.norm, call.product, call.result,
        call.gate, variant.gate_function, variant.gate_position,
    )  # fmt: skip


def text_of(*fields: Any) -> str:
    """The text with these fields. It has no double quotes, which a language may want to escape."""
    # a compiler keeps its programs on disk, and finds them by what is in them
    return json.dumps({**dict(zip(_FIELDS, fields, strict=True)), "version": VERSION}).replace('"', "'")


@lru_cache(maxsize=1024)
def read(text: str) -> dict[str, Any]:
    """The fields of a text, by their names."""
    fields: dict[str, Any] = json.loads(text.replace("'", '"'))
    return fields


def call_of(text: str, shape: Shape, dtype: str, k: Any = None) -> Call:
    """The call that has this text, on x of that shape and dtype; k as a number if it is not n."""
    fields, rank = read(text), len(shape)
    axes, end = tuple(range(rank - fields["axes"], rank)), rank - fields["axes_after"]
    n = math.prod(shape[axis] for axis in axes)
    return Call(
        variant=Variant(
            name="", eps=fields["eps"], eps_position=fields["eps_position"],
            scale_offset=fields["scale_offset"], partial=None if k is None else Fraction(int(k), int(n)),
            gate_function=fields["gate_function"], gate_position=fields["gate_position"],
        ),
        shape=tuple(shape), axes=axes, feature_axes=tuple(range(end - fields["features"], end)), eps=fields["eps"],
        x=dtype, sum=dtype, norm=fields["norm"], product=fields["product"], result=fields["result"],
        inverse_rms=dtypes.arithmetic(dtype), gate=fields["gate"],
    )  # fmt: skip
