"""What the doctests of the package need: the frameworks' settings before any import, and no file that cannot load."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

_NEEDS = {
    "torch": ["rmsnorm/torch_impl/*", "rmsnorm/porting/layer_norm/torch.py", "rmsnorm/porting/layer_norm/__init__.py"],
    "tensorflow": ["rmsnorm/tf_impl/*"],
    "keras": [
        *(f"rmsnorm/tf_impl/{room}.py" for room in ("layers", "parameters", "recurrent", "output", "model")),
        *("rmsnorm/tf_impl/rnnsearch.py", "rmsnorm/tf_impl/transformer.py"),
        *("rmsnorm/porting/layer_norm/keras.py", "tests/keras_*.py"),
    ],
    "jax": ["rmsnorm/flax_impl/*", "tests/flax_*.py"],
    "flax": [
        *(f"rmsnorm/flax_impl/{room}.py" for room in ("layers", "linen", "parameters", "recurrent", "output")),
        *("rmsnorm/flax_impl/rnnsearch.py", "rmsnorm/flax_impl/transformer.py", "rmsnorm/porting/layer_norm/flax.py"),
    ],
}
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("nightly", max_examples=2000, print_blob=True)  # make fuzz

collect_ignore_glob = [
    pattern for package, patterns in _NEEDS.items() if not find_spec(package) for pattern in patterns
]
