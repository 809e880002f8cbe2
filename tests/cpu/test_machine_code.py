"""The loops of the kernels keep their vectors in registers, in the machine code that the build's flags make."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu.machine_code import functions, inner_loops, kept_in_memory

ROOT = Path(__file__).parents[2]
CMAKE = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
HOT = ["sum_of_squares", "fill", "row_of_y", "gradients_of_row", "are_zeros", "add_to_dscale"]
MANY = ["refine"]  # of whose constants the 16 registers of v3 hold not all


def _flags(level: str) -> list[str]:
    """What the build passes to the compiler of the kernels of a level."""
    options = [*re.findall(r"^ *add_compile_options\(([^)]*)\)", CMAKE, re.MULTILINE)]
    options += re.findall(r'CMAKE_CXX_FLAGS_RELEASE "([^"]*)"', CMAKE)
    options += re.findall(r"target_compile_options\(kernels_\S+ PRIVATE (-[^)]*)\)", CMAKE)
    options += re.findall(rf"set\(flags_{level} ([^)]*)\)", CMAKE)
    return ["-std=c++20", "-fPIC", f"-DRMSNORM_LEVEL={level}", *" ".join(options).split()]


@pytest.mark.slow  # ten seconds for each level
@pytest.mark.parametrize("level", ["v3", "v4", "v4_bf16"])
def test_no_vector_of_an_inner_loop_is_kept_in_memory(level: str, tmp_path: Path) -> None:
    """GCC; at -O2 it leaves what a loop marks or adds up on the stack."""
    if platform.machine() not in ("x86_64", "AMD64") or not (shutil.which("g++") and shutil.which("objdump")):
        pytest.skip("needs g++ and objdump on x86-64")
    native, made = ROOT / "rmsnorm/cpu/native", tmp_path / "hot.o"
    command = ["g++", *_flags(level), "-I", native, "-c", ROOT / "tests/native/hot.cpp", "-o", made]
    subprocess.run(command, check=True, timeout=300)
    hot = HOT + (MANY if level != "v3" else [])
    counts, loops = {}, 0
    for name, code in functions(made):
        if re.search(rf"\b(?:{'|'.join(hot)})<", name.partition("(")[0]):
            for loop in inner_loops(code):
                kept = kept_in_memory(loop)
                loops += 1
                if kept:
                    counts[f"{name} at {loop[0].address:#x}"] = [f"{one.name} {one.operands}" for one in kept[:3]]
    assert loops > 10
    assert counts == {}
