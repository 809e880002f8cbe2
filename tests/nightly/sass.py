"""The machine code (SASS) that a compiler made of one GPU kernel, and how much of it runs; no GPU is needed.

It needs Triton, which brings a disassembler. The usual path is the shortest one, in instructions, from the entry to an
EXIT that comes after a store to global memory. What a branch guards that is rarely needed (rows repaired, the slow case
of a division) is longer than the way around it; the store keeps out an early EXIT of a program that has nothing to do.
A loop on the path counts as one turn. With ``loop`` the path is one turn of the first loop that stores to global
memory, which is the loop over rows of a backward kernel.
"""

from __future__ import annotations

import heapq
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

# Some versions write notes on waiting behind the operands, which begin with ? or &.
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;?&]*?)\s*(?:[?&][^;]*)?;")
_STORES = ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG", "UBLKCP", "UTMASTG")
_NEVER = ("!PT", "!UPT")  # predicates of what never acts


class Instruction(NamedTuple):
    address: int
    predicate: str  # such as P1, !P1 or UP0, without the @; empty if there is none
    name: str  # of the operation, without modifiers
    operands: str
    target: int | None  # of BRA, JMP and CALL

    @property
    def is_float64(self) -> bool:
        """Every operation whose name begins with D, such as DFMA, but for that which waits."""
        return self.name.startswith("D") and self.name != "DEPBAR"


class Block(NamedTuple):
    """Instructions that run one after the other, and the numbers of the blocks that may come next."""

    code: list[Instruction]
    next: list[int]
    exits: bool

    @property
    def stores(self) -> bool:
        """To global memory."""
        return any(one.name in _STORES for one in self.code)


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def registers(cubin: bytes) -> int:
    """Those of a thread."""
    return int(re.search(r"REG:(\d+)", _cuobjdump(cubin, "-res-usage"))[1])  # type: ignore[index]


def instructions(cubin: bytes) -> list[Instruction]:
    """All instructions of the one kernel of a cubin, with its subroutines and the padding at its end."""
    text, made = _cuobjdump(cubin, "-sass"), []
    assert len(re.findall(r"Function : (\S+)", text)) == 1
    for address, predicate, opcode, operands in _LINE.findall(text):
        name = opcode.split(".")[0]
        assert name not in ("BRX", "JMX", "BRXU", "JMXU"), "it branches by a register"
        match = re.search(r"0x([0-9a-f]+)$", operands) if name in ("BRA", "JMP", "CALL") else None
        made.append(Instruction(int(address, 16), predicate, name, operands, int(match[1], 16) if match else None))
    return made


def blocks(code: list[Instruction]) -> list[Block]:
    """The control-flow graph. A CALL goes on behind itself."""
    position = {one.address: i for i, one in enumerate(code)}
    starts = {0} | {position[one.target] for one in code if one.target is not None}
    starts |= {i + 1 for i, one in enumerate(code[:-1]) if one.name in ("BRA", "JMP", "EXIT", "RET")}
    ordered, made = sorted(starts), []
    number = {start: i for i, start in enumerate(ordered)}
    for i, (start, end) in enumerate(zip(ordered, [*ordered[1:], len(code)], strict=True)):
        last = code[end - 1]
        jumps = last.name in ("BRA", "JMP")
        acts = (jumps or last.name in ("EXIT", "RET")) and last.predicate not in _NEVER
        # The condition of a BRA is before it, among its operands, or both.
        conditional = last.predicate not in ("", "PT", "UPT") or (jumps and "," in last.operands)
        following = [i + 1] if (conditional or not acts) and end < len(code) else []
        if acts and jumps and last.target is not None:
            following.append(number[position[last.target]])
        made.append(Block(code[start:end], following, acts and last.name == "EXIT"))
    return made


def _reached(neighbours: list[list[int]], start: int, without: int | None = None) -> set[int]:
    """The blocks that some way from start leads to, which does not pass through one of them."""
    seen, waiting = set[int](), [start]
    while waiting:
        one = waiting.pop()
        if one not in seen and one != without:
            seen.add(one)
            waiting += neighbours[one]
    return seen


def loops(graph: list[Block]) -> dict[int, set[int]]:
    """The natural loops: their blocks by the first, which every way in passes. A rare branch jumping back is none."""
    after = [block.next for block in graph]
    before = [[i for i, following in enumerate(after) if one in following] for one in range(len(graph))]
    entered, made = _reached(after, 0), dict[int, set[int]]()
    for i in sorted(entered):
        for head in after[i]:
            if head <= i and i not in _reached(after, 0, without=head):
                made.setdefault(head, {head}).update(entered & _reached(before, i, without=head))
    return made


def usual_path(code: list[Instruction], loop: bool) -> list[Instruction]:
    """The instructions of the usual path, in order; with loop, of one turn of the first loop that stores."""
    graph = blocks(code)
    start, inside = 0, set(range(len(graph)))
    ends = {i for i, block in enumerate(graph) if block.exits}
    if loop:  # loops that compute rows again lie behind it
        start, inside = min((h, body) for h, body in loops(graph).items() if any(graph[i].stores for i in body))
        ends = {i for i in inside if start in graph[i].next}
    seen, reached = set(), []
    queue = [(len(graph[start].code), [start], graph[start].stores)]
    while queue:
        length, way, stored = heapq.heappop(queue)
        last = way[-1]
        if (last, stored) not in seen:
            seen.add((last, stored))
            if last in ends:
                reached.append((not stored, length, way))
            for i in inside.intersection(graph[last].next):
                heapq.heappush(queue, (length + len(graph[i].code), [*way, i], stored or graph[i].stores))
    return [one for i in min(reached)[2] for one in graph[i].code]
