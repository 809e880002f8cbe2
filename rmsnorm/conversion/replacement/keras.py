"""Replaces RMSNorm in Keras. New layers from a layer's config show what it computes, and that ours does the same."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import keras
import numpy as np

from rmsnorm.conversion.replacement.backend import Backend
from rmsnorm.conversion.replacement.change import called_with, computed, require_its_eps
from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import Proof, changed, decide
from rmsnorm.conversion.replacement.report import Unproven
from rmsnorm.identify import Target
from rmsnorm.targets.layers import build, made_again, open_keras
from rmsnorm.targets.open import library_of
from rmsnorm.tf_impl.layers import RMSNormalization, compute


def _fresh(layer: Any) -> Any:
    """A new layer like one, not built.

    Raises:
        Unproven: its class makes none of its config.
    """
    try:
        return made_again(layer, layer.get_config(), layer.dtype_policy)
    except Exception as error:  # the code of the layer's class may raise anything
        text, _, cause = str(error).partition("Exception encountered: ")
        reason = (cause or text).strip().partition("\n")[0]
        raise Unproven(f"its class makes no layer from its config ({type(error).__name__}: {reason:.200})") from None


def _require_no_more(layer: Any, norm: Norm) -> None:
    """A call of a new layer returns y and does nothing else; the first one may set attributes.

    Raises:
        Unproven: it adds a loss, or changes the layer.
    """
    fresh, x = _fresh(layer), np.ones(norm.example, "float32")
    fresh(**_inputs(norm, x))
    before = _everything(fresh)
    fresh(**_inputs(norm, x + x))
    touched = changed(before, _everything(fresh))
    if touched:
        raise Unproven(f"a call changes its {', '.join(touched)}")
    fresh = _fresh(layer)
    build(fresh, x.shape)
    of_weights = len(fresh.losses)
    trains = "training" in inspect.signature(layer.call).parameters
    for options in ({"training": True}, {"training": False}) if trains else ({},):
        variables = [[v.value for v in some] for some in (fresh.trainable_variables, fresh.non_trainable_variables)]
        *_, losses = fresh.stateless_call(*variables, **_inputs(norm, x), **options, return_losses=True)
        if len(losses) > of_weights:
            raise Unproven("a call adds a loss to the model's")


def _inputs(norm: Norm, x: Any) -> dict[str, Any]:
    """x, and the same numbers as a gate where the layer has one, under its names of them."""
    return {name: x for name in (norm.x, norm.gate) if name is not None}


def _everything(layer: Any) -> dict[str, Any]:
    """The variables of a layer and of its metrics, and its own attributes."""
    variables = (*layer.variables, *layer.metrics_variables)
    return _own(layer) | {variable.path: keras.ops.convert_to_numpy(variable) for variable in variables}


def _own(layer: Any) -> dict[str, Any]:
    common = vars(keras.layers.Layer())
    return {name: value for name, value in vars(layer).items() if name not in common}


def _weight(layer: Any, name: str | None) -> Any:
    return next((weight.value for weight in layer.weights if weight.name == name), None)


def is_float(value: Any) -> bool:
    """Whether it is an array of floating-point numbers, also a symbolic one or one of NumPy."""
    has_dtype = hasattr(value, "dtype")
    return has_dtype and bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(value.dtype)))


@contextlib.contextmanager
def _on_one_device() -> Iterator[None]:
    """Without the distribution of the caller's scope: new layers of other widths need not fit its devices."""
    distribution = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(distribution)


def _bits(layer: Any, norm: Norm, x: Any) -> bytes:
    """y of a layer, which stays as it is."""
    variables = [v.value for v in layer.trainable_variables], [v.value for v in layer.non_trainable_variables]
    y = layer.stateless_call(*variables, **_inputs(norm, x))[0]
    return bytes(keras.ops.convert_to_numpy(keras.ops.cast(y, "float32")).tobytes())


