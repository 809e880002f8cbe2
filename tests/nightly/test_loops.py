"""The loops of the kernels keep their vectors in registers, in the machine code that the build's flags make."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CMAKE = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
HOT = ["sum_of_squares", "fill", "row_of_y", "gradients_of_row", "are_zeros", "add_to_dscale", "refine"]
# Of whose constants the 16 registers of v3 hold not all: bfloat16's gradients read two from the stack in each turn.
MANY = ["refine<", "gradients_of_row<(rmsnorm::Format)2,"]
# Register families: %eax is a part of %rax.
PARTS = {
    part: name
    for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp")
    for part in (f"r{name}", f"e{name}", name, f"{name[0]}l", f"{name}l")
} | {f"r{i}{size}": f"r{i}" for i in range(8, 16) for size in ("", "d", "w", "b")}
LEAVES = re.compile(r"jmp|ret|ud2|hlt|call")  # the next instruction does not follow, or is rare


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def functions(path: Path) -> dict[str, list[Instruction]]:
    """The functions of an object file, without what a compiler knows to be rare."""
    command, made, code = ["objdump", "-dCw", "--no-show-raw-insn", path], {}, []
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if match := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            code = made.setdefault(match[1], [])
        elif match := re.match(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*?)\s*(?:#.*)?$", line):
            code.append(Instruction(int(match[1], 16), match[2], match[3]))
    return {name: code for name, code in made.items() if ".cold" not in name}


def inner_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """What lies between a jump back and its target, if no other loop lies inside.

    A rare branch behind a loop jumps back, too: it is no loop where it jumps into one, or something between leaves.
    """
    place, ranges = {one.address: i for i, one in enumerate(code)}, set()
    for i, one in enumerate(code):
        match = re.match(r"([0-9a-f]+) <", one.operands) if one.name.startswith("j") else None
        start = place.get(int(match[1], 16)) if match else None
        if start is not None and start <= i and not any(LEAVES.match(other.name) for other in code[start:i]):
            ranges.add((start, i))
    loops = {(a, b) for a, b in ranges if not any(c < a <= d < b for c, d in ranges)}
    return [code[a : b + 1] for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]


def kept_in_memory(loop: list[Instruction]) -> list[Instruction]:
    """Accesses by a whole vector register of an address that is the same in every turn, which is not a constant's."""
    changed = {PARTS.get(one.operands.rpartition("%")[2]) for one in loop if re.search(r"(^|,)%\w+$", one.operands)}
    kept = []
    for one in loop:
        address = re.search(r"\(([^)]*)\)", one.operands)
        if not address or "%rip" in address[1] or not re.search(r"%[yz]mm", one.operands):
            continue
        if not changed.intersection(PARTS[name] for name in re.findall(r"%(\w+)", address[1])):
            kept.append(one)
    return kept


def flags(level: str) -> list[str]:
    """What the build passes to the compiler of the kernels of a level."""
    options = [*re.findall(r"^ *add_compile_options\(([^)]*)\)", CMAKE, re.MULTILINE)]
    options += re.findall(r'CMAKE_CXX_FLAGS_RELEASE "([^"]*)"', CMAKE)
    options += re.findall(r"target_compile_options\(kernels_\S+ PRIVATE (-[^)]*)\)", CMAKE)
    options += re.findall(rf"set\(flags_{level} ([^)]*)\)", CMAKE)
    return ["-std=c++20", "-fPIC", f"-DRMSNORM_LEVEL={level}", *" ".join(options).split()]


@pytest.mark.parametrize("level", ["v3", "v4", "v4_bf16"])
def test_no_vector_of_an_inner_loop_is_kept_in_memory(level: str, tmp_path: Path) -> None:
    """GCC; at -O2 it leaves what a loop marks or adds up on the stack."""
    if platform.machine() not in ("x86_64", "AMD64") or not (shutil.which("g++") and shutil.which("objdump")):
        pytest.skip("needs g++ and objdump on x86-64")
    native, made = ROOT / "rmsnorm/cpu/native", tmp_path / "hot.o"
    command = ["g++", *flags(level), "-I", native, "-c", ROOT / "tests/native/hot.cpp", "-o", made]
    subprocess.run(command, check=True, timeout=300)
    wanted = [
        (name, code) for name, code in functions(made).items()
        if re.search(rf"\b(?:{'|'.join(HOT)})<", name.split("(")[0])
        and not (level == "v3" and any(many in name for many in MANY))
    ]  # fmt: skip
    loops = [(name, loop) for name, code in wanted for loop in inner_loops(code)]
    kept = {f"{name} at {loop[0].address:#x}": kept_in_memory(loop)[:3] for name, loop in loops}
    assert len(loops) > 10
    assert {name: found for name, found in kept.items() if found} == {}
