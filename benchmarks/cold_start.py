"""What the first calls cost: forward, with gradients, and of a large input; without compiled code on disk, and with it.

Each line is two new processes with an empty cache of their own: the first compiles, the second loads what that left.
The import is that of rmsnorm alone. Before it the framework is imported and computes one layer of its own, with
gradients. The time is that of the processor, on which other processes have little influence: on an idle machine a
single thread needs no more by the clock.

    python benchmarks/cold_start.py                                 # every installed framework: two minutes
    python benchmarks/cold_start.py --backend torch --dtype float32
    PYTHONPATH=OTHER python benchmarks/cold_start.py                # another version of rmsnorm
    ENVIRONMENT/bin/python benchmarks/cold_start.py                 # of an installed wheel, which has the kernels
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

PARTS: Final = ("import", "forward", "gradients", "large")
MODULES: Final = {"numpy": "numpy", "torch": "torch", "flax": "flax", "tf": "tensorflow"}

_STEPS: Final = {
    "numpy": """
x, large = (random.normal(size=shape).astype(dtype) for shape in shapes)
mark()
from rmsnorm.numpy_impl.fast import rms_norm, rms_norm_vjp
def forward(x): return rms_norm(x, np.ones(x.shape[1], x.dtype))
def gradients(x): return rms_norm_vjp(x[::-1].copy(), x, np.ones(x.shape[1], x.dtype))
""",
    "torch": """
import torch
x, large = (torch.tensor(random.normal(size=shape), dtype=getattr(torch, dtype)) for shape in shapes)
def gradients(x):
    x = x.clone().requires_grad_()
    layer(x.shape[1], dtype=x.dtype)(x).sum().backward()
layer = torch.nn.RMSNorm
gradients(x)
mark()
from rmsnorm.torch_impl import RMSNorm as layer
def forward(x): layer(x.shape[1], dtype=x.dtype)(x)
""",
    "flax": """
import jax, jax.numpy as jnp
from flax import nnx
x, large = (jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)
def step(layer, x): return layer(x).sum()
def new(x): return layer(x.shape[1], param_dtype=dtype, rngs=nnx.Rngs(0))
def gradients(x): jax.block_until_ready(nnx.jit(nnx.grad(step, argnums=(0, 1)))(new(x), x))
layer = nnx.RMSNorm
gradients(x)
mark()
from rmsnorm.flax_impl import RMSNorm as layer
def forward(x): jax.block_until_ready(nnx.jit(lambda layer, x: layer(x))(new(x), x))
""",
    "tf": """
import tensorflow as tf, keras
x, large = (tf.constant(random.normal(size=shape), dtype) for shape in shapes)
def gradients(x):
    ours = layer(dtype=dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = ours(x)
    tape.gradient(y, [x, *ours.trainable_variables])
layer = keras.layers.RMSNormalization
gradients(x)
mark()
from rmsnorm.tf_impl import RMSNormalization as layer
def forward(x): layer(dtype=dtype)(x)
""",
}

_PROCESS: Final = """
import json, sys, time
import numpy as np, ml_dtypes
random = np.random.default_rng(0)  # a row of ones has a gradient that cancels, which compiles more
dtype, shapes, times = sys.argv[1], ((32, 768), (4096, 4096)), []
def mark(): times.append(time.process_time())
{step}
mark()
forward(x)
mark()
gradients(x)
mark()
gradients(large)
mark()
print(json.dumps([end - start for start, end in zip(times, times[1:])]))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=tuple(MODULES), help="can be repeated")
    parser.add_argument("--dtype", action="append", choices=("float32", "bfloat16", "float16", "float64"))
    chosen = parser.parse_args(arguments)
    print("seconds of the processor without compiled code on disk, and with it")
    for backend in chosen.backend or [name for name, module in MODULES.items() if find_spec(module)]:
        for dtype in chosen.dtype or ("float32", "bfloat16"):
            print(f"{backend} {dtype} ...", end="\r", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                cold, warm = _run(backend, dtype, folder), _run(backend, dtype, folder)
            cells = (f"{name} {a:5.2f} {b:5.2f}" for name, a, b in zip(PARTS, cold, warm, strict=True))
            print(f"{backend:5} {dtype:8}  " + "   ".join(cells), flush=True)


def _run(backend: str, dtype: str, folder: str) -> list[float]:
    """The seconds of each of PARTS, in a new process that runs in this folder."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", _PROCESS.format(step=_STEPS[backend]), dtype]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if process.returncode:
        sys.exit(process.stderr)
    seconds: list[float] = json.loads(process.stdout)
    return seconds


if __name__ == "__main__":
    main()
