"""The LayerNorms of a model: the framework's own, and layers of any class that compute one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rmsnorm.accuracy.bounds import LAYER_NORM, LAYER_NORM_OF_FLOAT32
from rmsnorm.conversion.layer_norm.sampled import Sampled
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import first_parameter
from rmsnorm.identify import Target, TargetError, open_target
from rmsnorm.identify.fit import nice
from rmsnorm.identify.layout import parameters
from rmsnorm.specification.variants import Variant
from rmsnorm.targets.names import assign

_SIZES: Final = 1e-12, 1e-3, 1.0, 10.0  # of rows: beside the variance of the first ones eps is large


def norms_of(model: Sampled) -> tuple[dict[str, Norm], dict[str, str]]:
    """The layers that compute LayerNorm, by name; and why others, which are called so, are none."""
    known: dict[Any, Norm | str | None] = {}
    norms, left, backend = {}, {}, model.backend
    for name, layer in model.layers(model.model):
        answer: Norm | str | None = model.own(layer)
        if answer is None and backend.may_be_layer_norm(layer):
            key = backend.key_of(layer)
            if key not in known:
                known[key] = _asked(model, layer)
            answer = known[key]
        names = [kind.__name__.lower() for kind in type(layer).__mro__]
        if isinstance(answer, Norm):
            norms[name] = answer
        elif answer or (any("layernorm" in n for n in names) and not backend.has_inner(layer)):
            left[name] = answer or "it does not compute LayerNorm over the last axis"
    return norms, left


def _asked(model: Sampled, layer: Any) -> Norm | str | None:
    """What takes the place of a layer after centred weights; None if it is no LayerNorm over the last axis."""
    try:
        target, x = open_target(layer), first_parameter(getattr(layer, model.backend.call))
    except Exception as error:  # of the layer's class, which may refuse to be copied or opened in any way
        return f"it cannot be asked what it computes ({type(error).__name__}: {error})"
    width = target.width or 16
    try:
        variant = _variant(target, width)
    except TargetError:
        return None
    names = assign(dict.fromkeys(model.backend.tensors(layer), (width,)))  # a buffer may be a bias
    if variant is None:
        return None
    return Norm((-1,), (-1,), names.get("scale"), names.get("bias"), x, variant, (width,), (2, 3, 4))


@np.errstate(all="ignore")
def _variant(target: Target, width: int) -> Variant | None:
    """eps and the offset of the gain of a LayerNorm, in training and in evaluation."""
    random, names = np.random.default_rng(0), target.arguments
    x = random.normal(size=(2, 3, 4, width)) * np.reshape(_SIZES, (4, 1))
    c, bias = x - x.mean(-1, keepdims=True), random.normal(size=width) if "bias" in names else 0.0
    variance = np.mean(c * c, -1, keepdims=True)
    if any(array.shape != (width,) for array in parameters(target, x, scale=np.ones, bias=np.ones).values()):
        return None

    def y(gain: Any, x: Any = x) -> Any:
        arrays = parameters(target, x, scale=lambda shape: np.broadcast_to(gain, shape), bias=lambda shape: bias)
        return target.forward(x, **arrays).astype(np.float64) - bias

    one = y(1.0) - y(0.0) if "scale" in names else y(1.0)  # with a gain of 1
    offset = float(np.round(np.median(y(0.0) / one))) if "scale" in names else 0.0
    solved = float(np.median(((c / one) ** 2 - variance)[..., 0, :]))
    # A layer may compute in float32 whatever x is; then eps is known up to the roundings of that.
    for digits, bound in ((1e-7, LAYER_NORM), (2e-5, LAYER_NORM_OF_FLOAT32)):
        eps = nice(solved, digits, 0.0) if solved > 1e-20 else 0.0
        gain = random.normal(0.5, 1.0, width) if "scale" in names else 1.0 - offset
        want = c / np.sqrt(variance + eps) * (offset + gain)
        tries = []
        for mode in (True, False):
            with target.in_mode(mode):
                tries += [(y(gain, x), want), (y(gain, x[0]), want[0]), (y(gain, x[0, 0]), want[0, 0])]
        if all(np.abs(got - wanted).max() <= bound * np.abs(wanted).max() for got, wanted in tries):
            return Variant(name="to_rms_norm", eps=eps, scale_offset=offset)
    return None
