"""The machine code (SASS) that a compiler made of one GPU kernel, counted by execution pipe; no GPU is needed.

    python benchmarks/machine_code.py FILE.cubin [--loop] [--calls] [--threads 256 --elements 8192]

Prints the registers, the spills, the counts of the usual path, and the blocks of that path, so that a person can check
it. Needs Triton, which brings a disassembler.

The usual path is the shortest one, in instructions, from the entry to an EXIT that comes after a store to global
memory. What a branch guards that is rarely needed (rows repaired, the slow case of a division) is longer than the way
around it; the store keeps out an early EXIT of a program that has nothing to do. A loop on the path counts as one turn.
With --loop the path is one turn of the first loop that stores to global memory, which is the loop over rows of a
backward kernel.
"""

from __future__ import annotations

import argparse
import heapq
import re
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import triton

# By the part of the opcode before its first dot. Sources: Nsight Compute's list of pipelines and the throughput table
# of the CUDA programming guide; where they are silent, the pipe of the most similar instruction.
_OPCODES = {
    "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I HFMA2 HMUL2 HADD2 HSET2 HSETP2 IMAD IMUL",
    "alu": "LOP3 PLOP3 SHF IADD3 IADD VIADD IABS ISETP FSETP FSET SEL FSEL PRMT FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3 "
    "VIADDMNMX HMNMX2 VHMNMX LEA MOV F2FP F2IP I2FP I2IP SGXT BMSK P2R R2P FCHK FSWZADD VABSDIFF VABSDIFF4 VOTE",
    "fp64": "DADD DMUL DFMA DSETP DMNMX",
    "xu": "MUFU F2F F2I I2F FRND POPC FLO BREV",
    "memory": "LDG STG LDS STS LDGSTS LDL STL LD ST LDSM STSM ATOM ATOMG ATOMS RED REDG UBLKCP UTMALDG UTMASTG",
    "shuffle": "SHFL",
    "barrier": "BAR",
    "uniform": "R2UR LDCU ULDC VOTEU UMOV UIADD3 UIADD UVIADD UIABS UIMAD USHF ULOP3 UPLOP3 UISETP USEL ULEA UPRMT "
    "USGXT UBMSK UBREV UFLO UPOPC UVIMNMX UIMNMX UP2UR UR2UP UFADD UFMUL UFFMA UFSETP UFSEL UFMNMX UFRND UF2F UF2FP "
    "UF2I UI2F UI2FP",
    "other": "NOP EXIT BRA JMP CALL RET BSSY BSYNC BREAK BMOV RPCMOV WARPSYNC YIELD NANOSLEEP KILL BPT S2R S2UR CS2R "
    "B2R R2B LDC REDUX CREDUX MATCH ELECT MEMBAR ERRBAR FENCE CCTL LDGDEPBAR DEPBAR SYNCS ACQBULK PREEXIT USETMAXREG "
    "UTMACMDFLUSH UTMACCTL UCGABAR_ARV UCGABAR_WAIT",
}
PIPES = {opcode: pipe for pipe, opcodes in _OPCODES.items() for opcode in opcodes.split()}
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
    """Instructions of a thread by pipe; issue is all of them, a predicated one included: it takes an issue slot."""

    issue: float = 0
    fma: float = 0
    alu: float = 0
    fp64: float = 0
    xu: float = 0
    memory: float = 0
    shuffle: float = 0
    barrier: float = 0
    uniform: float = 0
    other: float = 0
    unknown: tuple[str, ...] = ()  # opcodes that are in no pipe's list, counted in issue alone

    def __str__(self) -> str:
        numbers = ", ".join(f"{pipe} {value:.4g}" for pipe, value in zip(self._fields[:-1], self[:-1], strict=True))
        return numbers + (f"; of unknown pipe: {' '.join(self.unknown)}" if self.unknown else "")


class Block(NamedTuple):
    """Instructions that run one after the other, and the numbers of the blocks that may come next."""

    instructions: list[Instruction]
    next: list[int]
    end: str  # EXIT or RET, if the last instruction is one
    stores: bool  # to global memory

    @property
    def start(self) -> int:
        return self.instructions[0].address


