"""The tests load with NumPy alone, as in CI's jobs with one framework or none."""

from __future__ import annotations

from pathlib import Path

from programs import printed

COLLECT = """
import importlib.util, os, sys, pytest
os.environ.pop("RMSNORM_REQUIRE", None)
missing = {"torch", "tensorflow", "keras", "jax", "flax", "transformers", "onnx", "matplotlib", "sklearn"}
find_spec = importlib.util.find_spec

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing)
importlib.util.find_spec = lambda name, *package: None if name in missing else find_spec(name, *package)
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_the_tests_load_with_numpy_alone() -> None:
    """A file that imports a framework at its top would end the session."""
    printed("-c", COLLECT, cwd=Path(__file__).parents[2])
