"""The arguments of the operators beside the tensors: a text about the call, and how many elements are counted."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import torch

from rmsnorm import dtypes
from rmsnorm.call import Call
from rmsnorm.torch_impl import rows
from rmsnorm.torch_impl.private import constant
from rmsnorm.torch_impl.rounding import dtype_name
from rmsnorm.variants import Variant
from rmsnorm.version import VERSION

FIELDS: Final = ("eps", "eps_position", "statistic", "scale_offset", "norm", "product", "result")


def settings_of(call: Call) -> tuple[str, Any]:
    """The text, as every argument takes half a microsecond, and k if it is not n."""
    variant = call.variant
    choices = variant.eps_position, variant.statistic, variant.scale_offset, call.norm, call.product, call.result
    after = len(call.shape) - 1 - call.feature_axes[-1]
    text = _text(len(call.axes), len(call.feature_axes), after, call.eps, *choices)
    return text, None if variant.partial is None else call.k


@constant
def _text(axes: int, features: int, after: int, *values: Any) -> str:
    fields = {"axes": axes, **dict(zip(FIELDS, values, strict=True))}
    if (features, after) != (axes, 0):
        fields.update(features=features, after=after)
    fields["version"] = VERSION  # Inductor keeps what it wrote on disk, and finds it by this text, among others
    return json.dumps(fields).replace('"', "'")  # the C++ that Inductor writes has strings without escapes


@lru_cache(maxsize=1024)
def decoded(settings: str) -> dict[str, Any]:
    """The fields of such a text."""
    fields: dict[str, Any] = json.loads(settings.replace("'", '"'))
    return {"features": fields["axes"], "after": 0, **fields}


def call_of(shape: torch.Size, dtype: torch.dtype, settings: str, k: Any) -> Call:
    """The call that has these settings, on x of that shape and dtype."""
    fields = decoded(settings)
    axes, end = tuple(range(len(shape) - fields["axes"], len(shape))), len(shape) - fields["after"]
    feature_axes = tuple(range(end - fields["features"], end))
    n = math.prod(shape[axis] for axis in axes)
    return Call(
        variant=Variant(
            name="", eps=fields["eps"], eps_position=fields["eps_position"], statistic=fields["statistic"],
            scale_offset=fields["scale_offset"], partial=None if k is None else Fraction(int(k), int(n)),
        ),
        shape=tuple(shape), axes=axes, feature_axes=feature_axes, eps=fields["eps"], x=dtype_name(dtype),
        sum=dtype_name(dtype), norm=fields["norm"], product=fields["product"], result=fields["result"],
        inverse_rms=dtypes.arithmetic(dtype_name(dtype)),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def planned(device: Any, shape: Any, dtype: Any, scale: Any, bias: Any, *settings: Any) -> Any:
    """The call and its plan for the kernels."""
    call = call_of(shape, dtype, *settings)
    g, b = (None if p is None else dtype_name(p) for p in (scale, bias))
    return call, rows.plan(device, call, g, b)
