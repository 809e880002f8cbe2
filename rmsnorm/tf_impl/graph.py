"""A call in a graph of TensorFlow: a function in the graph computes it, which XLA compiles when the graph runs.

XLA compiles the function once for every size of x, which takes a tenth of a second. A SavedModel contains the function,
too. Beside it the graph contains the float32 operations of lite.py, and TensorFlow's operation DeviceIndex chooses one
of the two when the graph runs. It chooses lite.py in a converter, such as that of LiteRT, which knows no device and no
float64, and where XLA compiles a function that was traced before.

A graph contains plain operations instead

- if XLA compiles the whole graph,
- in a graph of TensorFlow 1,
- under a ForwardAccumulator, which can differentiate operations only,
- in tf.vectorized_map,
- if RMSNORM_XLA=0 is set. Users set it if every call has another size, for other converters, to save the state of a
  tf.data iterator that calls rms_norm, and to save a model that tf.vectorized_map calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import tensorflow as tf

from rmsnorm.specification import environment
from rmsnorm.specification.call import Call, filled, without_none
from rmsnorm.tf_impl import lite, operations, private
from rmsnorm.tf_impl.rounding import cast

_DEVICES = ["CPU", "GPU"]


@dataclass(frozen=True)
class Function:
    """A function of the call and of tensors. The last tensors are constants to every derivative.

    TensorFlow compiles ``exact`` once for equal functions. Results of ``operations`` have TensorFlow's own derivatives.
    """

    exact: Callable[..., Any]
    lite: Callable[..., Any]
    operations: Callable[..., Any]
    constants: int


@dataclass(frozen=True)
class Pullback:
    """The derivative of a function: of the gradients of its results, and of its tensors."""

    function: Callable[..., Any]
    results: int
    constants: int

    def __call__(self, call: Call, *tensors: tf.Tensor | None) -> list[tf.Tensor]:
        upstream, arguments = tensors[: self.results], tensors[self.results :]
        variables = without_none(arguments[: -self.constants])
        results = without_none(self.function(call, *arguments))
        # not a tape: it records nothing in a graph that TensorFlow traces while it stops all tapes
        return list(tf.gradients(results, variables, upstream, unconnected_gradients="zero"))


def uses_xla() -> bool:
    """Whether XLA may compile the calls that it is faster for, also where the program does not ask for it."""
    return environment.read("RMSNORM_XLA") != "0"


def may_hold_functions(tensors: Iterable[tf.Tensor | None]) -> bool:
    """Whether what is computed of the tensors of a graph may be a function of its own."""
    is_version_2 = tf.compat.v1.executing_eagerly_outside_functions()
    return is_version_2 and uses_xla() and private.takes_functions(without_none(tensors))


def forward(
    call: Call, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """y and 1 / rho, rounded, with derivatives of every order of y."""
    reduced = [1 if axis in call.axes else size for axis, size in enumerate(call.shape)]

    def gradient(upstream: Sequence[Any], tensors: Sequence[Any], results: Sequence[Any]) -> list[tf.Tensor | None]:
        dy, inverse_rms = tf.convert_to_tensor(upstream[0]), results[1]
        return backward(call, *[dy, *tensors, inverse_rms])

    y, _, inverse_rms = _with_gradient(_FORWARD, call, [h, scale, bias, mask], [h.shape, reduced, reduced], gradient)
    return y, inverse_rms


def backward(
    call: Call, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    inverse_rms: tf.Tensor | None,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx, dscale and dbias in the dtypes of h, scale and bias, with derivatives of every order.

    The gradient in a SavedModel is of operations: TensorFlow does not save what the gradient of a gradient is.
    """
    tensors = [dy, h, scale, bias, mask, inverse_rms]
    if private.is_saved():
        return _backward_of_operations(call, *tensors)
    return filled(_differentiable(_BACKWARD, call, tensors, [h, scale, bias]), [h, scale, bias])


def _rounded_forward(call: Call, *tensors: Any) -> list[tf.Tensor]:
    y, inverse_rms = operations.forward(call, *tensors)
    return [y, inverse_rms, cast(inverse_rms, call.inverse_rms)]


def _recalled_backward(
    call: Call, dy: Any, h: Any, scale: Any, bias: Any, mask: Any, inverse_rms: Any
) -> list[tf.Tensor | None]:
    return operations.gradients(call, dy, h, scale, bias, mask, None, inverse_rms, recall=True)[:3]


def _backward_of_operations(call: Call, dy: Any, h: Any, scale: Any, bias: Any, mask: Any, _: Any) -> list[Any]:
    return operations.gradients(call, dy, h, scale, bias, mask, None, None)[:3]


_FORWARD = Function(_rounded_forward, lite.forward, _rounded_forward, 1)
_BACKWARD = Function(_recalled_backward, lite.backward, _backward_of_operations, 2)


def _differentiable(
    function: Function, call: Call, tensors: list[tf.Tensor | None], like: list[tf.Tensor | None]
) -> list[tf.Tensor]:
    """The results that are not None, each shaped as its tensor of ``like``."""
    if not may_hold_functions(tensors[: -function.constants]):
        return without_none(function.exact(call, *tensors))

    def gradient(upstream: Sequence[Any], tensors: Sequence[Any], _: Any) -> list[tf.Tensor | None]:
        forms = (function.exact, function.lite, function.operations)
        exact, other, plain = (Pullback(form, len(upstream), function.constants) for form in forms)
        pullback = Function(exact, other, plain, function.constants)
        variables = [*tensors[: -function.constants]]
        return filled(_differentiable(pullback, call, [*upstream, *tensors], variables), variables)

    return _with_gradient(function, call, tensors, [tensor.shape for tensor in without_none(like)], gradient)


