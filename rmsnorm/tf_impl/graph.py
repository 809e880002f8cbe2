"""A call in a graph of TensorFlow: a function of plain operations, in whose place TensorFlow runs one compiled by XLA.

The graph calls a function of the operations of portable.py. Exporters, converters and quantisers see only these. Where
TensorFlow runs the graph on a CPU or a GPU, its own optimiser calls another implementation of the same interface: the
operations of operations.py, which XLA compiles once for every size of x. (This is how Keras chooses an LSTM for a GPU;
two attributes of the functions say it, ``api_implements`` and ``api_preferred_device``.) A SavedModel contains both.
Where nothing chooses, as where XLA compiles a function that was traced before, the formula of portable.py computes.

A graph contains the operations of operations.py instead

- if XLA compiles the whole graph,
- in a graph of TensorFlow 1, and in a function of tf.data, where nothing chooses,
- under a ForwardAccumulator, which can differentiate operations only,
- in tf.vectorized_map,
- while tf.debugging.enable_check_numerics checks every operation, for which XLA has no kernel,
- if RMSNORM_XLA=0 is set. Users set it if every call has another size, and to save a model that tf.vectorized_map
  calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import tensorflow as tf

from rmsnorm.specification import environment
from rmsnorm.specification.absent import filled, without_none
from rmsnorm.specification.call import Call
from rmsnorm.specification.dtypes import promote
from rmsnorm.tf_impl import operations, portable, private
from rmsnorm.tf_impl.rounding import cast

_OPS = SimpleNamespace(  # as keras.ops names them
    abs=tf.abs, cast=tf.cast, max=tf.reduce_max, maximum=tf.maximum, mean=tf.reduce_mean, ones_like=tf.ones_like,
    rsqrt=tf.math.rsqrt, sum=tf.reduce_sum, where=tf.where, zeros_like=tf.zeros_like,
)  # fmt: skip


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
        h, scale, bias, mask = tensors
        return backward(call, tf.convert_to_tensor(upstream[0]), h, scale, bias, mask, results[1])

    functions = (_forward, _portable_forward)
    y, _, inverse_rms = _with_gradient(
        functions, call, [h, scale, bias, mask], 1, [h.shape, reduced, reduced], gradient
    )
    return y, inverse_rms


def backward(
    call: Call, dy: tf.Tensor, h: tf.Tensor, scale: tf.Tensor | None, bias: tf.Tensor | None, mask: tf.Tensor | None,
    inverse_rms: tf.Tensor | None,
) -> list[tf.Tensor | None]:  # fmt: skip
    """dx, dscale and dbias in the dtypes of h, scale and bias, with derivatives of every order.

    In a SavedModel they are operations: TensorFlow does not save what the gradient of a gradient is.
    """
    tensors, primals = [dy, h, scale, bias, mask, inverse_rms], [h, scale, bias]
    if private.is_saved() or not may_hold_functions(tensors[:-2]):
        return _backward(call, *tensors[:-1])

    def gradient(upstream: Sequence[Any], tensors: Sequence[Any], _: Any) -> list[tf.Tensor | None]:
        results, variables = without_none(_backward(call, *tensors[:-1])), without_none(tensors[:-2])
        # not a tape: it records nothing in a graph that TensorFlow traces while it stops all tapes
        gradients = tf.gradients(results, variables, upstream, unconnected_gradients="zero")
        return filled(gradients, tensors[:-2])

    functions, shapes = (_backward, _portable_backward), [t.shape for t in without_none(primals)]
    return filled(_with_gradient(functions, call, tensors, 2, shapes, gradient), primals)


def _forward(call: Call, *tensors: Any) -> list[tf.Tensor]:
    """y, and 1 / rho in the formats of the arithmetic and of the result."""
    y, inverse_rms = operations.forward(call, *tensors)
    return [y, inverse_rms, cast(inverse_rms, call.inverse_rms)]


def _backward(
    call: Call, dy: Any, h: Any, scale: Any, bias: Any, mask: Any, inverse_rms: Any = None
) -> list[tf.Tensor | None]:
    return operations.gradients(call, dy, h, scale, bias, mask, None, inverse_rms)[:3]


def _portable_forward(call: Call, h: Any, scale: Any, bias: Any, mask: Any) -> list[tf.Tensor]:
    wide = promote("float32", call.x, call.result)
    y, inverse_rms, empty = _portable(call, tf.cast(h, wide), mask)
    y = tf.cast(_with_parameters(call, y, scale, bias, wide), call.result)
    y = y if empty is None else tf.where(empty, tf.zeros_like(y), y)
    return [y, tf.cast(inverse_rms, tf.float64), tf.cast(inverse_rms, call.inverse_rms)]


def _portable_backward(call: Call, dy: Any, h: Any, scale: Any, bias: Any, mask: Any, _: Any) -> list[Any]:
    """From x alone: the derivative of y as it is before it is rounded."""
    wide, primals = promote("float32", call.x, call.result), (h, scale, bias)
    x, gain, shift = variables = [None if p is None else tf.cast(p, wide) for p in primals]
    y, _, empty = _portable(call, portable.counted_only(_OPS, x, mask), mask)
    y = _with_parameters(call, y, gain, shift, wide, is_rounded=False)
    y = y if mask is None else portable.counted_only(_OPS, y, mask & ~empty)
    gradients = filled(tf.gradients(y, without_none(variables), tf.cast(dy, wide)), primals)
    return [None if p is None else tf.cast(gradient, p.dtype) for gradient, p in zip(gradients, primals, strict=True)]


def _portable(call: Call, h: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor, Any]:
    """h / rho and 1 / rho, both 0 in rows with nothing counted, and which rows these are."""
    part, c = operations.leading_part(call, h, mask)
    counted, k, empty = operations.count(part, c, mask, h.dtype)
    results = portable.normalised(_OPS, part, h, c, counted, k, tf.stop_gradient, empty)
    return *(results if empty is None else [tf.where(empty, tf.zeros_like(r), r) for r in results]), empty


def _with_parameters(call: Call, y: Any, scale: Any, bias: Any, wide: str, is_rounded: bool = True) -> Any:
    gain, shift = (None if p is None else operations.features(call, p, y) for p in (scale, bias))
    return portable.with_parameters(_OPS, call, y, gain, shift, wide, is_rounded)


def _with_gradient(
    functions: tuple[Callable[..., Any], Callable[..., Any]], call: Call, tensors: list[tf.Tensor | None],
    constants: int, shapes: Sequence[Any], gradient: Callable[..., list[tf.Tensor | None]],
) -> list[tf.Tensor]:  # fmt: skip
    """The results of the functions (see ``_implementations``) that are not None, with their gradient.

    ``gradient`` takes the gradients of the results, the tensors and the results, and returns the gradients of the
    tensors but the last ones, mask and 1 / rho: ``constants`` says how many have no derivative.
    """
    none = [None] * len(without_none(tensors[-constants:]))

    @tf.custom_gradient
    def run(*arguments: tf.Tensor) -> Any:
        # of this graph, for the gradient, where tensors of a graph around this one may be out of scope
        inner = [None if t is None else tf.identity(t) for t in filled(arguments, tensors)]
        results = _run(functions, call, inner)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
        return results, lambda *upstream: [*without_none(gradient(upstream, inner, results)), *none]

    results = list(run(*without_none(tensors)))

    def rows(inputs: Any) -> list[tuple[tf.Tensor, bool]]:
        """For tf.vectorized_map, which drops custom gradients: operations, which have their own."""
        inputs = inputs.inputs[len(results) :]

        def row(stacked: list[tf.Tensor]) -> list[tf.Tensor]:
            slices = iter(stacked)
            arguments = filled([next(slices) if tensor.is_stacked else tensor.t for tensor in inputs], tensors)
            return without_none(_forward(call, *arguments) if constants == 1 else _backward(call, *arguments[:-1]))

        mapped = tf.vectorized_map(row, [tensor.t for tensor in inputs if tensor.is_stacked])
        return [*((result, True) for result in mapped), *((tensor.t, tensor.is_stacked) for tensor in inputs)]

    private.vectorize(results[0], rows)
    return results


def _run(
    functions: tuple[Callable[..., Any], Callable[..., Any]], call: Call, tensors: Sequence[tf.Tensor | None]
) -> list[tf.Tensor]:
    """The results that are not None. The tensors are constants: a tape would keep what is computed inside."""
    tensors = [None if t is None else tf.stop_gradient(t) for t in tensors]
    specs = tuple(None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in tensors)
    plain, *compiled_ones = _implementations(*functions, call, specs, *signature(call, tensors))
    for function in compiled_ones:
        function.add_to_graph(tf.compat.v1.get_default_graph())
    return [tf.stop_gradient(result) for result in plain(*without_none(tensors))]


@lru_cache(maxsize=256)
def _implementations(
    exact: Callable[..., Any], formula: Callable[..., Any], call: Call, specs: tuple[tf.TensorSpec | None, ...],
    general: Call, general_specs: tuple[tf.TensorSpec | None, ...],
) -> list[Any]:  # fmt: skip
    """Functions of one interface, of which TensorFlow runs one: ``formula`` in operations, which exporters see; and
    ``exact`` compiled by XLA, for a CPU and for a GPU."""
    interface = {"api_implements": f"rms_norm_{uuid4()}"}  # no other program's, whose SavedModel may be loaded, too

    def traced(run: Callable[..., Any], signature: Iterable[tf.TensorSpec | None], **attributes: str) -> Any:
        return tf.function(
            lambda *tensors: without_none(run(*tensors)), input_signature=without_none(signature), autograph=False,
            experimental_attributes={**interface, **attributes},
        ).get_concrete_function()  # fmt: skip

    fast = compiled(exact, general, general_specs)
    by_device = [traced(fast, general_specs, api_preferred_device=device) for device in ("CPU", "GPU")]
    return [traced(lambda *tensors: formula(call, *filled(tensors, specs)), specs), *by_device]


def signature(call: Call, tensors: Sequence[tf.Tensor | None]) -> tuple[Call, tuple[tf.TensorSpec | None, ...]]:
    """The call and the tensors with None for every size of which a compiled function is independent.

    These are the sizes of axes that are neither normalised nor those of the parameters: (32, 512, 768) becomes
    (None, None, 768), so that one function computes every batch.
    """
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
