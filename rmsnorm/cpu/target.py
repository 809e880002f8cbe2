"""The processor that code is compiled for: this one; or in a build, the level that RMSNORM_BUILD_LEVEL names.

A level is a set of instructions that many processors have. A library is compiled for a level, and used where the
processor has it.
"""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

from rmsnorm import errors


class Level(NamedTuple):
    """A level.

    Attributes:
        machines: names that ``platform.machine`` gives to it.
        flags: what Linux calls the instructions that a processor must have.
        model: LLVM's name of a processor with them.
        features: what LLVM calls them, and what it is to do about them.
    """

    machines: tuple[str, ...]
    flags: frozenset[str]
    model: str
    features: tuple[str, ...]


_V3: Final = ("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt", "sahf", "sse3", "sse4.1",
              "sse4.2", "ssse3", "xsave")  # fmt: skip
_V4: Final = ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_V3_FLAGS: Final = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})
_X86: Final = ("x86_64", "AMD64")
_ARM: Final = ("aarch64", "arm64")
IS_X86: Final = platform.machine() in _X86
IS_ARM: Final = platform.machine() in _ARM
_V4_FLAGS: Final = _V3_FLAGS | set(_V4)
_WIDE: Final = ("avx512bf16", "-prefer-256-bit")  # processors that round to bfloat16 have fast vectors of 512 bits
LEVELS: Final = {  # the best first
    "x86-64-v4-bf16": Level(_X86, _V4_FLAGS | {"avx512_bf16"}, "x86-64-v4", _V3 + _V4 + _WIDE),
    "x86-64-v4": Level(_X86, _V4_FLAGS, "x86-64-v4", _V3 + _V4),
    "x86-64-v3": Level(_X86, _V3_FLAGS, "x86-64-v3", _V3),
    "aarch64": Level(_ARM, frozenset(), "generic", ("neon", "fp-armv8")),
}


def built() -> str | None:
    """The level of a build; None in any other process.

    Raises:
        ValueError: there is no level of this name.
    """
    level = os.environ.get("RMSNORM_BUILD_LEVEL") or None
    return None if level is None else _known(level)


def chosen(names: str) -> list[str]:
    """The levels in RMSNORM_BUILD_LEVELS, separated by commas.

    Raises:
        ValueError: there is no level of one of the names.
    """
    return [_known(name.strip()) for name in names.split(",") if name.strip()]


def _known(level: str) -> str:
    if level not in LEVELS:
        raise errors.not_a_choice("rmsnorm", "a level of processors", level, LEVELS)
    return level


@lru_cache(maxsize=1)
def levels() -> list[str]:
    """The levels that this processor has, the best first, as Linux says. Elsewhere no library was tried: none."""
    if sys.platform != "linux":
        return []
    flags: set[str] = set()
    with suppress(OSError), open("/proc/cpuinfo", errors="replace") as lines:
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    own = platform.machine()
    return [name for name, level in LEVELS.items() if own in level.machines and level.flags <= flags]


@lru_cache(maxsize=1)
def processor() -> tuple[str, str]:
    """LLVM's names of the processor and of its features."""
    level = built()
    if level is not None:
        return of_level(level)
    from llvmlite import binding

    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def of_level(name: str) -> tuple[str, str]:
    """LLVM's names of the processor and the features of a level."""
    level = LEVELS[name]
    return level.model, ",".join(feature if feature[0] == "-" else f"+{feature}" for feature in level.features)


def has(feature: str) -> bool:
    """Whether the processor has a feature of LLVM."""
    return f"+{feature}" in processor()[1].split(",")


def has_fma() -> bool:
    """Whether a product and a sum are one instruction. Only on x86 a processor may lack it."""
    return has("fma") or not IS_X86
