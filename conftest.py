"""Setup for the doctests of the package: framework settings before any import, and skipped files."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
if not find_spec("numba"):
    os.environ.setdefault("RMSNORM_CPU_KERNELS", "0")  # the warning that numba is missing would be an error

_NEEDS = {
    "numba": ["cpu/*"],
    "triton": ["gpu/triton_*"],
    "torch": ["torch_impl/*", "nematus/torch/*", "*/torch.py", "*/torch_*.py"],
    "tensorflow": ["tf_impl/*", "nematus/tf/*", "*/tf.py"],
    "keras": ["tf_impl/layers.py", "tf_impl/keras_ops.py", "nematus/tf/*", "*/keras.py"],
    "jax": ["gpu/pallas_*", "flax_impl/*", "nematus/flax/*", "*/flax.py"],
    "flax": ["flax_impl/layers.py", "flax_impl/linen.py", "nematus/flax/*", "*/flax.py"],
}
_NEEDS["torch"] += ["conversion/layer_norm/__init__.py", "conversion/replacement/__init__.py"]  # whose examples use it
_PROGRAMS = {  # that tests run or import
    "keras": ["tests/**/keras_*.py"],
    "jax": ["tests/**/flax_*.py", "tests/gpu/pallas_*.py"],
    "torch": ["tests/**/torch_*.py"],
    "triton": ["tests/gpu/*_machine_code.py"],
    "tensorflow": ["tests/**/tf_*.py"],
}
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("nightly", max_examples=2000, print_blob=True)  # make fuzz

collect_ignore_glob = [
    f"rmsnorm/{pattern}" for package, patterns in _NEEDS.items() if not find_spec(package) for pattern in patterns
] + [pattern for package, patterns in _PROGRAMS.items() if not find_spec(package) for pattern in patterns]
