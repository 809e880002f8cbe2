"""A command in a process of its own: a target that crashes, hangs or prints harms neither its report nor its status."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

LIMIT: Final = 3600.0  # seconds; a check in JAX of every case takes minutes
_ENDED: Final = "RMSNORM_ENDED"  # names the file in which the process writes its exit status at its end
_PR_SET_PDEATHSIG: Final = 1  # of prctl
_FOLDER: Final = str(Path(__file__).resolve().parents[2])  # of this package
# modules are looked for where an installed program does, and not in the current folder
_PROGRAM: Final = f"import sys; sys.path.append({_FOLDER!r}); from rmsnorm.cli import main; main()"
_ROLE: Final[ContextVar[Literal["", "parent", "child"]]] = ContextVar("role", default="")


class Ended(NamedTuple):
    """How a process ended: its exit status and what it printed; or what a report says, where it came to no end.

    Attributes:
        code: its exit status.
        printed: its standard output, where that was asked for.
        status: empty, or what a report says in place of an exit status: crashed or hung.
        message: how it ended, in a sentence, where it is crashed or hung.
    """

    code: int = 0
    printed: str = ""
    status: Literal["", "crashed", "hung"] = ""
    message: str = ""


def is_parent() -> bool:
    """Whether this process is a command that shall start another one for its work, with ``run``.

    It is so only below ``main``: in Python and in tests a command works in the process that calls it.
    """
    return _ROLE.get() == "parent"


def is_child() -> bool:
    """Whether this process was started by ``run``."""
    return _ROLE.get() == "child"


def run(arguments: Sequence[str], *, seconds: float = LIMIT, printed: bool = False) -> Ended:
    """Run ``rmsnorm`` with these arguments in a process of its own, for so many seconds at most.

    Ctrl-C in a terminal is for this process alone, which then ends the other one. ``printed``: its standard output is
    in the result, else both share one.
    """
    with tempfile.TemporaryDirectory() as folder:
        end = Path(folder) / "status"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-c", _PROGRAM, *arguments], stdout=subprocess.PIPE if printed else None,
                encoding="utf-8", env={**os.environ, _ENDED: str(end)}, start_new_session=True,
                timeout=seconds if seconds < threading.TIMEOUT_MAX else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Ended(status="hung", message=f"its process did not answer within {seconds:g} seconds")
        if end.is_file():  # a framework may also crash after that
            return Ended(int(end.read_text()), done.stdout or "")
    name = next((number.name for number in signal.Signals if number == -done.returncode), "")
    how = f"was ended by {name}" if name else f"ended with exit status {done.returncode}"
    return Ended(status="crashed", message=f"its process {how}")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """The block in which a command runs. Where ``run`` started this process, it gets the exit status that ends it.

    What a target prints there, also by code that is not Python, goes to standard error.
    """
    end = os.environ.pop(_ENDED, "")
    _ROLE.set("child" if end else "parent")
    if not end:
        yield
        return
    if sys.platform == "linux":  # this process ends with its parent, however that ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    try:
        yield
    except SystemExit as error:
        Path(end).write_text(str(error.code or 0))
        raise


class _TritonFirst:
    """A finder of modules that lets the import of TensorFlow import Triton first."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name == "tensorflow" else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def triton_first(module: Any) -> None:
                with contextlib.suppress(ImportError, OSError):  # it is not installed, or it does not load
                    import_module("triton")
                kept = os.dup(2)  # no setting of TensorFlow makes its import silent: it writes before it reads them
                with open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), 2)
                try:
                    load(module)
                finally:
                    os.dup2(kept, 2)
                    os.close(kept)

            spec.loader.exec_module = triton_first  # type: ignore[method-assign]
        return spec


def import_triton_before_tensorflow() -> None:
    """Let whatever imports TensorFlow in this process import Triton first, where that is installed.

    Both have LLVM in them, and Triton ends a process that has imported TensorFlow: "LLVM ERROR: inconsistency in
    registered CommandLine options". The other order works. torch.compile and torch.utils.flop_counter import Triton.
    """
    if _TritonFirst not in sys.meta_path:
        sys.meta_path.insert(0, _TritonFirst)


def look_in_current_folder(target: str) -> None:
    """Look for modules in the current folder first, as ``python -m`` does, if it has the one of module:attribute.

    Otherwise it is left out: whatever lies beside a file of somebody else, such as a json.py, is not run.
    """
    module, colon, _ = target.rpartition(":")
    top, folder = module.partition(".")[0], str(Path.cwd())
    if not (colon and top) or module.endswith(".py") or folder in sys.path:
        return
    own = PathFinder.find_spec(top, [folder])
    if own is not None and (own.origin or find_spec(top) is None):  # a folder without __init__.py hides no package
        sys.path.insert(0, folder)


def end_by_exception() -> None:
    """Let SIGTERM and SIGHUP end this process as an exception does: no unfinished file stays, and no other process."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, end)
