"""The inner loops of an object file, and what they keep in memory in place of registers. Needs objdump."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


_FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
_LINE = re.compile(r"^\s*([0-9a-f]+):\t(\S+)\s*(.*?)\s*(?:#.*)?$")
_LEAVES = re.compile(r"jmp|ret|ud2|hlt|call")  # the next instruction does not follow
# Register families: %eax is a part of %rax.
_PARTS = {
    part: name
    for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp")
    for part in (f"r{name}", f"e{name}", name, f"{name[0]}l", f"{name}l")
} | {f"r{i}{size}": f"r{i}" for i in range(8, 16) for size in ("", "d", "w", "b")}


def functions(path: Path) -> list[tuple[str, list[Instruction]]]:
    """The functions of an object file, without what a compiler knows to be rare."""
    command = ["objdump", "-dCw", "--no-show-raw-insn", path]
    made: list[tuple[str, list[Instruction]]] = []
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if match := _FUNCTION.match(line):
            made.append((match[1], []))
        elif match := _LINE.match(line):
            made[-1][1].append(Instruction(int(match[1], 16), match[2], match[3]))
    return [(name, code) for name, code in made if code and ".cold" not in name]


def inner_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The loops that have no loop inside. What leads only to a call is rare, and no part of a loop."""
    position = {one.address: i for i, one in enumerate(code)}
    targets: dict[int, int] = {}
    for i, one in enumerate(code):
        match = re.match(r"([0-9a-f]+) <", one.operands) if one.name.startswith("j") else None
        if match and int(match[1], 16) in position:
            targets[i] = position[int(match[1], 16)]
    jumps = (i + 1 for i, one in enumerate(code) if one.name.startswith("j") or _LEAVES.match(one.name))
    starts = sorted({0, len(code), *targets.values(), *jumps})
    number = {start: block for block, start in enumerate(starts)}
    after: list[list[int]] = []
    for _, end in pairwise(starts):
        follows = [] if _LEAVES.match(code[end - 1].name) or end == len(code) else [number[end]]
        after.append([*follows, number[targets[end - 1]]] if end - 1 in targets else follows)
    waiting, made = _cycles(set(range(len(after))), after), []
    while waiting:
        loop = waiting.pop()
        entered = {to for block in range(len(after)) if block not in loop for to in after[block] if to in loop}
        inner = _cycles(loop - (entered or {min(loop)}), after)
        waiting += inner
        if not inner:
            made.append([one for block in sorted(loop) for one in code[starts[block] : starts[block + 1]]])
    return made


def _cycles(blocks: set[int], after: list[list[int]]) -> list[set[int]]:
    """The strongly connected components that have a cycle."""
    before: dict[int, list[int]] = {block: [] for block in blocks}
    for block in blocks:
        for to in after[block]:
            if to in blocks:
                before[to].append(block)
    made, seen, order = [], set[int](), []
    for root in blocks:
        stack = [(root, iter(after[root]))] * (root not in seen)
        seen.add(root)
        while stack:
            block, following = stack[-1]
            to = next((to for to in following if to in blocks and to not in seen), None)
            if to is None:
                order.append(block)
                stack.pop()
            else:
                seen.add(to)
                stack.append((to, iter(after[to])))
    left = set(blocks)
    for root in reversed(order):
        component, wanted = set[int](), [root] * (root in left)
        while wanted:
            block = wanted.pop()
            if block in left:
                left.remove(block)
                component.add(block)
                wanted += before[block]
        if len(component) > 1 or root in component & set(after[root]):
            made.append(component)
    return made


def kept_in_memory(loop: Iterable[Instruction]) -> list[Instruction]:
    """Accesses by a whole vector register of an address that is the same in every turn, which is not a constant's."""
    loop = list(loop)
    changed = {_PARTS.get(one.operands.rpartition("%")[2]) for one in loop if re.search(r"(^|,)%\w+$", one.operands)}
    kept = []
    for one in loop:
        address = re.search(r"\(([^)]*)\)", one.operands)
        if not address or "%rip" in address[1] or not re.search(r"%[yz]mm", one.operands):
            continue
        if not changed.intersection(_PARTS[name] for name in re.findall(r"%(\w+)", address[1])):
            kept.append(one)
    return kept