def _with_gradient(
    function: Function, call: Call, tensors: list[tf.Tensor | None], shapes: Sequence[Any],
    gradient: Callable[..., list[tf.Tensor | None]],
) -> list[tf.Tensor]:  # fmt: skip
    """The results that are not None; ``gradient`` takes their gradients, the tensors and the results."""
    constants = [None] * len(without_none(tensors[-function.constants :]))

    @tf.custom_gradient
    def run(*arguments: tf.Tensor) -> Any:
        # of this graph, for the gradient, where tensors of a graph around this one may be out of scope
        inner = [None if t is None else tf.identity(t) for t in filled(arguments, tensors)]
        results = _run(function, call, inner, shapes)
        return results, lambda *upstream: [*without_none(gradient(upstream, inner, results)), *constants]

    results = list(run(*without_none(tensors)))

    def rows(inputs: Any) -> list[tuple[tf.Tensor, bool]]:
        """For tf.vectorized_map, which drops custom gradients: operations, which have their own."""
        inputs = inputs.inputs[len(results) :]

        def row(stacked: list[tf.Tensor]) -> list[tf.Tensor]:
            rest = iter(stacked)
            arguments = [next(rest) if tensor.is_stacked else tensor.t for tensor in inputs]
            return without_none(function.operations(call, *filled(arguments, tensors)))

        mapped = tf.vectorized_map(row, [tensor.t for tensor in inputs if tensor.is_stacked])
        return [*((result, True) for result in mapped), *((tensor.t, tensor.is_stacked) for tensor in inputs)]

    private.vectorize(results[0], rows)
    return results


def _run(function: Function, call: Call, tensors: Sequence[tf.Tensor | None], shapes: Sequence[Any]) -> list[tf.Tensor]:
    """The results that are not None. The tensors are constants: a tape would keep what is computed inside."""
    tensors = [None if t is None else tf.stop_gradient(t) for t in tensors]
    general = signature(call, tensors)
    present = without_none(tensors)
    dtypes = [tensor.dtype.name for tensor in tensors[: -function.constants] if tensor is not None]
    if "float64" in (call.product, call.result, *dtypes):
        results = without_none(compiled(function.exact, *general)(*present))
    else:
        specs = tuple(None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in tensors)
        by_xla, otherwise = _branch(function, True, *general), _branch(function, False, call, specs)
        branches = [branch.get_concrete_function() for branch in (*[by_xla] * len(_DEVICES), otherwise)]
        # not tf.switch_case, of which the converter of LiteRT cannot tell the branches
        results = tf.raw_ops.StatelessCase(
            branch_index=_device_index(), input=present, branches=branches,
            Tout=[output.dtype for output in branches[0].outputs], output_shapes=[*map(tf.TensorShape, shapes)],
        )  # fmt: skip
    private.vectorize(results[0], _replaced)
    results = [tf.stop_gradient(result) for result in results]
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return results


def _replaced(inputs: Any) -> list[tuple[tf.Tensor, bool]]:
    """For tf.vectorized_map: the results that operations replace, which need no time to trace."""
    shapes = [[size or 0 for size in result.shape] for result in inputs.outputs]
    pairs = zip(shapes, inputs.outputs, strict=True)
    return [(tf.fill(shape, tf.constant(float("nan"), result.dtype)), False) for shape, result in pairs]


@lru_cache(maxsize=256)
def _branch(function: Function, is_exact: bool, call: Call, specs: tuple[tf.TensorSpec | None, ...]) -> Any:
    def run(*tensors: tf.Tensor) -> Any:
        if is_exact:
            return without_none(compiled(function.exact, call, specs)(*tensors))
        return without_none(function.lite(call, *filled(tensors, specs)))

    return tf.function(run, input_signature=without_none(specs), autograph=False)


def _device_index() -> tf.Tensor:
    """Of the device that runs the graph; where XLA compiles, and in a converter, the number of devices."""
    index = tf.raw_ops.DeviceIndex(device_names=_DEVICES)
    # for tf.vectorized_map: one number for all rows
    private.vectorize(index, lambda _: [(_device_index(), False)])
    return index


def signature(call: Call, tensors: Sequence[tf.Tensor | None]) -> tuple[Call, tuple[tf.TensorSpec | None, ...]]:
    """The call and the tensors for all sizes of the axes that are neither normalised nor those of the parameters."""
    fixed = {*call.axes, *call.feature_axes}
    shape = tuple(size if axis in fixed else None for axis, size in enumerate(call.shape))
    specs = tuple(
        None
        if t is None
        else tf.TensorSpec([s if r else None for s, r in zip(t.shape, shape, strict=True)], t.dtype)
        if t.shape.rank == len(shape)
        else tf.TensorSpec(t.shape, t.dtype)
        for t in tensors
    )
    return replace(call, shape=shape), specs


@lru_cache(maxsize=128)
def compiled(function: Callable[..., Any], call: Call, specs: tuple[tf.TensorSpec | None, ...]) -> Any:
    def run(*tensors: tf.Tensor) -> Any:
        return function(call, *filled(tensors, specs))

    return tf.function(run, input_signature=without_none(specs), jit_compile=True, autograph=False)
