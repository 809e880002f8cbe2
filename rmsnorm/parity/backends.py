"""How each framework is called on a case. Beside the tests, only this file sees more than one of them.

Gradients come by the framework's automatic differentiation and by rms_norm_vjp, derivatives along tangents by its
forward mode and by rms_norm_jvp; the worse of the two counts.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.accuracy.rounding import cast, rounded
from rmsnorm.frameworks import FRAMEWORKS
from rmsnorm.parity.cases import Array, Data
from rmsnorm.parity.judge import GRADIENTS, Implementation, Outcome, named_gradients
from rmsnorm.targets.bridges import bridge


def open_backend(key: str, device: str) -> tuple[str, Implementation]:
    """The version of a framework, and its implementation on a device.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        ValueError: it has no such device.
    """
    row = FRAMEWORKS[key]
    try:
        version = importlib.import_module(row.package).__version__
    except ModuleNotFoundError:
        raise errors.missing_framework(row.package, row.extra) from None
    return version, _LOAD[key](device)


def _numpy(device: str) -> Implementation:
    """The derivation, row by row with the R matrix, against the golden."""
    from rmsnorm.numpy_impl.arithmetic import Rows, add
    from rmsnorm.numpy_impl.paper import derivation

    if device != "cpu":
        raise errors.not_a_choice("numpy", "device", device, ["cpu"])

    def run(data: Data) -> Outcome:
        call, rows = data.call, Rows(data.call)
        f, slope = (rows.of(part) for part in _gate(data))
        on_x, on_y = (f, np.ones(())) if call.is_gated_before else (np.ones(()), f)
        total = rows.of(add(data.x, data.residual, "float64" if call.exact_sum else call.sum)).astype(np.float64)
        h = total * on_x
        spread = [None if p is None else rows.of(p.reshape(call.feature_shape)) for p in (data.scale, data.bias)]
        unmasked = rows.of(np.asarray(True if data.mask is None else data.mask))
        dy, dh = (rows.of(v).astype(np.float64) for v in (data.dy, np.zeros(()) if data.dh is None else data.dh))
        own_dy, dy = dy, dy * on_y
        da, dg, db = (
            rows.of(np.zeros(()) if t is None else t if i == 0 else t.reshape(call.feature_shape)).astype(np.float64)
            for i, t in enumerate(data.tangents)
        )
        da = da * on_x
        y, normalised, dx, jvp = np.zeros((4, rows.count, rows.n))
        inverse_rms = np.zeros((rows.count, 1))
        for i in range(rows.count if rows.n else 0):
            counted = unmasked[i] & (np.arange(rows.n) < call.k)
            if not counted.any():
                continue
            order = np.argsort(~counted, kind="stable")  # a mask is a partial statistic of the row reordered
            back = np.argsort(order, kind="stable")
            largest = np.abs(h[i][counted]).max()
            extreme = largest > 1e100 or (call.eps == 0 and largest > 0)
            power = 2.0 ** np.floor(np.log2(largest)) if extreme and largest < np.inf else 1.0
            variant = data.variant.replace(
                eps=call.eps / power / (power if data.variant.eps_position == "inside" else 1.0),
                partial=Fraction(int(counted.sum()), rows.n),
                partial_rounding="ceil",
            )
            row = np.where(unmasked[i], h[i], 0.0)[order] / power
            matrix = derivation.r_matrix(row, variant=variant)[np.ix_(back, back)] / power
            rho = np.float64(derivation.rms(row, variant=variant))
            inverse_rms[i], normalised[i] = 1 / rho / power, h[i] / power / rho
            g, b = (None if p is None else p[i].astype(np.float64) for p in spread)
            gain = 1.0 if g is None else call.offset + g
            v, inner = np.where(unmasked[i], dy[i], 0.0), np.where(unmasked[i], normalised[i], 0.0)
            matrix = np.where(unmasked[i][:, None] & unmasked[i], matrix, 0.0)
            dx[i] = matrix.T @ (gain * v)
            jvp[i] = np.where(
                unmasked[i], (matrix @ np.where(unmasked[i], da[i], 0.0)) * gain + inner * dg[i] + db[i], 0.0
            )
            dy[i], normalised[i], y[i] = v, inner, _affine(data, normalised[i], g, b)
        if rows.n:
            dy[~(unmasked & (np.arange(rows.n) < call.k)).any(axis=1)] = 0.0
        dgate = np.where(unmasked, (dx * total if call.is_gated_before else own_dy * y) * slope, 0.0)
        dgate, dx = rows.back(dgate), rows.back(np.where(unmasked, dx * on_x, 0.0) + dh)
        over = {"dscale": rows.back(dy * normalised), "dbias": rows.back(dy)}
        results = {
            "y": cast(rows.back(y * on_y), call.result),
            "inverse_rms": cast(rows.back(inverse_rms), call.inverse_rms),
            "dx": cast(dx, data.x.dtype.name),
            "jvp": cast(rows.back(np.where(unmasked, jvp * on_y, 0.0)), call.result),
        }
        for name, parameter in (("dscale", data.scale), ("dbias", data.bias)):
            if parameter is not None:
                results[name] = over[name].sum(axis=call.shared_axes)
                results[name] = cast(results[name], parameter.dtype.name)
        if data.residual is not None:
            results["dresidual"] = cast(dx, data.residual.dtype.name)
        if data.gate is not None:
            results["dgate"] = cast(dgate, data.gate.dtype.name)
        return Outcome({name: [value] for name, value in results.items()})

    def quietly(data: Data) -> Outcome:
        with np.errstate(all="ignore"):
            return run(data)

    return quietly


def _ways(framework: str, device: str) -> tuple[Callable[[Array | None], Any], Callable[[Any], Array]]:
    """How an array goes into a framework, None as it is, and how it comes back."""
    between = bridge(framework, device)
    return lambda array: None if array is None else between.send(array), between.fetch


def _gate(data: Data) -> tuple[Array, Array]:
    """f(z) and its derivative; 1 and 0 without a gate."""
    if data.gate is None:
        return np.ones(()), np.zeros(())
    z = data.gate.astype(np.float64)
    s, rest = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
    return (z * s, s * (1 + z * rest)) if data.variant.gate_function == "silu" else (s, s * rest)


def _affine(data: Data, normalised: Array, g: Array | None, b: Array | None) -> Array:
    call = data.call
    if call.norm is None:
        y = normalised * (1.0 if g is None else call.offset + g) + (-0.0 if b is None else b)
        return np.asarray(y)
    y = rounded(normalised, call.norm)
    if g is not None:
        gain = rounded(call.offset + g, call.product)
        y = rounded(y * gain, call.product)
    return y if b is None else rounded(y + b, call.product)


def _torch(device: str) -> Implementation:
    import torch

    from rmsnorm.torch_impl import rms_norm, rms_norm_jvp, rms_norm_vjp

    send, fetch = _ways("torch", device)

    def run(data: Data) -> Outcome:
        options = {**data.options, "mask": send(data.mask)}
        inputs = [send(getattr(data, name)) for name in _INPUTS]
        *primals, residual, gate = inputs
        tangents = [send(t) for t in data.tangents]
        cotangents = (send(data.dy), send(data.dh))
        before = [None if p is None else p.clone() for p in inputs]

        def function(*inputs: Any) -> Any:
            *primals, residual, gate = inputs
            return rms_norm(*primals, residual=residual, gate=gate, return_inverse_rms=True, **options)

        leaves = [None if p is None else p.detach().requires_grad_() for p in inputs]
        *outputs, inverse_rms = function(*leaves)
        wanted = [leaf for leaf in leaves if leaf is not None]
        gradients = iter(torch.autograd.grad(outputs, wanted, cotangents[: len(outputs)]))
        by_tape = [None if leaf is None else next(gradients) for leaf in leaves]
        dy = cotangents[0] if data.dh is None else cotangents
        by_formula = rms_norm_vjp(dy, *primals, residual=residual, gate=gate, **options)
        with torch.autograd.forward_ad.dual_level():
            dual: list[Any] = [
                p if t is None else torch.autograd.forward_ad.make_dual(p.contiguous(), t)
                for p, t in zip(primals, tangents, strict=True)
            ]
            forward = torch.autograd.forward_ad.unpack_dual(function(*dual, *inputs[3:])[0]).tangent
        jvp = rms_norm_jvp(primals, tangents, residual=residual, gate=gate, **options)
        changed = [
            name
            for name, was, now in zip(_INPUTS, before, inputs, strict=True)
            if was is not None and not np.array_equal(_bits(fetch(was)), _bits(fetch(now)))
        ]
        return _outcome(data, fetch, outputs[0], inverse_rms, by_tape, by_formula, (forward, jvp), changed)

    return run


def _tf(device: str) -> Implementation:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from rmsnorm.tf_impl import rms_norm, rms_norm_jvp, rms_norm_vjp

    send, fetch = _ways("tf", device)

    def run(data: Data) -> Outcome:
        with bridge("tf", device).scope(wide=False):
            options = {**data.options, "mask": send(data.mask)}
            inputs = [send(getattr(data, name)) for name in _INPUTS]
            *primals, residual, gate = inputs
            tangents = [send(t) for t in data.tangents]
            cotangents = [send(v) for v in (data.dy, data.dh)]
            wanted = [p for p in inputs if p is not None]
            before = [None if p is None else p.numpy().copy() for p in inputs]

            def function(*inputs: Any) -> Any:
                *primals, residual, gate = inputs
                return rms_norm(*primals, residual=residual, gate=gate, return_inverse_rms=True, **options)

            with tf.GradientTape() as tape:
                tape.watch(wanted)
                *outputs, inverse_rms = function(*inputs)
            gradients = iter(tape.gradient(outputs, wanted, cotangents[: len(outputs)]))
            by_tape = [None if p is None else next(gradients) for p in inputs]
            dy = cotangents[0] if data.dh is None else tuple(cotangents)
            by_formula = rms_norm_vjp(dy, *primals, residual=residual, gate=gate, **options)
            pairs = [(p, t) for p, t in zip(primals, tangents, strict=True) if t is not None]
            with tf.autodiff.ForwardAccumulator(*zip(*pairs, strict=True)) as accumulator:
                y = function(*inputs)[0]
            jvp = rms_norm_jvp(primals, tangents, residual=residual, gate=gate, **options)
            changed = [
                name
                for name, was, now in zip(_INPUTS, before, inputs, strict=True)
                if was is not None and not np.array_equal(_bits(was), _bits(now.numpy()))
            ]
            derivatives = (accumulator.jvp(y), jvp)
            return _outcome(data, fetch, outputs[0], inverse_rms, by_tape, by_formula, derivatives, changed)

    return run


def _flax(device: str) -> Implementation:
    import jax

    from rmsnorm.flax_impl import rms_norm, rms_norm_jvp, rms_norm_vjp

    send, fetch = _ways("flax", device)

    def run(data: Data) -> Outcome:
        wide = any(a is not None and a.dtype == np.float64 for a in (data.x, data.scale, data.bias, data.dy))
        with jax.enable_x64(wide):
            inputs = [send(getattr(data, name)) for name in _INPUTS]
            arrays = {name: p for name, p in zip(_INPUTS, inputs, strict=True) if p is not None}
            along = dict(zip(_INPUTS, (send(t) for t in data.tangents), strict=False))
            cotangents = [send(v) for v in (data.dy, data.dh) if v is not None]
            y, inverse_rms, by_tape, by_formula, derivatives = everything(
                data, arrays, along, cotangents, send(data.mask)
            )
            return _outcome(data, fetch, y, inverse_rms, by_tape, by_formula, derivatives, changed=())

    def everything(data: Data, arrays: Any, along: Any, cotangents: Any, mask: Any) -> Any:
        # one function for the compiler, as in a user's training step
        @jax.jit
        def compute(arrays: Any, along: Any, cotangents: Any, mask: Any) -> Any:
            options = {**data.options, "mask": mask}

            def function(arrays: Any) -> Any:
                *primals, residual, gate = (arrays.get(name) for name in _INPUTS)
                more = {**options, "return_inverse_rms": True}
                *outputs, inverse_rms = rms_norm(*primals, residual=residual, gate=gate, **more)
                return outputs, inverse_rms

            *primals, residual, gate = (arrays.get(name) for name in _INPUTS)
            outputs, pull, inverse_rms = jax.vjp(function, arrays, has_aux=True)
            (gradients,) = pull(cotangents)
            dy = cotangents[0] if data.residual is None else tuple(cotangents)
            by_formula = rms_norm_vjp(dy, *primals, residual=residual, gate=gate, **options)
            tangents = {name: jax.numpy.zeros_like(p) if along.get(name) is None else along[name]
                        for name, p in arrays.items()}  # fmt: skip
            (forward, *_), _ = jax.jvp(function, (arrays,), (tangents,))[1]
            directions = [along.get(name) for name in _INPUTS[:3]]
            jvp = rms_norm_jvp(primals, directions, residual=residual, gate=gate, **options)
            by_tape = [gradients.get(name) for name in _INPUTS]
            return outputs[0], inverse_rms, by_tape, by_formula, (forward, jvp)

        return compute(arrays, along, cotangents, mask)

    return run


_LOAD: Final[Mapping[str, Callable[[str], Implementation]]] = {
    "numpy": _numpy,
    "torch": _torch,
    "tf": _tf,
    "flax": _flax,
}
_INPUTS: Final = ("x", "scale", "bias", "residual", "gate")


def _outcome(
    data: Data,
    fetch: Callable[[Any], Array],
    y: Any,
    inverse_rms: Any,
    by_tape: Sequence[Any],
    by_formula: Sequence[Any],
    derivatives: Sequence[Any],
    changed: Sequence[str],
) -> Outcome:
    results = {"y": [fetch(y)], "inverse_rms": [fetch(inverse_rms)], "jvp": [fetch(d) for d in derivatives]}
    formulas = named_gradients(data, by_formula)
    for name, gradient in zip(GRADIENTS, by_tape, strict=True):
        ways = (gradient, formulas.get(name))
        results[name] = [fetch(gradient) for gradient in ways if gradient is not None]
    return Outcome(results, tuple(changed))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.uint8)
