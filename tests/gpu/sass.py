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
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import triton

# By the part of the opcode before its first dot: what computes in float64, and what does not.
_OPCODES = (
    "DADD DMUL DFMA DSETP DMNMX",
    "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I HFMA2 HMUL2 HADD2 HSET2 HSETP2 IMAD IMUL LOP3 PLOP3 SHF "
    "IADD3 IADD VIADD IABS ISETP FSETP FSET SEL FSEL PRMT FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 VIADDMNMX HMNMX2 VHMNMX "
    "LEA MOV F2FP F2IP I2FP I2IP SGXT BMSK P2R R2P FCHK FSWZADD VABSDIFF VABSDIFF4 VOTE MUFU F2F F2I I2F FRND POPC FLO "
    "BREV LDG STG LDS STS LDGSTS LDL STL LD ST LDSM STSM ATOM ATOMG ATOMS RED REDG UBLKCP UTMALDG UTMASTG SHFL BAR "
    "R2UR LDCU ULDC VOTEU UMOV UIADD3 UIADD UVIADD UIABS UIMAD USHF ULOP3 UPLOP3 UISETP USEL ULEA UPRMT USGXT UBMSK "
    "UBREV UFLO UPOPC UVIMNMX UIMNMX UP2UR UR2UP UFADD UFMUL UFFMA UFSETP UFSEL UFMNMX UFRND UF2F UF2FP UF2I UI2F "
    "UI2FP NOP EXIT BRA JMP CALL RET BSSY BSYNC BREAK BMOV RPCMOV WARPSYNC YIELD NANOSLEEP KILL BPT S2R S2UR CS2R B2R "
    "R2B LDC REDUX CREDUX MATCH ELECT MEMBAR ERRBAR FENCE CCTL LDGDEPBAR DEPBAR SYNCS ACQBULK PREEXIT USETMAXREG "
    "UTMACMDFLUSH UTMACCTL UCGABAR_ARV UCGABAR_WAIT",
)
_FLOAT64, _OTHERS = (frozenset(names.split()) for names in _OPCODES)
# Some versions write notes on waiting behind the operands, which begin with ? or &.
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;?&]*?)\s*(?:[?&][^;]*)?;")
_STORES = ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG", "UBLKCP", "UTMASTG")


class Instruction(NamedTuple):
    address: int
    predicate: str  # such as P1, !P1 or UP0, without the @; empty if there is none
    opcode: str  # with modifiers
    operands: str
    target: int | None  # of BRA, JMP and CALL

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


class Counts(NamedTuple):
    """Instructions of a thread, or for an element."""

    issue: float  # all of them, a predicated one included: it takes an issue slot
    fp64: float
    unknown: tuple[str, ...]  # opcodes of which nobody said whether they compute in float64


class Block(NamedTuple):
    """Instructions that run one after the other, and the numbers of the blocks that may come next."""

    instructions: list[Instruction]
    next: list[int]
    exits: bool
    stores: bool  # to global memory


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{tool} {option} ended with {done.returncode} and wrote {done.stderr.strip()!r}")
    return done.stdout


def registers(cubin: bytes) -> int:
    """Those of a thread."""
    text = _cuobjdump(cubin, "-res-usage")
    match = re.search(r"REG:(\d+)", text)
    if match is None:
        raise ValueError(f"cuobjdump -res-usage printed {text!r}, not the registers")
    return int(match[1])


def instructions(cubin: bytes) -> list[Instruction]:
    """All instructions of the one kernel of a cubin, with its subroutines and the padding at its end."""
    text = _cuobjdump(cubin, "-sass")
    functions = re.findall(r"Function : (\S+)", text)
    if len(functions) != 1:
        raise ValueError(f"the cubin has the functions {functions}, and one is wanted; give a cubin of one kernel")
    made = []
    for address, predicate, opcode, operands in _LINE.findall(text):
        match = re.search(r"0x([0-9a-f]+)$", operands) if opcode.split(".")[0] in ("BRA", "JMP", "CALL") else None
        target = int(match[1], 16) if match else None
        made.append(Instruction(int(address, 16), predicate, opcode, operands, target))
    return made