def _cuobjdump(cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{tool} {option} ended with {done.returncode} and wrote {done.stderr.strip()!r}")
    return done.stdout


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, which hold what the registers could not."""
    text = _cuobjdump(cubin, "-res-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise ValueError(f"cuobjdump -res-usage printed {text!r}, not the registers and the stack")
    return int(match[1]), int(match[2])


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


def spills(code: Iterable[Instruction]) -> tuple[int, int]:
    """Loads from and stores to the stack, counted as they stand in the code."""
    names = [one.name for one in code]
    return names.count("LDL"), names.count("STL")


def count(code: Iterable[Instruction]) -> Counts:
    """How many instructions there are for each pipe."""
    numbers: dict[str, float] = dict.fromkeys(Counts._fields[:-1], 0.0)
    unknown = set()
    for one in code:
        numbers["issue"] += 1
        if one.name in PIPES:
            numbers[PIPES[one.name]] += 1
        else:
            unknown.add(one.opcode)
    return Counts(**numbers, unknown=tuple(sorted(unknown)))


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
        made.append(Block(code[start:end], following, last.name if acts and not jumps else "", stores))
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
        raise ValueError(f"no way from {graph[start].start:#x} leads to an EXIT, a RET or the end of the loop")
    return [graph[i] for i in min(reached)[2]]


def usual_blocks(code: list[Instruction], loop: bool = False) -> list[Block]:
    """The blocks of the usual path, in order; with loop, of one turn of the first loop that stores."""
    graph = blocks(code)
    start, inside = 0, set(range(len(graph)))
    ends = {i for i, block in enumerate(graph) if block.end == "EXIT"}
    if loop:
        storing = {head: body for head, body in loops(graph).items() if any(graph[i].stores for i in body)}
        if not storing:
            raise ValueError("the kernel has no loop with a store to global memory; leave out loop")
        start = min(storing)  # loops that compute rows again lie behind it
        inside = storing[start]
        ends = {i for i in inside if start in graph[i].next}
    return _shortest(graph, start, inside, ends)


def _with_subroutines(graph: list[Block], path: Iterable[Instruction]) -> list[Instruction]:
    """A path, and behind each CALL of it the usual path of the subroutine."""
    made = []
    for one in path:
        made.append(one)
        if one.name == "CALL" and one.target is not None:
            start = next(i for i, block in enumerate(graph) if block.start == one.target)
            returns = {i for i, block in enumerate(graph) if block.end == "RET"}
            way = _shortest(graph, start, set(range(len(graph))), returns)
            made += _with_subroutines(graph, (inner for block in way for inner in block.instructions))
    return made


def usual_path(cubin: bytes, loop: bool = False, calls: bool = False) -> Counts:
    """The counts of the usual path, or of one turn of the row loop; with calls, of its subroutines too."""
    code = instructions(cubin)
    path = [one for block in usual_blocks(code, loop) for one in block.instructions]
    return count(_with_subroutines(blocks(code), path) if calls else path)


def per_element(counts: Counts, threads: int, elements: int) -> Counts:
    """The instructions of all threads for one element: those of a thread × threads / elements."""
    return Counts._make([*(value * threads / elements for value in counts[:-1]), counts.unknown])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="a cubin with one kernel")
    parser.add_argument("--loop", action="store_true", help="count one turn of the first loop that stores")
    parser.add_argument("--calls", action="store_true", help="count the instructions of subroutines on the path")
    parser.add_argument("--threads", type=int, help="of a program; with --elements, counts for an element are printed")
    parser.add_argument("--elements", type=int, help="of a program, or of one turn of the loop")
    arguments = parser.parse_args()
    cubin = arguments.file.read_bytes()
    code = instructions(cubin)
    path = usual_blocks(code, arguments.loop)
    registers, stack = resources(cubin)
    all_spills, path_spills = spills(code), spills(one for block in path for one in block.instructions)
    numbers = usual_path(cubin, arguments.loop, arguments.calls)
    print(f"{registers} registers, {stack} bytes of stack")
    print("spill loads and stores: {} and {} in all, {} and {} on the path".format(*all_spills, *path_spills))
    print(f"a thread: {numbers}")
    if arguments.threads and arguments.elements:
        print(f"an element: {per_element(numbers, arguments.threads, arguments.elements)}")
    graph = blocks(code)
    heads = {graph[head].start for head in loops(graph)} - {path[0].start}
    for i, block in enumerate(path):
        last = block.instructions[-1]
        following = path[i + 1].start if i + 1 < len(path) else None
        goes_on = "" if following is None else " -> next" if following == last.address + 16 else f" -> {following:#x}"
        turn = "  (a loop begins here: one turn is counted)" if block.start in heads else ""
        guard = f"@{last.predicate} " if last.predicate else ""
        instruction = f"{guard}{last.opcode} {last.operands}".strip()
        print(f"{block.start:#06x} .. {last.address:#06x} {len(block.instructions):5}  {instruction}{goes_on}{turn}")


if __name__ == "__main__":
    main()
