"""The candidates of each framework: ours, its own layer, that compiled, LayerNorm, and copies of the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

import numpy as np

from rmsnorm import errors
from rmsnorm.bench.candidates import (
    BUILTIN,
    COPY,
    COPY_INTO,
    OURS,
    Call,
    Candidate,
    Workbench,
    copy,
    copy_into,
    on_host,
    only,
    processor,
    resident_peak,
)  # fmt: skip
from rmsnorm.bench.problem import Array, Problem
from rmsnorm.variants import PRESETS, Variant


@dataclass(frozen=True)
class Backend:
    """What it needs, the variant of its built-in layer, and what opens it on a device."""

    package: str
    extra: str
    variant: Variant
    load: Callable[[str], Workbench]

    def open(self, device: str) -> Workbench:
        """Load the framework.

        Raises:
            ModuleNotFoundError: it is not installed.
            ValueError: it has no such device.
        """
        try:
            import_module(self.package)
        except ModuleNotFoundError:
            raise errors.missing_framework(self.package, self.extra) from None
        return self.load(device)


def _numpy(device: str) -> Workbench:
    from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp

    only("numpy", device, ["cpu"])

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        x, scale, dy = problem.x, problem.scale, problem.dy
        eps = _BUILTIN["numpy"].eps_for(problem.dtype)

        def ours() -> Any:
            y = rms_norm(x, scale, variant=variant)
            return (y,) if op == "fwd" else (y, *rms_norm_vjp(dy, x, scale, variant=variant)[:2])

        def naive(centre: bool) -> Any:
            y = _naive(x, scale, eps, centre)
            return (y,) if op == "fwd" else (y, *_naive_vjp(dy, x, scale, eps, centre))

        return [
            on_host(OURS, ours, BUILTIN, variant),
            on_host(BUILTIN, lambda: naive(False), BUILTIN, _BUILTIN["numpy"]),
            on_host("LayerNorm", lambda: naive(True), BUILTIN),
            Candidate(COPY, copy(problem, op)),
            copy_into(problem, op),
        ]

    return Workbench(np.__version__, processor(), candidates)


def _naive(x: Array, scale: Array, eps: float, centre: bool) -> Array:
    """As people write it."""
    a = x.astype(np.float32, copy=False)
    if centre:
        a = a - np.mean(a, axis=-1, keepdims=True)
    rms = np.sqrt(np.mean(a**2, axis=-1, keepdims=True) + eps)
    return (a / rms * scale).astype(x.dtype)


def _naive_vjp(dy: Array, x: Array, scale: Array, eps: float, centre: bool) -> tuple[Array, Array]:
    a, v = x.astype(np.float32, copy=False), dy.astype(np.float32, copy=False)
    if centre:
        a = a - np.mean(a, axis=-1, keepdims=True)
    rms = np.sqrt(np.mean(a**2, axis=-1, keepdims=True) + eps)
    normalised, u = a / rms, v * scale
    dx = (u - normalised * np.mean(u * normalised, axis=-1, keepdims=True)) / rms
    if centre:
        dx = dx - np.mean(dx, axis=-1, keepdims=True)
    over = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), np.sum(v * normalised, axis=over).astype(scale.dtype)


def _torch(device: str) -> Workbench:
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # the time to compile is one of the numbers
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would run beside the timing
    import torch

    from rmsnorm.torch_impl import RMSNorm

    only("torch", device, ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])

    def send(array: Array) -> Any:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype.name == "bfloat16" else None
        return (torch.from_numpy(array) if tensor is None else tensor).to(device)

    def fetch(tensor: Any) -> Array:
        tensor = tensor.detach().cpu()
        bits = np.dtype("bfloat16") if tensor.dtype == torch.bfloat16 else None
        return np.asarray(tensor if bits is None else tensor.view(torch.int16).numpy().view(bits))

    def cuda_peak(call: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - int(before)

    peak: Callable[[Call], int | None] = cuda_peak if device == "cuda" else resident_peak

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        torch.compiler.reset()
        x, scale, dy = (send(array) for array in (problem.x, problem.scale, problem.dy))
        leaf = x.detach().requires_grad_()

        def candidate(name: str, kind: Any, truth: Variant | None, compiled: bool = False, **options: Any) -> Any:
            layer = kind(x.shape[-1], device=device, dtype=x.dtype, **options)
            with torch.no_grad():
                layer.weight.copy_(scale)
            parameters = tuple(layer.parameters())
            run = torch.compile(layer, dynamic=False) if compiled else layer

            def forward() -> Any:
                with torch.no_grad():
                    return (run(x),)

            def both() -> Any:
                y = run(leaf)
                return (y, *torch.autograd.grad(y, (leaf, *parameters), dy))

            def saved() -> int:
                kept: dict[int, int] = {}

                def keep(tensor: Any) -> Any:
                    kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    y = run(leaf)
                del y
                return sum(kept.values())

            call = forward if op == "fwd" else both
            return Candidate(
                name, call, BUILTIN, truth, saved if op != "fwd" else lambda: None, lambda: peak(call)
            )  # fmt: skip

        into = [torch.empty_like(x), torch.empty_like(x)]
        copies: dict[str, Call] = {
            COPY: lambda: x.clone() if op == "fwd" else (x.clone(), x + dy),
            COPY_INTO: lambda: into[0].copy_(x) if op == "fwd" else (into[0].copy_(x), torch.add(x, dy, out=into[1])),
        }
        return [
            candidate(OURS, RMSNorm, variant, variant=variant, bias=False),
            candidate(BUILTIN, torch.nn.RMSNorm, _BUILTIN["torch"]),
            candidate("built-in compiled", torch.nn.RMSNorm, _BUILTIN["torch"], compiled=True),
            candidate("LayerNorm", torch.nn.LayerNorm, None),
            *(Candidate(name, run) for name, run in copies.items()),
        ]

    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    ready = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Workbench(torch.__version__, name, candidates, fetch, ready)


def _tf(device: str) -> Workbench:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import tensorflow as tf

    from rmsnorm.tf_impl import RMSNormalization

    gpus = tf.config.list_physical_devices("GPU")
    only("tf", device, ["cpu", *(["cuda"] if gpus else [])])
    place = "/GPU:0" if device == "cuda" else "/CPU:0"

    def gpu_peak(call: Call) -> int:
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        call()
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) - int(before)

    peak: Callable[[Call], int | None] = gpu_peak if device == "cuda" else lambda call: None  # it keeps freed memory

    def placed(function: Callable[..., Any], *arguments: Any) -> Call:
        def call() -> Any:
            with tf.device(place):
                return function(*arguments)

        return call

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        with tf.device(place):
            x, dy = tf.constant(problem.x), tf.constant(problem.dy)

        def pair(name: str, kind: Any, truth: Variant | None, **options: Any) -> list[Candidate]:
            with tf.device(place):
                layer = kind(dtype=problem.dtype, **options)
                layer.build(problem.x.shape)
            weights = layer.get_weights()
            layer.set_weights([problem.scale, *weights[1:]])
            parameters = [variable.value for variable in layer.trainable_variables]

            def both(x: Any, dy: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x)
                return (y, *tape.gradient(y, [x, *parameters], dy))

            def forward(x: Any, dy: Any) -> Any:
                return (layer(x),)

            function = forward if op == "fwd" else both
            made = []
            for suffix, run in (("", function), (" jit", tf.function(function, jit_compile=True, autograph=False))):
                call = placed(run, x, dy)
                made.append(Candidate(name + suffix, call, BUILTIN + suffix, truth, peak=partial(peak, call)))
            return made

        def deep_copy() -> Any:
            return tf.raw_ops.DeepCopy(x=x) if op == "fwd" else (tf.raw_ops.DeepCopy(x=x), x + dy)

        return [
            *pair(OURS, RMSNormalization, variant, variant=variant, bias=False),
            *pair(BUILTIN, keras.layers.RMSNormalization, _BUILTIN["tf"]),
            *pair("LayerNorm", keras.layers.LayerNormalization, None),
            Candidate(COPY, placed(deep_copy)),
            *([copy_into(problem, op)] if device == "cpu" else []),
        ]

    name = tf.config.experimental.get_device_details(gpus[0])["device_name"] if device == "cuda" else processor()
    ready = tf.test.experimental.sync_devices if device == "cuda" else lambda: None
    version = f"{tf.__version__}, Keras {keras.__version__}"
    return Workbench(version, name, candidates, lambda tensor: np.asarray(tensor.numpy()), ready)


def _flax(device: str) -> Workbench:
    import jax
    from flax import nnx
    from jax import numpy as jnp

    from rmsnorm.flax_impl import RMSNorm

    platforms = {each.platform for each in jax.devices()} | {"cpu"}
    only("flax", device, ["cpu", *(["cuda"] if "gpu" in platforms else [])])
    target = jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def waited(function: Any, *arguments: Any) -> Call:
        return lambda: jax.block_until_ready(function(*arguments))

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        x, dy, scale = (jax.device_put(array, target) for array in (problem.x, problem.dy, problem.scale))

        def candidate(name: str, kind: Any, truth: Variant | None, **options: Any) -> Candidate:
            layer = kind(x.shape[-1], param_dtype=x.dtype, rngs=nnx.Rngs(0), **options)
            layer.scale[...] = scale
            graph, state = nnx.split(layer)
            state = jax.device_put(state, target)

            def forward(state: Any, x: Any) -> Any:
                return nnx.merge(graph, state)(x)

            def both(state: Any, x: Any, dy: Any) -> Any:
                y, pull = jax.vjp(forward, state, x)
                dstate, dx = pull(dy)
                return (y, dx, *jax.tree.leaves(dstate))

            jitted: Any = jax.jit((lambda state, x, dy: (forward(state, x),)) if op == "fwd" else both)

            def peak() -> int:
                memory = jitted.lower(state, x, dy).compile().memory_analysis()
                return int(memory.temp_size_in_bytes + memory.output_size_in_bytes)

            def saved() -> int:
                kept = jax.make_jaxpr(lambda state, x: jax.vjp(forward, state, x)[1])(state, x).jaxpr.outvars
                arrays = {id(variable): variable.aval for variable in kept}.values()
                return sum(int(array.size) * int(array.dtype.itemsize) for array in arrays)

            return Candidate(
                name, waited(jitted, state, x, dy), BUILTIN, truth, saved if op != "fwd" else lambda: None, peak
            )  # fmt: skip

        def write(x: Any, dy: Any) -> Any:
            return jnp.copy(x) if op == "fwd" else (jnp.copy(x), x + dy)

        into = jax.jit(lambda x, dy, old: write(x, dy), donate_argnums=2, keep_unused=True)
        held = [jax.block_until_ready(jax.jit(write)(x, dy))]

        def overwrite() -> None:
            held[0] = jax.block_until_ready(into(x, dy, held[0]))

        return [
            candidate(OURS, RMSNorm, variant, variant=variant, use_bias=False),
            candidate(BUILTIN, nnx.RMSNorm, _BUILTIN["flax"]),
            candidate("LayerNorm", nnx.LayerNorm, None),
            Candidate(COPY, waited(jax.jit(write), x, dy)),
            Candidate(COPY_INTO, overwrite),
        ]

    name = target.device_kind if device == "cuda" else processor()
    version = f"{jax.__version__}, Flax {import_module('flax').__version__}"
    return Workbench(version, name, candidates)


_BUILTIN: Final[Mapping[str, Variant]] = {
    "numpy": PRESETS["standard"],
    "torch": PRESETS["torch"],
    "tf": PRESETS["keras"],
    "flax": PRESETS["flax"],
}
BACKENDS: Final = {
    "numpy": Backend("numpy", "dev", _BUILTIN["numpy"], _numpy),
    "torch": Backend("torch", "torch", _BUILTIN["torch"], _torch),
    "tf": Backend("tensorflow", "tf", _BUILTIN["tf"], _tf),
    "flax": Backend("flax", "flax", _BUILTIN["flax"], _flax),
}
