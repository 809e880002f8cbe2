"""The transforms of each framework, around any function of named arrays, and RMSNorm in its plain operations.

A function takes a dictionary of arrays, its leaves, and returns one array. A transform of it is one, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import calls
import numpy as np
from calls import Arguments

BOUND = 1000  # units of the largest element: at most some hundred operations in a row, on numbers about 1
Leaves = dict[str, Any]
Function = Callable[[Leaves], Any]


def pattern(shape: Any, phase: float = 0.0) -> Any:
    """Weights of a sum, or a direction, that no symmetry of a result agrees with."""
    return np.cos(1.0 + phase + 1.7 * np.arange(math.prod(shape))).reshape(tuple(shape))


def live(data: Arguments) -> tuple[Any, Any]:
    """Which elements have derivatives: of those that the mask lets through, rows where some are counted; and these."""
    mask, call = np.broadcast_to(True if data.mask is None else data.mask, data.x.shape), data.call
    along = [size if axis in call.axes else 1 for axis, size in enumerate(data.x.shape)]
    counted = mask & (np.arange(call.n) < call.k).reshape(along)
    return mask & counted.any(axis=call.axes, keepdims=True), counted


def of_one(f: Function, leaves: Leaves, which: str) -> Callable[[Any], Any]:
    return lambda leaf: f({**leaves, which: leaf})


class Framework:
    """What the formula and the comparison need of one of them."""

    derivatives: ClassVar[tuple[str, ...]]  # transforms that differentiate, for a leaf or along directions of all
    others: ClassVar[tuple[str, ...]]  # those that leave the numbers as they are, or compute some at once
    outer: ClassVar[tuple[str, ...]] = ()  # those of both kinds that go around the others, never inside
    under_mask = np.nan  # what x and a gate hold where they are masked
    rms_norm: Any
    like: Callable[[Any, Any], Any]
    where: Callable[[Any, Any, Any], Any]
    total: Callable[..., Any]
    constant: Callable[[Any], Any]

    def value(self, function: Function, arrays: Leaves) -> Any:
        return np.asarray(function({name: self.constant(array) for name, array in arrays.items()}))

    def reference(self, function: Function, arrays: Leaves) -> Any:
        return self.value(function, arrays)

    def wrap(self, name: str, function: Function, which: str) -> Function:
        """The transform of this name, for one of the leaves where it is for one."""
        raise NotImplementedError

    def along(self, leaves: Leaves) -> Leaves:
        return {name: self.like(pattern(leaf.shape, len(name)), leaf) for name, leaf in leaves.items()}

    def weighted(self, y: Any) -> Any:
        return self.total(y * self.like(pattern(y.shape), y))

    def another(self, leaf: Any) -> Any:
        """A leaf whose numbers have the same signs."""
        return leaf * self.like(1 + 0.5 * pattern(leaf.shape, 0.7), leaf)

    def plain(self, leaves: Leaves, data: Arguments) -> Any:
        """The textbook: h / rho * (offset + scale) + bias, with the gate before or after; 0 where it is constant."""
        call, variant, shape = data.call, data.variant, data.x.shape
        x = leaves["x"]
        h = total = x + leaves["residual"] if "residual" in leaves else x
        factor = None
        if "gate" in leaves:
            factor = 1 / (1 + math.e ** -leaves["gate"])
            factor = leaves["gate"] * factor if variant.gate_function == "silu" else factor
        if factor is not None and call.is_gated_before:
            h = h * factor
        shown, counted = live(data)
        count = counted.sum(axis=call.axes, keepdims=True)
        weights = self.like(counted / np.maximum(count, 1), x)
        q = self.total(h * h * weights, call.axes) + self.like(1.0 * (count == 0), x)
        if variant.eps_position == "inside":
            rho = (q + variant.eps) ** 0.5
        elif variant.eps_position == "outside":
            rho = q**0.5 + variant.eps
        else:
            root, least = q**0.5, variant.eps / self.like(np.maximum(count, 1) ** 0.5, x)
            rho = (root + least + abs(root - least)) / 2  # the larger one
        sizes = [size if axis in call.feature_axes else 1 for axis, size in enumerate(shape)]
        y = h / rho
        if "scale" in leaves:
            y = y * (variant.scale_offset + self.reshape(leaves["scale"], sizes))
        if "bias" in leaves:
            y = y + self.reshape(leaves["bias"], sizes)
        if factor is not None and not call.is_gated_before:
            y = y * factor
        y = y + 0.5 * total if "residual" in leaves else y
        return y * self.like(1.0 * shown, x)

    def ours(self, leaves: Leaves, data: Arguments) -> Any:
        """The same by the package, with what must reach no derivative where the mask is, and in its gate."""
        shape, more, given = data.x.shape, {}, dict(leaves)
        shown, _ = live(data)
        if data.mask is not None:
            more = {"mask": self.constant(data.mask)}
            for name, kept in (("x", np.broadcast_to(data.mask, shape)), ("gate", shown)):
                if name in given:
                    hidden = self.like(np.full(shape, self.under_mask), given[name])
                    given[name] = self.where(self.constant(kept.copy()), given[name], hidden)
        results = self.rms_norm(**given, **more, variant=data.variant, axis=data.axis, feature_axis=data.feature_axis)
        y = results[0] + 0.5 * results[1] if "residual" in leaves else results
        return self.where(self.constant(shown), y, self.like(np.zeros(shape), y)) if more else y


class Functional(Framework):
    """What torch.func and JAX have by the same names: ``func``, over the functions of arrays of ``xp``."""

    func: Any
    xp: Any

    def shared(self, f: Function, which: str) -> dict[str, Function]:
        func, like = self.func, self.like

        def vjp(leaves: Leaves) -> Any:
            y, pull = func.vjp(of_one(f, leaves, which), leaves[which])
            return pull(like(pattern(y.shape), y))[0]

        def jacobian(transform: Any) -> Function:
            def pushed(leaves: Leaves) -> Any:
                leaf = leaves[which]
                whole = transform(of_one(f, leaves, which))(leaf)
                return self.xp.tensordot(whole, self.along(leaves)[which], leaf.ndim)

            return pushed

        def vmap(leaves: Leaves) -> Any:
            leaf = leaves[which]
            return func.vmap(of_one(f, leaves, which), 0, int(leaf.ndim == 1))(self.two(leaf))

        return {
            "grad": lambda leaves: func.grad(lambda leaf: self.weighted(f({**leaves, which: leaf})))(leaves[which]),
            "vjp": vjp, "jvp": lambda leaves: func.jvp(f, (leaves,), (self.along(leaves),))[1],
            "jacrev": jacobian(func.jacrev), "jacfwd": jacobian(func.jacfwd), "vmap": vmap,
        }  # fmt: skip

    def two(self, leaf: Any) -> Any:
        return self.xp.stack([leaf, self.another(leaf)])


class Torch(Functional):
    """PyTorch: torch.func inside, the tape, views and checkpoints outside, as it nests them itself."""

    under_mask = 0.5  # the tangent of 1 / rho meets a NaN
    derivatives = ("grad", "vjp", "jvp", "jacrev", "jacfwd", "tape", "batched tape", "dual")
    others = ("vmap", "checkpoint", "views")
    outer = ("tape", "batched tape", "dual", "checkpoint", "views")

    def __init__(self) -> None:
        import torch

        from rmsnorm.torch_impl import rms_norm

        self.torch = self.xp = torch
        self.func, self.rms_norm = torch.func, rms_norm
        self.like = lambda array, x: torch.from_numpy(np.asarray(array)).to(x.dtype)
        self.constant, self.where, self.reshape = torch.from_numpy, torch.where, torch.reshape
        self.total = lambda x, axes=None: x.sum() if axes is None else x.sum(axes, keepdim=True)

    def value(self, function: Function, arrays: Leaves) -> Any:
        return super().value(lambda leaves: function(leaves).detach(), arrays)

    def wrap(self, name: str, f: Function, which: str) -> Function:
        torch, like = self.torch, self.like

        def tape(leaves: Leaves, *, batched: bool = False) -> Any:
            with torch.enable_grad():
                leaves = {key: t if t.requires_grad else t.clone().requires_grad_() for key, t in leaves.items()}
                y = f(leaves)
                v = like(pattern(y.shape), y)
                vectors = torch.stack([v, v.flip(0)]) if batched else v
                options = {"create_graph": True, "allow_unused": True, "is_grads_batched": batched}
                leaf, gradient = leaves[which], None
                if y.requires_grad:
                    (gradient,) = torch.autograd.grad(y, leaf, vectors, **options)
                if gradient is None:  # y is linear in the others, or constant
                    gradient = torch.zeros((2, *leaf.shape) if batched else leaf.shape, dtype=leaf.dtype)
                return gradient

        def dual(leaves: Leaves) -> Any:
            ad = torch.autograd.forward_ad
            with ad.dual_level():
                leaf = ad.make_dual(leaves[which], self.along(leaves)[which])
                y = ad.unpack_dual(f({**leaves, which: leaf}))
                return torch.zeros_like(y.primal) if y.tangent is None else y.tangent

        def views(leaves: Leaves) -> Any:
            apart = {key: torch.stack([t, t], -1)[..., 0] for key, t in leaves.items()}
            return f({key: t.movedim(0, -1).clone().movedim(-1, 0) for key, t in apart.items()})

        return {
            **self.shared(f, which), "views": views, "dual": dual, "tape": tape,
            "batched tape": partial(tape, batched=True),
            "checkpoint": partial(torch.utils.checkpoint.checkpoint, f, use_reentrant=False),
        }[name]  # fmt: skip


class Flax(Functional):
    """JAX, where every transform goes into every other."""

    derivatives = ("grad", "vjp", "jvp", "jacrev", "jacfwd", "linearize", "transpose")
    others = ("vmap", "jit", "remat", "scan", "map")
    calls = 0

    def __init__(self) -> None:
        import jax

        from rmsnorm.flax_impl import private, rms_norm

        self.jax = self.func = jax
        self.xp, self.rms_norm, self.precision = jax.numpy, rms_norm, private.enable_x64
        self.like = lambda array, x: jax.numpy.asarray(array, x.dtype)
        self.constant, self.where, self.reshape = jax.numpy.asarray, jax.numpy.where, jax.numpy.reshape
        self.total = lambda x, axes=None: x.sum(axes, keepdims=axes is not None)

    def value(self, function: Function, arrays: Leaves) -> Any:
        with self.precision(True):
            return super().value(function, arrays)

    def reference(self, function: Function, arrays: Leaves) -> Any:
        self.calls += 1
        if self.calls % 50 == 0:
            self.jax.clear_caches()  # compiled code grows to gigabytes
        return self.value(self.jax.jit(function), arrays)  # one compilation is quicker than one for each operation

    def wrap(self, name: str, f: Function, which: str) -> Function:
        jax, like = self.jax, self.like

        def transpose(leaves: Leaves) -> Any:
            y, push = jax.linearize(of_one(f, leaves, which), leaves[which])
            return jax.linear_transpose(push, leaves[which])(like(pattern(y.shape), y))[0]

        def scan(leaves: Leaves) -> Any:
            step = lambda carry, leaf: (carry, f({**carry, which: leaf}))  # noqa: E731
            return jax.lax.scan(step, leaves, self.two(leaves[which]))[1]

        return {
            **self.shared(f, which), "transpose": transpose, "scan": scan, "jit": jax.jit(f),
            "remat": jax.checkpoint(f), "linearize": lambda leaves: jax.linearize(f, leaves)[1](self.along(leaves)),
            "map": lambda leaves: jax.lax.map(of_one(f, leaves, which), self.two(leaves[which])),
        }[name]  # fmt: skip


class Tensorflow(Framework):
    """TensorFlow: nested tapes and accumulators, functions with and without XLA, loops, recomputation."""

    under_mask = 0.5
    derivatives = ("tape", "forward", "jacobian", "tf.gradients")
    others = ("function", "XLA", "recompute", "map", "vectorized", "views")

    def __init__(self) -> None:
        import tensorflow as tf

        from rmsnorm.tf_impl import rms_norm

        self.tf, self.rms_norm = tf, rms_norm
        self.like = lambda array, x: tf.constant(array, x.dtype)
        self.constant, self.where, self.reshape = tf.constant, tf.where, tf.reshape
        self.total = lambda x, axes=None: tf.reduce_sum(x, axes, keepdims=axes is not None)

    def wrap(self, name: str, f: Function, which: str) -> Function:
        tf = self.tf

        def tape(leaves: Leaves) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(leaves[which])
                total = self.weighted(f(leaves))
            return tape.gradient(total, leaves[which], unconnected_gradients="zero")

        def forward(leaves: Leaves) -> Any:
            primals, along = list(leaves.values()), list(self.along(leaves).values())
            with tf.autodiff.ForwardAccumulator(primals, along) as accumulator:
                y = f(leaves)
            return accumulator.jvp(y, "zero")

        def jacobian(leaves: Leaves) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(leaves[which])
                y = f(leaves)
            whole = tape.jacobian(y, leaves[which], unconnected_gradients="zero")
            return tf.tensordot(whole, self.along(leaves)[which], leaves[which].shape.rank)

        def gradients(leaves: Leaves) -> Any:
            return tf.gradients(self.weighted(f(leaves)), leaves[which], unconnected_gradients="zero")[0]

        def recompute(leaves: Leaves) -> Any:
            return tf.recompute_grad(lambda *values: f(dict(zip(leaves, values, strict=True))))(*leaves.values())

        def two(leaves: Leaves) -> Any:
            return tf.stack([leaves[which], self.another(leaves[which])])

        return {
            "tape": tape, "forward": forward, "jacobian": jacobian, "tf.gradients": tf.function(gradients),
            "function": tf.function(f), "XLA": tf.function(f, jit_compile=True), "recompute": recompute,
            "views": lambda leaves: f({key: tf.reverse(tf.reverse(leaf, [0]), [0]) for key, leaf in leaves.items()}),
            "map": lambda leaves: tf.map_fn(of_one(f, leaves, which), two(leaves)),
            "vectorized": lambda leaves: tf.vectorized_map(of_one(f, leaves, which), two(leaves)),
        }[name]  # fmt: skip


KINDS = {"torch": Torch, "flax": Flax, "tf": Tensorflow}


def numbers(data: Arguments, random: np.random.Generator) -> dict[str, Any]:
    """Of size one half to two: no derivative is large, and no sum cancels to nothing by chance."""
    arrays: dict[str, Any] = {}
    for name in ("x", "scale", "bias", "residual", "gate"):
        if (array := getattr(data, name)) is not None:
            size = random.uniform(0.5, 2.0, array.shape)
            sign = np.sign(arrays["x"]) if name == "residual" else random.choice([-1.0, 1.0], array.shape)
            arrays[name] = (size * sign).astype(data.x.dtype)
    return arrays


def compared(framework: Any, row: calls.Row, around: list[str], random: np.random.Generator) -> bool:
    """Compares a call in these transforms, the innermost first; returns False where the framework refuses them."""
    data = calls.arguments_of(row)
    arrays = numbers(data, random)
    pairs = [(name, str(random.choice(list(arrays)))) for name in sorted(around, key=lambda n: n in framework.outer)]
    functions = [partial(function, data=data) for function in (framework.ours, framework.plain)]
    for name, which in pairs:
        functions = [framework.wrap(name, function, which) for function in functions]
    about = f"{' of '.join(f'{name} ({which})' for name, which in reversed(pairs))} of {calls.name_of(row)}"
    try:
        want = framework.reference(functions[1], {key: array.astype(float) for key, array in arrays.items()})
    except Exception:  # of many types: saved-tensor hooks around torch.func.grad, a loop of TensorFlow in another
        return False
    try:
        got = framework.value(functions[0], arrays)
    except ValueError as error:  # TensorFlow vectorises no Bitcast; the loops it takes for it do not nest so deep
        if sum(name in ("vectorized", "jacobian") for name in around) < 3 or "Bitcast" not in str(error):
            raise
        return False
    assert (got.dtype, got.shape) == (data.x.dtype, want.shape), about
    assert np.isfinite(want).all(), about
    error = np.abs(got - want).max(initial=0) / max(1.0, np.abs(want).max(initial=0)) / np.finfo(got.dtype).eps
    assert error <= BOUND, f"off by {error:.3g} units: {about}"
    return True
