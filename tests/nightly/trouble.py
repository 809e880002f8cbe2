"""Whether a framework computes right among threads, when it is interrupted, and when memory is short; and after it."""

from __future__ import annotations

import gc
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import rmsnorm

N = 256  # each pair of functions is: an array of the framework; from it to y and gradients, in arrays of NumPy


def numpy_step() -> Any:
    from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp

    gain = np.linspace(0.5, 2, N, dtype="float32")
    return np.asarray, lambda x: (rms_norm(x, gain), *rms_norm_vjp(x, x, gain)[:2])


def layer_step(kind: Any, compiled: Any = lambda function: function) -> Any:
    """Of a layer of ``layer_kinds``."""
    layer = kind((64, N))
    compute = compiled(lambda sent: layer.between.pull(layer.outputs, sent, [sent["x"]]))

    def step(x: Any) -> tuple[Any, ...]:
        (y, *_), gradients = compute({**layer.weights, "x": x})
        return tuple(map(layer.between.fetch, (y, *gradients.values())))

    return layer.between.send, step


def torch_step() -> Any:
    from layer_torch import Layer

    return layer_step(Layer)


def tf_step() -> Any:
    from layer_keras import Layer

    return layer_step(Layer)


def flax_step() -> Any:
    import jax
    from layer_flax import Nnx

    def compiled(function: Any) -> Any:
        """JAX ends the process if NumPy asks for an array that is not computed yet, or for which it has no memory."""
        program = jax.jit(function)
        return lambda sent: jax.block_until_ready(program(sent))

    send, step = layer_step(Nnx, compiled)
    return lambda array: jax.block_until_ready(send(array)), step


def draw(rows: int, seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, N)).astype("float32")


def threads(send: Any, step: Any) -> None:
    """16 threads call one layer, each with its own input."""
    inputs = [send(draw(64 + i, i)) for i in range(16)]
    want = [step(x) for x in inputs]
    start = threading.Barrier(16)

    def work(i: int) -> bool:
        start.wait()
        return all(all(map(np.array_equal, step(inputs[i]), want[i])) for _ in range(20))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


def interrupt_ours(number: int, frame: Any) -> None:
    """A Ctrl-C that waits until code of rmsnorm runs.

    TensorFlow's C++ goes on after an exception, and ends in a SystemError, an open tape or a segmentation fault, also
    if all operations are its own.
    """
    if Path(rmsnorm.__file__).parent in Path(frame.f_code.co_filename).parents:
        signal.default_int_handler(number, frame)
    signal.setitimer(signal.ITIMER_REAL, 0.0002)


def interrupt(send: Any, step: Any) -> None:
    """Ctrl-C at 20 moments of a loop in which threads share the rows. Each time the next call is right."""
    x, random, stopped = send(draw(2**13 + 1, 0)), np.random.default_rng(0), 0
    want = step(x)
    for _ in range(20):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.03))
            end = time.monotonic() + 60
            while time.monotonic() < end:
                assert all(map(np.array_equal, step(x), want))
        except KeyboardInterrupt:
            stopped += 1
        assert all(map(np.array_equal, step(x), want))
    assert stopped == 20


def memory(send: Any, step: Any) -> None:
    """Without memory for the result there is an error, and x is unchanged. With memory again the result is right."""
    array = draw(2**17, 0)  # 128 MiB
    step(send(draw(64, 1)))
    x = send(array)
    before, error = array[::1000].copy(), None
    gc.collect()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, resource.RLIM_INFINITY))
    try:
        step(x)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert error is not None, "there was memory"
    assert any(word in error.lower() for word in ("memory", "alloc", "oom", "exhausted")), error
    assert np.array_equal(np.asarray(x)[::1000], before)
    assert np.array_equal(step(x)[0][:64], step(send(array[:64].copy()))[0])


if __name__ == "__main__":
    framework, *troubles = sys.argv[1:]
    signal.signal(signal.SIGALRM, interrupt_ours if framework == "tf" else signal.default_int_handler)
    for trouble in troubles:
        globals()[trouble](*globals()[f"{framework}_step"]())
        print(f"{framework} {trouble}: right", flush=True)