class Keras(Backend):
    package, call, passed = "keras.", "call", ("training", "mask")

    def modules(self, model: Any) -> Iterator[tuple[str, Any]]:
        for layer in model._flatten_layers():
            yield (layer.path or layer.name) if layer is not model else "", layer

    def is_replaced(self, layer: Any) -> bool:
        return isinstance(layer, RMSNormalization) or hasattr(vars(layer).get("call"), "norm")

    def tensors(self, layer: Any) -> list[str]:
        return [weight.name for weight in layer.weights]

    def has_inner(self, layer: Any) -> bool:
        return len(list(layer._flatten_layers())) > 1

    @_on_one_device()
    def prove(self, layer: Any) -> Proof:
        if self.has_inner(layer):
            raise Unproven("it has layers of its own")
        if "call" in vars(layer):
            raise Unproven("its call is not that of its class")
        if not layer.built:
            raise Unproven("it is not built; call the model first")
        if getattr(layer, "quantization_mode", None):
            raise Unproven("it is quantised; call replace before that")
        _fresh(layer)
        target = replace(open_keras(layer, layer.name, "cpu"), library=library_of(layer))
        own = {name: value for name, value in _own(layer).items() if not isinstance(value, keras.Variable)}

        def replacement(norm: Norm) -> Target:
            return open_keras(layer, layer.name, "cpu", change=lambda fresh: self.become(fresh, norm))

        proof = decide(target, layer.call, self.tensors(layer), own, replacement)
        _require_no_more(layer, proof.norm)
        return proof

    def key_of(self, layer: Any) -> Any:
        try:
            config = {name: value for name, value in layer.get_config().items() if name != "name"}
        except Exception:  # of the layer's class
            return id(layer)
        weights = tuple((weight.name, tuple(weight.shape)) for weight in layer.weights)
        return type(layer), repr(config), "call" in vars(layer), layer.built, weights

    @_on_one_device()
    def require_as_proven(self, layer: Any, norm: Norm) -> None:
        """The layer itself must compute what a new one from its config, which was proven, computes with its weights.

        Raises:
            Unproven: it does not.
        """
        built = next(iter((layer._build_shapes_dict or {}).values()), None) or norm.example
        if not norm.takes(built):
            raise Unproven(f"it was built for x of {len(built)} axes, for which nothing was proven")
        x = np.random.default_rng(0).normal(size=[size or 3 for size in built]).astype("float32")
        fresh = _fresh(layer)
        try:
            build(fresh, x.shape)
            fresh.set_weights(layer.get_weights())
        except ValueError:
            raise Unproven("a layer from its config has other weights") from None
        want, got = (_bits(each, norm, x) for each in (layer, fresh))
        if want != got:
            raise Unproven("it computes another y than a layer from its config with the same weights")

    def become(self, layer: Any, norm: Norm) -> None:
        """Gives a layer another call; its class stays, and so do its config and what is saved of it."""
        own, set_attribute = layer.call, layer._setattr_hook

        @functools.wraps(own)
        def call(*inputs: Any, **named: Any) -> Any:
            asked = {name: value for name, value in named.items() if name != "training" and value is not None}
            x, gate = called_with(norm, is_float, inputs, asked)
            shape = getattr(x, "shape", None)
            if shape is None or not norm.takes(shape):
                return own(*inputs, **named)
            scale, bias = (_weight(layer, name) for name in (norm.scale, norm.bias))
            rms_norm = functools.partial(compute, out_dtype=keras.backend.standardize_dtype(x.dtype))
            return computed(keras.ops, rms_norm, norm, keras.ops.shape(x), x, scale, bias, gate)

        call.norm = norm  # type: ignore[attr-defined]
        object.__setattr__(layer, "call", call)

        def checked(name: str, value: Any) -> tuple[str, Any]:
            require_its_eps(norm, vars(layer), name, value)
            hooked: tuple[str, Any] = set_attribute(name, value)
            return hooked

        object.__setattr__(layer, "_setattr_hook", checked)  # which every assignment to an attribute calls

    def finish(self, model: Any) -> None:
        """Functions that were traced before the layers changed are traced again."""
        for layer in model._flatten_layers():
            if isinstance(layer, keras.Model):
                layer.train_function = layer.test_function = layer.predict_function = None


BACKEND: Final = Keras()