def spills(code: Iterable[Instruction]) -> int:
    """Loads from and stores to the stack, counted as they stand in the code."""
    return sum(one.name in ("LDL", "STL") for one in code)


def count(code: list[Instruction], scale: float) -> Counts:
    """How many instructions there are, times scale."""
    unknown = sorted({one.opcode for one in code if one.name not in _FLOAT64 | _OTHERS})
    return Counts(scale * len(code), scale * sum(one.name in _FLOAT64 for one in code), tuple(unknown))


def blocks(code: list[Instruction]) -> list[Block]:
    """The control-flow graph. A CALL goes on behind itself; an instruction with the predicate !PT never acts."""
    position = {one.address: i for i, one in enumerate(code)}
    starts = {0}
    for i, one in enumerate(code):
        if one.name in ("BRX", "JMX", "BRXU", "JMXU"):
            raise ValueError(f"{one.opcode} at {one.address:#x} branches by a register; give a kernel without it")
        if one.name in ("BRA", "JMP", "EXIT", "RET") and i + 1 < len(code):
            starts.add(i + 1)
        if one.target is not None:
            starts.add(position[one.target])
    ordered = sorted(starts)
    number = {start: i for i, start in enumerate(ordered)}
    made = []
    for i, (start, end) in enumerate(zip(ordered, [*ordered[1:], len(code)], strict=True)):
        last = code[end - 1]
        jumps = last.name in ("BRA", "JMP")
        acts = (jumps or last.name in ("EXIT", "RET")) and last.predicate not in ("!PT", "!UPT")
        # The condition of a BRA is before it, among its operands, or both.
        conditional = last.predicate not in ("", "PT", "UPT") or (jumps and "," in last.operands)
        following = [i + 1] if (conditional or not acts) and end < len(code) else []
        if acts and jumps and last.target is not None:
            following.append(number[position[last.target]])
        stores = any(one.name in _STORES for one in code[start:end])
        made.append(Block(code[start:end], following, acts and last.name == "EXIT", stores))
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
    before: list[list[int]] = [[] for _ in graph]
    for i, following in enumerate(after):
        for one in following:
            before[one].append(i)
    entered = _reached(after, 0)
    made: dict[int, set[int]] = {}
    for i in sorted(entered):
        for head in after[i]:
            if head <= i and i not in _reached(after, 0, without=head):
                made.setdefault(head, {head}).update(entered & _reached(before, i, without=head))
    return made


def _shortest(graph: list[Block], start: int, inside: set[int], ends: set[int]) -> list[Block]:
    """The way with the fewest instructions to one of the ends, with a store on it if any way has one."""
    seen, reached = set(), []
    queue = [(len(graph[start].instructions), [start], graph[start].stores)]
    while queue:
        length, way, stored = heapq.heappop(queue)
        last = way[-1]
        if (last, stored) not in seen:
            seen.add((last, stored))
            if last in ends:
                reached.append((not stored, length, way))
            for i in inside.intersection(graph[last].next):
                longer = length + len(graph[i].instructions)
                heapq.heappush(queue, (longer, [*way, i], stored or graph[i].stores))
    if not reached:
        raise ValueError(f"no way from block {start} leads to an EXIT or the end of the loop")
    return [graph[i] for i in min(reached)[2]]


def usual_path(code: list[Instruction], loop: bool) -> list[Instruction]:
    """The instructions of the usual path, in order; with loop, of one turn of the first loop that stores."""
    graph = blocks(code)
    start, inside = 0, set(range(len(graph)))
    ends = {i for i, block in enumerate(graph) if block.exits}
    if loop:
        storing = {head: body for head, body in loops(graph).items() if any(graph[i].stores for i in body)}
        if not storing:
            raise ValueError("the kernel has no loop with a store to global memory; leave out loop")
        start = min(storing)  # loops that compute rows again lie behind it
        inside = storing[start]
        ends = {i for i in inside if start in graph[i].next}
    return [one for block in _shortest(graph, start, inside, ends) for one in block.instructions]
