"""The candidates of each framework: ours, its own layer, the same compiled, LayerNorm, and copies of the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
from rmsnorm.frameworks import FRAMEWORKS
from rmsnorm.variants import PRESETS, Variant


def open_backend(key: str, device: str) -> Workbench:
    """Load a framework, by its key in FRAMEWORKS.

    Raises:
        ModuleNotFoundError: it is not installed.
        ValueError: it has no such device.
    """
    row = FRAMEWORKS[key]
    try:
        import_module(row.package)
    except ModuleNotFoundError:
        raise errors.missing_framework(row.package, row.extra) from None
    return _LOAD[key](device)


def _numpy(device: str) -> Workbench:
    from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp

    only("numpy", device, ["cpu"])

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        x, scale, dy = problem.x, problem.scale, problem.dy
        eps = VARIANTS["numpy"].eps_for(problem.dtype)

        def ours() -> Any:
            y = rms_norm(x, scale, variant=variant)
            return (y,) if op == "fwd" else (y, *rms_norm_vjp(dy, x, scale, variant=variant)[:2])

        def naive(centre: bool) -> Any:
            y = _naive(x, scale, eps, centre)
            return (y,) if op == "fwd" else (y, *_naive_vjp(dy, x, scale, eps, centre))

        return [
            on_host(OURS, ours, BUILTIN, variant),
            on_host(BUILTIN, lambda: naive(False), BUILTIN, VARIANTS["numpy"]),
            on_host("LayerNorm", lambda: naive(True), BUILTIN),
            Candidate(COPY, copy(problem, op)),
            copy_into(problem, op),
        ]

    return Workbench(np.__version__, processor(), candidates)


def _naive(x: Array, scale: Array, eps: float, centre: bool) -> Array:
    """RMSNorm, or LayerNorm, in the way that people usually write it."""
    h = x.astype(np.float32, copy=False)
    if centre:
        h = h - np.mean(h, axis=-1, keepdims=True)
    rms = np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + eps)
    return (h / rms * scale).astype(x.dtype)


def _naive_vjp(dy: Array, x: Array, scale: Array, eps: float, centre: bool) -> tuple[Array, Array]:
    h, v = x.astype(np.float32, copy=False), dy.astype(np.float32, copy=False)
    if centre:
        h = h - np.mean(h, axis=-1, keepdims=True)
    rms = np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + eps)
    normalised, u = h / rms, v * scale
    dx = (u - normalised * np.mean(u * normalised, axis=-1, keepdims=True)) / rms
    if centre:
        dx = dx - np.mean(dx, axis=-1, keepdims=True)
    over = tuple(range(x.ndim - 1))
    return dx.astype(x.dtype), np.sum(v * normalised, axis=over).astype(scale.dtype)


def _torch(device: str) -> Workbench:
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # the compile time is one of the numbers
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of compilers would run beside the timing
    import torch

    from rmsnorm.torch_impl import RMSNorm

    only("torch", device, ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])

    def send(array: Array) -> Any:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)

    def fetch(tensor: Any) -> Array:
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(np.dtype("bfloat16"))
        return np.asarray(tensor)

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

        def candidate(name: str, kind: Any, expected: Variant | None, compiled: bool = False, **options: Any) -> Any:
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
                sizes: dict[int, int] = {}

                def count(tensor: Any) -> Any:
                    sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    return tensor

                with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
                    y = run(leaf)
                del y
                return sum(sizes.values())

            call = forward if op == "fwd" else both
            return Candidate(
                name, call, BUILTIN, expected, saved if op != "fwd" else lambda: None, lambda: peak(call)
            )  # fmt: skip

        into = [torch.empty_like(x), torch.empty_like(x)]
        copies: dict[str, Call] = {
            COPY: lambda: x.clone() if op == "fwd" else (x.clone(), x + dy),
            COPY_INTO: lambda: into[0].copy_(x) if op == "fwd" else (into[0].copy_(x), torch.add(x, dy, out=into[1])),
        }
        return [
            candidate(OURS, RMSNorm, variant, variant=variant, bias=False),
            candidate(BUILTIN, torch.nn.RMSNorm, VARIANTS["torch"]),
            candidate("built-in compiled", torch.nn.RMSNorm, VARIANTS["torch"], compiled=True),
            candidate("LayerNorm", torch.nn.LayerNorm, None),
            *(Candidate(name, run) for name, run in copies.items()),
        ]

    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Workbench(torch.__version__, name, candidates, fetch, synchronise)


def _tf(device: str) -> Workbench:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import tensorflow as tf

    from rmsnorm.tf_impl import RMSNormalization

    gpus = tf.config.list_physical_devices("GPU")
    only("tf", device, ["cpu", *(["cuda"] if gpus else [])])
    device_name = "/GPU:0" if device == "cuda" else "/CPU:0"

    def gpu_peak(call: Call) -> int:
        tf.config.experimental.reset_memory_stats("GPU:0")
        before = tf.config.experimental.get_memory_info("GPU:0")["current"]
        call()
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"]) - int(before)

    # not known on a CPU, where TensorFlow keeps freed memory
    peak: Callable[[Call], int | None] = gpu_peak if device == "cuda" else lambda call: None

    def placed(function: Callable[..., Any], *arguments: Any) -> Call:
        def call() -> Any:
            with tf.device(device_name):
                return function(*arguments)

        return call

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        with tf.device(device_name):
            x, dy = tf.constant(problem.x), tf.constant(problem.dy)

        def pair(name: str, kind: Any, expected: Variant | None, **options: Any) -> list[Candidate]:
            with tf.device(device_name):
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
            layers = []
            for suffix, run in (("", function), (" jit", tf.function(function, jit_compile=True, autograph=False))):
                call = placed(run, x, dy)
                layers.append(Candidate(name + suffix, call, BUILTIN + suffix, expected, peak=partial(peak, call)))
            return layers

        def deep_copy() -> Any:
            return tf.raw_ops.DeepCopy(x=x) if op == "fwd" else (tf.raw_ops.DeepCopy(x=x), x + dy)

        return [
            *pair(OURS, RMSNormalization, variant, variant=variant, bias=False),
            *pair(BUILTIN, keras.layers.RMSNormalization, VARIANTS["tf"]),
            *pair("LayerNorm", keras.layers.LayerNormalization, None),
            Candidate(COPY, placed(deep_copy)),
            *([copy_into(problem, op)] if device == "cpu" else []),
        ]

    name = tf.config.experimental.get_device_details(gpus[0])["device_name"] if device == "cuda" else processor()
    synchronise = tf.test.experimental.sync_devices if device == "cuda" else lambda: None
    version = f"{tf.__version__}, Keras {keras.__version__}"
    return Workbench(version, name, candidates, lambda tensor: np.asarray(tensor.numpy()), synchronise)


def _flax(device: str) -> Workbench:
    import jax
    from flax import nnx
    from jax import numpy as jnp

    from rmsnorm.flax_impl import RMSNorm

    platforms = {device.platform for device in jax.devices()} | {"cpu"}
    only("flax", device, ["cpu", *(["cuda"] if "gpu" in platforms else [])])
    target = jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def waited(function: Any, *arguments: Any) -> Call:
        return lambda: jax.block_until_ready(function(*arguments))

    def candidates(problem: Problem, op: str, variant: Variant) -> list[Candidate]:
        x, dy, scale = (jax.device_put(array, target) for array in (problem.x, problem.dy, problem.scale))

        def candidate(name: str, kind: Any, expected: Variant | None, **options: Any) -> Candidate:
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
                residuals = jax.make_jaxpr(lambda state, x: jax.vjp(forward, state, x)[1])(state, x).jaxpr.outvars
                arrays = {id(variable): variable.aval for variable in residuals}.values()
                return sum(int(array.size) * int(array.dtype.itemsize) for array in arrays)

            return Candidate(
                name, waited(jitted, state, x, dy), BUILTIN, expected, saved if op != "fwd" else lambda: None, peak
            )  # fmt: skip

        def write(x: Any, dy: Any) -> Any:
            return jnp.copy(x) if op == "fwd" else (jnp.copy(x), x + dy)

        into = jax.jit(lambda x, dy, old: write(x, dy), donate_argnums=2, keep_unused=True)
        buffer = [jax.block_until_ready(jax.jit(write)(x, dy))]

        def overwrite() -> None:
            buffer[0] = jax.block_until_ready(into(x, dy, buffer[0]))

        return [
            candidate(OURS, RMSNorm, variant, variant=variant, use_bias=False),
            candidate(BUILTIN, nnx.RMSNorm, VARIANTS["flax"]),
            candidate("LayerNorm", nnx.LayerNorm, None),
            Candidate(COPY, waited(jax.jit(write), x, dy)),
            Candidate(COPY_INTO, overwrite),
        ]

    name = target.device_kind if device == "cuda" else processor()
    version = f"{jax.__version__}, Flax {import_module('flax').__version__}"
    return Workbench(version, name, candidates)


VARIANTS: Final[Mapping[str, Variant]] = {  # of the built-in layers
    "numpy": PRESETS["standard"],
    "torch": PRESETS["torch"],
    "tf": PRESETS["keras"],
    "flax": PRESETS["flax"],
}
_LOAD: Final[Mapping[str, Callable[[str], Workbench]]] = {"numpy": _numpy, "torch": _torch, "tf": _tf, "flax": _flax}
