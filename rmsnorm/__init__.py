"""RMSNorm: one specification, one golden reference with gradients, the same numbers in every framework.

The way of one call, in PyTorch on a CPU::

    torch_impl/functional.py    rms_norm(x, scale, ...), whose signature is in specification/interface.py
    specification/resolve.py    checks every argument and decides every choice: a Call
    engines.py                  a kernel, or the recipe? rmsnorm.explain asks the same
    torch_impl/kernels.py       the memory of the results, and where the rows of each tensor are
    cpu/launch.py               what the kernels need for these formats and options
    cpu/native/forward.h        the kernel: float64 inside, rounded wherever the variant rounds

The gradient comes back by torch_impl/autograd.py and cpu/native/backward.h. Where there is no kernel, recipe.py
computes: one text for all frameworks.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any

from rmsnorm.specification.frameworks import FRAMEWORKS
from rmsnorm.specification.quantisation import Quantisation
from rmsnorm.specification.variants import PRESETS, Variant
from rmsnorm.specification.version import VERSION as __version__

__all__ = ["PRESETS", "Quantisation", "Variant", "__version__"]

_FUNCTIONS = {"explain": "explaining", "compare": "parity.pair"}  # and their modules
_ELSEWHERE = {
    **{f"{alias}_impl": f"rmsnorm.{row.folder}" for row in FRAMEWORKS.values() for alias in row.aliases},
    "RMSNorm": "rmsnorm.torch_impl.RMSNorm, rmsnorm.tf_impl.RMSNormalization or rmsnorm.flax_impl.RMSNorm",
    "RMSNormalization": "rmsnorm.tf_impl.RMSNormalization",
    **{
        name: " or ".join(f"rmsnorm.{row.folder}.{name}" for row in FRAMEWORKS.values())
        for name in ("rms_norm", "rms_norm_vjp")
    },
    **{name: f"rmsnorm.conversion.{name}" for name in ("replace", "to_rms_norm")},
    **{name: f"rmsnorm.parity.{name}" for name in ("check", "Report")},
}


def __getattr__(name: str) -> Any:
    """Imports a folder at its first use: ``rmsnorm.torch_impl`` loads PyTorch, ``import rmsnorm`` does not."""
    if name in _FUNCTIONS:
        return getattr(import_module(f"rmsnorm.{_FUNCTIONS[name]}"), name)
    if not name.startswith("_") and find_spec(f"rmsnorm.{name}"):
        return import_module(f"rmsnorm.{name}")
    message = f"module 'rmsnorm' has no attribute {name!r}"
    if name in _ELSEWHERE:
        message += f", expected {_ELSEWHERE[name]}; import that"
        # "from rmsnorm import name" would hide the message of an AttributeError.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(message, name=__name__)
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted({*globals(), *(module.name for module in iter_modules(__path__))})
