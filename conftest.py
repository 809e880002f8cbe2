"""What every test shares: settings of the frameworks before any import, compiled code on disk, which files are read.

``make test`` runs every test but those of ``tests/nightly``, which pytest collects only where it is given that folder.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from rmsnorm.parity.selftest import keep_what_jax_compiles
from rmsnorm.targets.apart import import_triton_before_tensorflow

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
# What the frameworks compile is kept from one file, process and run to the next. Each of them checks what it reads.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rmsnorm"
keep_what_jax_compiles()
import_triton_before_tensorflow()
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_CACHE / "inductor"))
# So is bytecode: the tests start a hundred processes, and each would compile this package again.
if os.environ.get("RMSNORM_TEST_BYTECODE") != "0" and os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False
_TESTS = Path(__file__).with_name("tests")
_HAS_KERNELS = bool(find_spec("rmsnorm.cpu._native"))
if not _HAS_KERNELS:
    os.environ.setdefault("RMSNORM_CPU_KERNELS", "0")  # the warning that they are missing would be an error

_NEEDS = {
    "triton": ["gpu/triton_*"],
    "torch": ["torch_impl/*", "*/torch.py", "*/torch_*.py"],
    "tensorflow": ["tf_impl/*", "nematus/tf_*", "*/tf.py"],
    "keras": ["tf_impl/layers.py", "nematus/tf_models.py", "*/keras.py"],
    "jax": ["flax_impl/*", "nematus/flax_*", "*/flax.py"],
    "flax": ["flax_impl/layers.py", "flax_impl/linen.py", "nematus/flax_*", "*/flax.py"],
}
_NEEDS["torch"] += ["conversion/layer_norm/__init__.py", "conversion/replacement/__init__.py"]  # whose examples use it
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("nightly", max_examples=2000, print_blob=True)  # make nightly

collect_ignore_glob = [
    f"rmsnorm/{pattern}" for package, patterns in _NEEDS.items() if not find_spec(package) for pattern in patterns
]
collect_ignore_glob.append("benchmarks/timing/backends/*")  # no examples, and each imports its framework
if not _HAS_KERNELS:
    collect_ignore_glob.append("rmsnorm/cpu/*")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Of the files in tests/ only those with tests: --doctest-modules would import helpers and programs, too."""
    is_test = collection_path.name.startswith("test_") or collection_path.suffix != ".py"
    return None if is_test or not collection_path.is_relative_to(_TESTS) else True
