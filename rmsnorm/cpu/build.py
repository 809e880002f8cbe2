"""Compiles the library of a level: the functions that most calls need, in one file. It needs numba and a linker.

    python -m rmsnorm.cpu.build x86-64-v3              # beside this file, where the package looks for it
    python -m rmsnorm.cpu.build x86-64-v3 FOLDER       # which RMSNORM_CPU_LIBRARY then names
    python -m rmsnorm.cpu.build --list                 # the functions; numba compiles all others when they are called

It takes two to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from rmsnorm import dtypes, errors
from rmsnorm.call import Call, Spec, resolve
from rmsnorm.cpu import target
from rmsnorm.cpu.launch import kernel_key
from rmsnorm.cpu.machine_code import KINDS, WORDS, Key, described, library_name, mark, name_of, symbol, table
from rmsnorm.variants import PRESETS, Variant

Function = tuple[str, ...]  # the module, and what its ``compiled`` takes

_TODO: Final = "functions.json"
_GATES: Final = (("silu", "after"), ("silu", "before"), ("sigmoid", "after"))
_TASKS: Final = (
    *(("tasks", name) for name in ("run", "compute", "work")),
    *(("xla_handler", name) for name in ("handle", "spread")),
    *(("parameters", name) for name in (*dtypes.FLOATS, "offset")),
)


def functions() -> list[Function]:
    """All functions of a library: for every preset and every dtype of x, with gains of this dtype or of float32.

    For every format of x and y there is a backward kernel. Gates have the dtype of x, and x at most 32 bits.
    """
    found: dict[Function, None] = dict.fromkeys(_TASKS)
    for x, y in product(dtypes.FLOATS, dtypes.FLOATS):
        found[("cancelled", x, y)] = None
        for options in ((), ("other",), ("mask",)):
            found[Key("backward", x, y, options=options).function] = None
    for call, parameter in _calls():
        for mask, other, bias in product((False, True), repeat=3):
            found[kernel_key("forward", call, mask, other, bias).function] = None
        if "float64" in (call.x, call.result):
            continue
        for function, position in _GATES:
            variant = call.variant.replace(gate_function=function, gate_position=position)
            gated = _resolved(variant, call.x, parameter, call.x)
            for kind in KINDS:
                found[kernel_key(kind, gated, False, False, False, call.x).function] = None
    return list(found)


def _calls() -> Iterator[tuple[Call, str | None]]:
    """A call for every kernel, and the dtype of its gain."""
    seen = set()
    for variant, x in product(PRESETS.values(), dtypes.FLOATS):
        for parameter in dict.fromkeys((None, x, "float32")):
            call = _resolved(variant, x, parameter, None)
            formats = call.x, call.result, call.norm, call.product if call.norm else None
            if formats not in seen:
                seen.add(formats)
                yield call, parameter


def _resolved(variant: Variant, x: str, parameter: str | None, gate: str | None) -> Call:
    spec = None if parameter is None else Spec((8,), parameter)
    gated = None if gate is None else Spec((4, 8), gate)
    return resolve("build", Spec((4, 8), x), spec, variant=variant, gate=gated)


def build(level: str, folder: Path | None = None, only: Collection[str] = ()) -> Path:
    """Writes the library of a level, whole or with some functions, by as many processes as there are cores.

    Raises:
        RuntimeError: a function cannot be compiled, or the linker failed. They say why on the screen.
        ValueError: there is no function of a name in ``only``.
    """
    names = {name_of(*row): row for row in functions()}
    for name in only:
        if name not in names:
            raise errors.not_a_choice("build", "only", name, names)
    path, count = (folder or Path(__file__).parent) / library_name(level), os.cpu_count() or 1
    numba = dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), target.of_level(level), strict=True))
    environment = {**os.environ, **numba, "RMSNORM_BUILD_LEVEL": level}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / _TODO).write_text(json.dumps([names[name] for name in only or names]))
        command = [sys.executable, "-m", "rmsnorm.cpu.build", "--objects", str(scratch), str(count)]
        running = [subprocess.Popen([*command, str(part)], env=environment) for part in range(count)]
        states = [process.wait() for process in running]
        objects, made = sorted(map(str, scratch.glob("*.o"))), scratch / path.name
        (scratch / "linked").write_text("\n".join(objects))
        linking = [*_linker(), "-shared", "-s", "-o", str(made), f"@{scratch / 'linked'}", "-lm"]
        if any(states) or subprocess.run(linking, check=False).returncode:
            raise RuntimeError(f"build: the library for {level} was not made; what is above says why")
        shutil.move(made, path)
    return path


def _linker() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    return [sys.executable, "-m", "ziglang", "cc"]


def _write_objects(folder: Path, count: int, part: int) -> None:
    """A process's part of the object files."""
    from rmsnorm.cpu import compiler

    todo = json.loads((folder / _TODO).read_text())
    for index, row in list(enumerate(todo))[part::count]:
        code = compiler.object_of(symbol(name_of(*row)), partial(described, *row), table.ctypes.data)
        (folder / f"{index}.o").write_bytes(code)
    if part == 0:
        (folder / "table.o").write_bytes(compiler.table_object(WORDS, mark()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", nargs="?", choices=list(target.LEVELS), help="by default the best of this processor")
    parser.add_argument("folder", nargs="?", type=Path, help="by default where the package looks")
    parser.add_argument("--only", action="append", default=[], help="a function, by its name in --list; repeatable")
    parser.add_argument("--list", action="store_true", help="print the names of all functions")
    parser.add_argument("--objects", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.objects:
        _write_objects(Path(chosen.objects[0]), *map(int, chosen.objects[1:]))
    elif chosen.list:
        print("\n".join(name_of(*row) for row in functions()))
    else:
        level = chosen.level or next(iter(target.levels()), None)
        if level is None:
            parser.error(f"this processor has none of the levels {', '.join(target.LEVELS)}; name one")
        print(build(level, chosen.folder, chosen.only))


if __name__ == "__main__":
    main()
