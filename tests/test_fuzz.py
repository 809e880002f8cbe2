"""Random compositions of each framework's transforms, of ours and of plain operations: never another number.

A machine draws a call, then wraps the function of it in one transform after another: gradients of gradients, batches of
derivatives, compiled, recomputed, in loops. What comes out must be what comes out of the textbook's formula, written in
plain float64 operations of the same framework and wrapped alike. ``make fuzz`` draws 2,000 for each framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from rmsnorm import Variant
from rmsnorm.specification.frameworks import FRAMEWORKS

Function = Callable[[Any, Any], Any]  # of x and the gain
NIGHTLY = settings().max_examples > 100  # pytest --hypothesis-profile nightly
EXAMPLES = {False: 2, True: 5}  # without and with pytest --all
BOUND = 1000  # units of the largest element: at most some hundred operations in a row, on numbers about 1
PROFILE = settings(
    deadline=None, stateful_step_count=4, derandomize=not NIGHTLY, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
SHAPES = ((6,), (3, 6), (2, 3, 4))
VARIANTS = st.builds(
    Variant,
    name=st.just("drawn"),
    eps=st.sampled_from([0.0, 1e-5, 0.3]),
    eps_position=st.sampled_from(["inside", "outside"]),
    rounding=st.sampled_from(["before_scale", "after_scale"]),
    scale_offset=st.sampled_from([0.0, 1.0]),
    partial=st.sampled_from([None, 0.3, 0.5]),
    result_dtype=st.just("promote"),
)


@dataclass(frozen=True)
class Problem:
    """A call, and the numbers that it is made with."""

    variant: Variant
    shape: tuple[int, ...]
    axis: int
    masked: bool
    dtype: str
    seed: int

    def arrays(self) -> tuple[Any, Any]:
        """Of size one half to two: no derivative is large, and no sum cancels to nothing by chance."""
        random = np.random.default_rng(self.seed)
        draw = lambda shape: random.uniform(0.5, 2.0, shape) * random.choice([-1.0, 1.0], shape)  # noqa: E731
        return draw(self.shape).astype(self.dtype), draw(self.shape[self.axis]).astype(self.dtype)

    @property
    def mask(self) -> Any:
        """One element in five does not count, and never the first: no row is empty, partial or not."""
        if not self.masked:
            return None
        mask = np.random.default_rng(self.seed + 1).random(self.shape) < 0.8
        np.moveaxis(mask, self.axis, 0)[0] = True
        return mask


PROBLEMS = st.builds(
    Problem, VARIANTS, st.sampled_from(SHAPES), st.sampled_from([-1, 0]), st.booleans(),
    st.sampled_from(["float32", "float64"]), st.integers(0, 2**16),
)  # fmt: skip


def pattern(shape: Any, phase: float = 0.0) -> Any:
    """Weights of a sum, or a direction, that no symmetry of a result agrees with."""
    return np.cos(1.0 + phase + 1.7 * np.arange(int(np.prod(shape)))).reshape(tuple(shape))


class Framework:
    """What the formula and the comparison need of one of them."""

    inner: ClassVar[tuple[str, ...]]
    outer: ClassVar[tuple[str, ...]] = ()  # once one of these is there, only they go around it
    rms_norm: Any
    like: Callable[[Any, Any], Any]
    stop: Callable[[Any], Any]
    total: Callable[..., Any]
    constant: Callable[[Any], Any]
    value: Callable[[Function, Any, Any], Any]
    compared = 0  # results of ours with the formula's
    refused = 0  # compositions that the framework does not take, with the formula neither

    def reference(self, function: Function, x: Any, scale: Any) -> Any:
        return self.value(function, x, scale)

    def plain(self, x: Any, scale: Any, problem: Problem) -> Any:
        """The textbook: x / rho * (offset + scale); what the mask leaves out is constant to every derivative."""
        variant, shape, axis = problem.variant, problem.shape, problem.axis
        along = [1] * len(shape)
        along[axis] = shape[axis]
        counted = (np.arange(shape[axis]) < variant.counted(shape[axis])).reshape(along)
        live = np.ones(shape, bool) if problem.mask is None else problem.mask
        counted = counted & live
        q = self.total(x * x * self.like(counted / counted.sum(axis, keepdims=True), x), axis)
        rho = (q + variant.eps) ** 0.5 if variant.eps_position == "inside" else q**0.5 + variant.eps
        gain = scale if axis == -1 else scale[(slice(None), *[None] * (len(shape) - 1))]
        y = x / rho * (variant.scale_offset + gain)
        return self.like(live, x) * y + self.like(~live, x) * self.stop(y)

    def ours(self, x: Any, scale: Any, problem: Problem) -> Any:
        mask = None if problem.mask is None else self.constant(problem.mask)
        return self.rms_norm(x, scale, variant=problem.variant, axis=problem.axis, mask=mask)


class Torch(Framework):
    """PyTorch: torch.func inside, the tape, views and checkpoints outside, as it nests them itself."""

    inner = ("grad x", "grad scale", "jvp", "vjp", "vmap x", "vmap scale", "functionalize")
    outer = ("tape x", "tape scale", "checkpoint", "views", "dual", "on CPU", "no grad")

    def __init__(self) -> None:
        import torch

        from rmsnorm.torch_impl import rms_norm

        self.torch, self.rms_norm = torch, rms_norm
        self.like = lambda array, x: torch.from_numpy(array).to(x.dtype)
        self.stop, self.constant = lambda x: x.detach(), torch.from_numpy
        self.total = lambda x, axis: x.sum(axis, keepdim=True)

    def value(self, function: Function, x: Any, scale: Any) -> Any:
        return function(self.torch.from_numpy(x), self.torch.from_numpy(scale)).detach().numpy()

    def wrap(self, name: str, f: Function) -> Function:
        torch, like = self.torch, self.like
        func = torch.func

        def total(x: Any, scale: Any) -> Any:
            y = f(x, scale)
            return (y * like(pattern(y.shape), y)).sum()

        def tape(which: int) -> Function:
            def pulled(*inputs: Any) -> Any:
                with torch.enable_grad():
                    leaves = [t if t.requires_grad else t.clone().requires_grad_() for t in inputs]
                    loss = total(*leaves)
                    if not loss.requires_grad:  # linear in both so far
                        return torch.zeros_like(leaves[which])
                    return torch.autograd.grad(loss, leaves[which], create_graph=True, materialize_grads=True)[0]

            return pulled

        def jvp(x: Any, scale: Any) -> Any:
            along = like(pattern(x.shape, 0.5), x), like(pattern(scale.shape, 0.2), scale)
            return func.jvp(f, (x, scale), along)[1]

        def vjp(x: Any, scale: Any) -> Any:
            y, pull = func.vjp(lambda x: f(x, scale), x)
            return pull(like(pattern(y.shape), y))[0]

        def dual(x: Any, scale: Any) -> Any:
            ad = torch.autograd.forward_ad
            with ad.dual_level():
                y = ad.unpack_dual(f(ad.make_dual(x, like(pattern(x.shape, 0.5), x)), scale))
                return torch.zeros_like(y.primal) if y.tangent is None else y.tangent

        def views(x: Any, scale: Any) -> Any:
            room = torch.stack([scale, scale], 1)
            return f(x.movedim(0, -1).contiguous().movedim(-1, 0), room[:, 1])

        def on_cpu(x: Any, scale: Any) -> Any:
            with torch.autograd.graph.save_on_cpu():
                return f(x, scale)

        def no_grad(x: Any, scale: Any) -> Any:
            with torch.no_grad():
                return f(x, scale)

        return {
            "grad x": func.grad(total), "grad scale": func.grad(total, argnums=1), "jvp": jvp, "vjp": vjp,
            "vmap x": lambda x, scale: func.vmap(f, (0, None))(torch.stack([x, 0.5 * x.flip(-1)]), scale),
            "vmap scale": lambda x, scale: func.vmap(f, (None, 0), 1)(x, torch.stack([scale, scale.flip(0)])),
            "functionalize": func.functionalize(f),
            "tape x": tape(0), "tape scale": tape(1), "dual": dual, "views": views, "on CPU": on_cpu,
            "no grad": no_grad,
            "checkpoint": partial(torch.utils.checkpoint.checkpoint, f, use_reentrant=False),
        }[name]  # fmt: skip


class Flax(Framework):
    """JAX, where every transform goes into every other."""

    inner = ("grad x", "grad scale", "jvp", "vjp", "linearize", "vmap x", "vmap scale", "jit", "remat", "scan", "map")

    def __init__(self) -> None:
        import jax

        from rmsnorm.flax_impl import private, rms_norm

        self.jax, self.rms_norm, self.precision = jax, rms_norm, private.enable_x64
        self.like = lambda array, x: jax.numpy.asarray(array, x.dtype)
        self.stop, self.constant = jax.lax.stop_gradient, jax.numpy.asarray
        self.total = lambda x, axis: x.sum(axis, keepdims=True)

    def value(self, function: Function, x: Any, scale: Any) -> Any:
        with self.precision(True):
            return np.asarray(function(self.jax.numpy.asarray(x), self.jax.numpy.asarray(scale)))

    def reference(self, function: Function, x: Any, scale: Any) -> Any:
        if self.compared % 50 == 0:
            self.jax.clear_caches()  # compiled code grows to gigabytes
        return self.value(self.jax.jit(function), x, scale)  # one compilation is quicker than one for each operation

    def wrap(self, name: str, f: Function) -> Function:
        jax, like, jnp = self.jax, self.like, self.jax.numpy

        def total(x: Any, scale: Any) -> Any:
            y = f(x, scale)
            return (y * like(pattern(y.shape), y)).sum()

        def jvp(x: Any, scale: Any) -> Any:
            along = like(pattern(x.shape, 0.5), x), like(pattern(scale.shape, 0.2), scale)
            return jax.jvp(f, (x, scale), along)[1]

        def vjp(x: Any, scale: Any) -> Any:
            y, pull = jax.vjp(lambda x: f(x, scale), x)
            return pull(like(pattern(y.shape), y))[0]

        def linearize(x: Any, scale: Any) -> Any:
            return jax.linearize(lambda x: f(x, scale), x)[1](like(pattern(x.shape, 0.5), x))

        def scan(x: Any, scale: Any) -> Any:
            return jax.lax.scan(lambda carry, row: (carry, f(row, carry)), scale, jnp.stack([x, 0.5 * x]))[1]

        return {
            "grad x": jax.grad(total), "grad scale": jax.grad(total, argnums=1), "jvp": jvp, "vjp": vjp,
            "linearize": linearize, "scan": scan, "jit": jax.jit(f), "remat": jax.checkpoint(f),
            "vmap x": lambda x, scale: jax.vmap(f, (0, None))(jnp.stack([x, 0.5 * jnp.flip(x, -1)]), scale),
            "vmap scale": lambda x, scale: jax.vmap(f, (None, 0), 1)(x, jnp.stack([scale, jnp.flip(scale)])),
            "map": lambda x, scale: jax.lax.map(lambda s: f(x, s), jnp.stack([scale, 0.5 * scale])),
        }[name]  # fmt: skip


class Tensorflow(Framework):
    """TensorFlow: nested tapes and accumulators, functions with and without XLA, loops, recomputation."""

    inner = ("tape x", "tape scale", "forward", "function", "XLA", "recompute", "map", "vectorized", "views")

    def __init__(self) -> None:
        import tensorflow as tf

        from rmsnorm.tf_impl import rms_norm

        self.tf, self.rms_norm = tf, rms_norm
        self.like = lambda array, x: tf.constant(array, x.dtype)
        self.stop, self.constant = tf.stop_gradient, tf.constant
        self.total = partial(tf.reduce_sum, keepdims=True)

    def value(self, function: Function, x: Any, scale: Any) -> Any:
        return function(self.tf.constant(x), self.tf.constant(scale)).numpy()

    def wrap(self, name: str, f: Function) -> Function:
        tf, like = self.tf, self.like

        def tape(which: int) -> Function:
            def pulled(*inputs: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(inputs[which])
                    y = f(*inputs)
                    total = tf.reduce_sum(y * like(pattern(y.shape), y))
                return tape.gradient(total, inputs[which], unconnected_gradients="zero")

            return pulled

        def forward(x: Any, scale: Any) -> Any:
            along = like(pattern(x.shape, 0.5), x), like(pattern(scale.shape, 0.2), scale)
            with tf.autodiff.ForwardAccumulator((x, scale), along) as accumulator:
                y = f(x, scale)
            return accumulator.jvp(y, "zero")

        def views(x: Any, scale: Any) -> Any:
            return f(tf.reverse(tf.reverse(x, [0]), [0]), tf.reshape(tf.identity(scale)[None], [-1]))

        return {
            "tape x": tape(0), "tape scale": tape(1), "forward": forward, "function": tf.function(f),
            "XLA": tf.function(f, jit_compile=True), "recompute": tf.recompute_grad(f), "views": views,
            "map": lambda x, scale: tf.map_fn(lambda s: f(x, s), tf.stack([scale, 0.5 * scale])),
            "vectorized": lambda x, scale: tf.vectorized_map(lambda row: f(row, scale), tf.stack([x, 0.5 * x])),
        }[name]  # fmt: skip


class Compositions(RuleBasedStateMachine):
    """The function so far, ours and the plain one."""

    framework: ClassVar[Framework]

    @initialize(problem=PROBLEMS)
    def begin(self, problem: Problem) -> None:
        self.problem, self.names = problem, []
        self.functions = [self.of_two(function) for function in (self.framework.ours, self.framework.plain)]

    def of_two(self, function: Any) -> Function:
        problem = self.problem
        return lambda x, scale: function(x, scale, problem)

    @precondition(lambda self: not set(self.names) & set(self.framework.outer))
    @rule(data=st.data())
    def wrap(self, data: Any) -> None:
        self.put_around(data.draw(st.sampled_from(self.framework.inner)))

    @precondition(lambda self: self.framework.outer)
    @rule(data=st.data())
    def wrap_outside(self, data: Any) -> None:
        self.put_around(data.draw(st.sampled_from(self.framework.outer)))

    def put_around(self, name: str) -> None:
        self.names.append(name)
        self.functions = [self.framework.wrap(name, function) for function in self.functions]

    def teardown(self) -> None:
        if not hasattr(self, "names"):
            return
        x, scale = self.problem.arrays()
        try:
            want = self.framework.reference(self.functions[1], x.astype(float), scale.astype(float))
        except (RuntimeError, NotImplementedError) as error:  # saved-tensor hooks around torch.func.grad, and such
            event(f"{self.framework.__class__.__name__} refuses: {error}"[:90])
            self.framework.refused += 1
            return
        try:
            got = self.framework.value(self.functions[0], x, scale)
        except ValueError as error:  # TensorFlow vectorises no Bitcast; the loops it takes for it do not nest so deep
            if self.names.count("vectorized") < 3 or self.problem.dtype != "float64" or "Bitcast" not in str(error):
                raise
            event("three nested vectorized_map in float64")
            self.framework.refused += 1
            return
        assert got.dtype == self.problem.dtype
        assert got.shape == want.shape
        error = np.abs(got - want).max() / max(1.0, np.abs(want).max()) / np.finfo(got.dtype).eps
        assert error <= BOUND, f"{' of '.join(reversed(self.names))}: off by {error:.3g} units"
        self.framework.compared += 1


@pytest.mark.parametrize("name", ["torch", "flax", "tf"])
def test_compositions(name, record_property, request):
    """Every drawn example ends in one comparison, but where the framework refuses; most must end in one."""
    backend = FRAMEWORKS[name]
    pytest.importorskip(backend.package, reason=f"pip install '.[{backend.extra}]'")
    framework = {"torch": Torch, "flax": Flax, "tf": Tensorflow}[name]()
    machine = type("Machine", (Compositions,), {"framework": framework})
    count = settings().max_examples if NIGHTLY else EXAMPLES[request.config.getoption("--all")]
    run_state_machine_as_test(machine, settings=settings(PROFILE, max_examples=count))
    record_property("comparisons", framework.compared)  # tests/conftest.py prints it
    assert framework.compared + framework.refused >= count, "hypothesis drew fewer examples than it was asked for"
    assert framework.compared > count / 2, f"of {count} examples {framework.refused} were refused"
