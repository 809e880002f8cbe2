"""RMSNorm as a Keras layer, a drop-in for keras.layers.RMSNormalization in every variant, on every backend of Keras."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fractions import Fraction
from importlib import import_module
from typing import Any, Final, TypedDict, Unpack

import keras

from rmsnorm.specification import dtypes as formats
from rmsnorm.specification import errors
from rmsnorm.specification.call import Axis, Call, Spec
from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.specification.interface import SIZES, check_arguments
from rmsnorm.specification.resolve import check_axis, resolve
from rmsnorm.specification.variants import PRESETS, Preset, Variant, derive, get_variant

_LAST_AXIS: Final = 7  # TensorFlow's operations have at most 8 axes
_FUNCTION: Final = {name: f"call rmsnorm.tf_impl.rms_norm(x, scale, {name}={name})" for name in ("mask", "residual")}


class LayerOptions(TypedDict, total=False):
    """Arguments of keras.layers.Layer."""

    name: str | None
    dtype: Any
    trainable: bool
    autocast: bool
    activity_regularizer: Any
    input_shape: Any
    input_dim: int
    batch_shape: Any
    batch_input_shape: Any
    dynamic: Any


@keras.saving.register_keras_serializable(package="rmsnorm")
class RMSNormalization(keras.layers.Layer):
    """Root mean square layer normalization.

        y = x / rho * (o + scale) + bias,    rho = sqrt(mean(x_i^2) + epsilon)

    with the place of epsilon, the offset o, the counted elements and the roundings of the variant. On the backends
    TensorFlow, PyTorch and JAX it is the rms_norm of tf_impl, torch_impl and flax_impl: its bits, derivatives and
    kernels. On NumPy and OpenVINO the same formulas are computed by keras.ops, in float32, or float64 if x or y is. In
    graphs of TensorFlow, which LiteRT may compute in integers, a square beyond float32 is infinite unless XLA compiles
    them: y of an x above 1e19 is 0, as that of Keras's own layer.

    A Keras mask, such as one of time steps, is passed to the next layer and changes nothing here: features are
    normalised at every time step.

    Args:
        axis: normalised axis or axes, any, in any order.
        epsilon: a number >= 0; None for the variant's, 1e-6 for ``keras``.
        scale: whether there is a gain; without it the factor is 1.
        bias: whether there is one; None as in the variant: only ``equinox`` and ``lasagne`` have one.
        feature_axis: axis or axes of the weights; None for the normalised ones.
        partial: fraction of the elements, counted from the first, that the statistic uses; None for the variant's.
        variant: name of a preset or a Variant. By default the layer is ``keras``, as keras.layers.RMSNormalization; the
            functions are ``standard``, which computes the same.
        scale_initializer: of the gain; None for 1 - o, so that the factor is 1.
        bias_initializer: of the bias.
        scale_regularizer, bias_regularizer, scale_constraint, bias_constraint: as in Keras; None for none.
        **kwargs: of keras.layers.Layer, such as ``name`` and ``dtype``.

    Call arguments:
        x: floating-point, any shape of at least one axis, cast to the compute dtype by Keras. Of a tf.RaggedTensor
            axes that are not ragged are normalised.
        gate: z, shaped as x: y is multiplied by f(z), or x is before it is normalised, as ``gate_function`` and
            ``gate_position`` of the variant say.

    Returns:
        y, shaped as x and in its dtype, the compute dtype, whatever the variant. Weights keep their own dtype:
        under a mixed policy the gain is float32, and is not rounded.

    Raises:
        TypeError: epsilon, partial, variant or an axis is of the wrong type; x or the gate is not floating-point.
        ValueError: an axis is out of range or repeated; the size of one that has weights is unknown; epsilon, partial
            or variant is not valid; the gate has another shape than x.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import numpy as np
        >>> layer = RMSNormalization(epsilon=0.0)
        >>> np.asarray(layer(np.array([[3.0, 4.0]], "float32"))).round(4)
        array([[0.8485, 1.1314]], dtype=float32)
        >>> RMSNormalization(variant="nematus").epsilon
        1e-05
    """

    def __init__(
        self,
        axis: Axis = -1,
        epsilon: float | None = None,
        *,
        scale: bool = True,
        bias: bool | None = None,
        feature_axis: Axis | None = None,
        partial: float | Fraction | None = None,
        variant: Preset | Variant = "keras",
        scale_initializer: Any = None,
        bias_initializer: Any = "zeros",
        scale_regularizer: Any = None,
        bias_regularizer: Any = None,
        scale_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Unpack[LayerOptions],
    ) -> None:
        check_arguments("RMSNormalization", kwargs, (*_ARGUMENTS, *LayerOptions.__annotations__))
        check_axis("RMSNormalization", "axis", axis)
        if feature_axis is not None:
            check_axis("RMSNormalization", "feature_axis", feature_axis)
        if isinstance(axis, int) and axis > _LAST_AXIS:
            want = f"an axis up to {_LAST_AXIS}, no size"
            raise errors.out_of_domain("RMSNormalization", "axis", axis, want, SIZES["dim"])
        super().__init__(**kwargs)
        if self.compute_dtype not in formats.FLOATS:
            raise errors.not_a_choice("RMSNormalization", "dtype", self.compute_dtype, formats.FLOATS)
        self._choose(variant, epsilon, partial)
        self.axis = _plain(axis)
        self.feature_axis = _plain(feature_axis)
        self.use_scale = scale
        self.use_bias = self.variant.bias if bias is None else bias
        if scale_initializer is None:
            scale_initializer = keras.initializers.Constant(1 - self.variant.scale_offset)
        self.scale_initializer = keras.initializers.get(scale_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.scale_regularizer = keras.regularizers.get(scale_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.scale_constraint = keras.constraints.get(scale_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.scale = self.bias = None
        self.supports_masking = True

    def _choose(self, variant: Preset | Variant, epsilon: float | None, partial: float | Fraction | None) -> None:
        """Keeps what the user gives, and what that makes of the variant. An error leaves the layer as it is."""
        self._variant = derive("RMSNormalization", variant, epsilon, partial)
        self._given_variant = get_variant("RMSNormalization", variant)
        self._given_epsilon, self._given_partial = epsilon, partial

    @property
    def variant(self) -> Variant:
        """What the layer computes, with its epsilon and partial. Each of the three may be set at any time.

        A new variant keeps the epsilon and the partial that were given beside the old one; those of the old one itself
        go with it.
        """
        return self._variant

    @variant.setter
    def variant(self, variant: Preset | Variant) -> None:
        self._choose(variant, self._given_epsilon, self._given_partial)

    @property
    def epsilon(self) -> float | None:
        return self._variant.eps

    @epsilon.setter
    def epsilon(self, epsilon: float | None) -> None:
        self._choose(self._given_variant, epsilon, self._given_partial)

    @property
    def partial(self) -> float | Fraction | None:
        return self._variant.partial

    @partial.setter
    def partial(self, partial: float | Fraction | None) -> None:
        self._choose(self._given_variant, self._given_epsilon, partial)

    def __repr__(self) -> str:
        built = f"built={self.built}"
        return f"<RMSNormalization name={self.name}, epsilon={self.epsilon}, variant={self.variant.label!r}, {built}>"

    def build(self, input_shape: Sequence[int | None]) -> None:
        call = self._resolve(input_shape)
        for axis in call.feature_axes:
            if call.shape[axis] is None and (self.use_scale or self.use_bias):
                raise errors.unknown_size("RMSNormalization", "x", axis)
        shape = tuple(call.shape[axis] for axis in call.feature_axes)
        if self.use_scale:
            self.scale = self.add_weight(
                shape, self.scale_initializer, name="scale", autocast=False,
                regularizer=self.scale_regularizer, constraint=self.scale_constraint,
            )  # fmt: skip
        if self.use_bias:
            self.bias = self.add_weight(
                shape, self.bias_initializer, name="bias", autocast=False,
                regularizer=self.bias_regularizer, constraint=self.bias_constraint,
            )  # fmt: skip

    def call(self, x: Any, gate: Any = None) -> Any:
        if isinstance(x, keras.KerasTensor):  # of somebody who calls this in place of the layer
            return self(x, gate=gate)
        x, gate = _tensor(x), None if gate is None else _tensor(gate)
        axis, feature_axis, values = _hashable(self.axis), _hashable(self.feature_axis), x
        if hasattr(x, "flat_values"):  # a tf.RaggedTensor
            values, (axis, feature_axis) = x.flat_values, self._axes_of_flat_values(x, gate)
        scale, bias = (None if w is None else w.value for w in (self.scale, self.bias))
        y = compute(
            values, scale, bias, variant=self.variant, axis=axis, feature_axis=feature_axis, gate=gate,
            out_dtype=keras.backend.standardize_dtype(x.dtype),
        )  # fmt: skip
        return y if values is x else x.with_flat_values(y)

    def _axes_of_flat_values(self, x: Any, gate: Any) -> tuple[Axis, Axis]:
        """axis and feature_axis in the flat values of a tf.RaggedTensor, which have its ragged axes as their first."""
        if gate is not None:
            fix = "pass x.to_tensor() and gate.to_tensor()"
            raise errors.wrong_type("RMSNormalization", "gate", gate, "None beside a ragged x", fix)
        call = self._resolve(x.shape)
        if call.first_of_row <= x.ragged_rank:
            want = f"a tensor with no ragged axis from axis {call.first_of_row} on, where the layer computes"
            raise errors.wrong_type("RMSNormalization", "x", x, want, "pass x.to_tensor(), or another axis")
        axes, feature_axes = (tuple(axis - x.ragged_rank for axis in part) for part in (call.axes, call.feature_axes))
        return axes, feature_axes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is None:
            raise errors.wrong_type("RMSNormalization", "x", None, "a tensor", "pass the output of the layer before")
        for name in kwargs.keys() & {"mask", "residual"}:
            raise errors.unknown_argument("RMSNormalization", name, ["x", "gate"], _FUNCTION)
        return super().__call__(*args, **kwargs)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        return self._resolve(input_shape).shape

    def get_config(self) -> dict[str, Any]:
        """The arguments, but those of ours that are as by default: the built-in layer takes what is left then."""
        preset = self._given_variant
        named = PRESETS.get(preset.name) == preset
        chosen = {
            "scale": (self.use_scale, True),
            "bias": (self.use_bias, preset.bias),
            "feature_axis": (_plain(self.feature_axis), None),
            "partial": (_number(self.partial), _number(preset.partial)),
            "variant": (preset.name if named else {**asdict(preset), "partial": _number(preset.partial)}, "keras"),
            "scale_initializer": (self.scale_initializer, keras.initializers.Constant(1 - preset.scale_offset)),
            "bias_initializer": (self.bias_initializer, keras.initializers.Zeros()),
            "scale_regularizer": (self.scale_regularizer, None),
            "bias_regularizer": (self.bias_regularizer, None),
            "scale_constraint": (self.scale_constraint, None),
            "bias_constraint": (self.bias_constraint, None),
        }
        pairs = ((name, map(keras.saving.serialize_keras_object, pair)) for name, pair in chosen.items())
        ours = {name: value for name, (value, default) in pairs if value != default}
        return {**super().get_config(), "axis": _plain(self.axis), "epsilon": self.epsilon, **ours}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RMSNormalization:
        config = dict(config)
        if isinstance(config.get("partial"), str):
            config["partial"] = Fraction(config["partial"])
        if isinstance(variant := config.get("variant"), dict):
            partial = variant["partial"]
            config["variant"] = Variant(**{**variant, "partial": None if partial is None else Fraction(str(partial))})
        return super().from_config(config)

    def _resolve(self, input_shape: Sequence[int | None]) -> Call:
        return resolve(
            "RMSNormalization", Spec(tuple(input_shape), self.compute_dtype),
            variant=self.variant, axis=self.axis, feature_axis=self.feature_axis,
        )  # fmt: skip


_ARGUMENTS: Final = tuple(inspect.signature(RMSNormalization.__init__).parameters)[1:-1]


def _rms_norm_on(backend: str) -> Callable[..., Any]:
    """The function that computes on a backend of Keras, which has the name of a package of arrays."""
    folders = {row.package: row.folder for row in FRAMEWORKS.values() if row.key != "numpy"}  # the golden is too slow
    module = f"{folders[backend]}.functional" if backend in folders else "tf_impl.keras_ops"
    name = "in_layer" if backend == "tensorflow" else "rms_norm"
    function: Callable[..., Any] = getattr(import_module(f"rmsnorm.{module}"), name)
    return function


compute = _rms_norm_on(keras.backend.backend())  # rms_norm on the arrays of that backend


def _tensor(x: Any) -> Any:
    """x as ``__call__`` hands it on, from somebody who calls ``call`` or ``stateless_call`` with another array."""
    return x if keras.ops.is_tensor(x) else keras.ops.convert_to_tensor(x)


def _hashable(axis: Any) -> Any:
    """Axes as caches of calls look them up."""
    return tuple(axis) if isinstance(axis, list) else axis


def _plain(axis: Any) -> Any:
    """Axes as JSON has them."""
    return list(axis) if isinstance(axis, (list, tuple)) else axis


def _number(partial: Any) -> float | str | None:
    """A fraction as JSON has it: a float that reads as the same one, else its words."""
    if partial is None:
        return None
    return float(partial) if Fraction(str(float(partial))) == partial else str(partial)
