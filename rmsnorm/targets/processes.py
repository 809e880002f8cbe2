"""Worker processes, each of which calls one function. If one crashes or hangs, the others continue.

``call`` is the parent's side. ``answer`` is the worker's: it reads a job as JSON from its standard input, calls the
function, and writes JSON objects, one on a line: the messages of the function, then its result.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rmsnorm.specification.errors import InputError

_READER_END: Final = 10.0  # seconds; the reader takes so long only where a child of the process has the pipe open
_PARENT: Final = "RMSNORM_PARENT"
_PR_SET_PDEATHSIG: Final = 1  # of prctl
_POLL: Final = 1.0  # seconds
_FOLDER: Final = str(Path(__file__).resolve().parents[2])  # of this package
_PROGRAM: Final = f"import sys; sys.path.append({_FOLDER!r}); from rmsnorm.targets.processes import answer; answer()"


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a worker that writes to a pipe, in a group of its own: Ctrl-C in a terminal is for this process alone."""
    environment = {**os.environ, _PARENT: str(os.getpid())}
    begin = partial(
        subprocess.Popen, command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, **options
    )
    return _starter(os.getpid()).submit(begin).result()


@lru_cache(maxsize=1)
def _starter(_: int) -> ThreadPoolExecutor:
    """A thread of this process that ends with it: to Linux the parent of a process is the thread that started it."""
    return ThreadPoolExecutor(1)


def end_with_parent() -> None:
    """End this worker when the process that started it ends, however that ends.

    Linux sends SIGKILL; elsewhere a thread looks once a second, which code that keeps Python's lock can delay.
    """
    parent = int(os.environ.pop(_PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os._exit(1)

    if sys.platform != "win32":
        threading.Thread(target=watch, daemon=True).start()


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
                load(module)

            spec.loader.exec_module = triton_first  # type: ignore[method-assign]
        return spec


def import_triton_before_tensorflow() -> None:
    """Let whatever imports TensorFlow in this process import Triton first, where that is installed.

    Both have LLVM in them, and Triton ends a process that has imported TensorFlow: "LLVM ERROR: inconsistency in
    registered CommandLine options". The other order works. torch.compile and torch.utils.flop_counter import Triton.
    """
    if _TritonFirst not in sys.meta_path:
        sys.meta_path.insert(0, _TritonFirst)


def messenger() -> Callable[..., None]:
    """The function of this worker that writes a message. It is the only one that writes to the pipe.

    Whatever else is printed, also by code that is not Python, goes to standard error. A message ``mistake`` is the
    text of an error of this package, which the process that started this one raises.
    """
    end_with_parent()
    import_triton_before_tensorflow()
    out, lock = os.fdopen(os.dup(1), "w"), threading.Lock()
    os.dup2(2, 1)
    out.write("\n")  # something may have been printed before, without an end of its line

    def write(**message: Any) -> None:
        with lock:
            print(json.dumps(message, default=float), file=out, flush=True)

    return write


def answer() -> None:
    """The program of a worker that ``call`` starts."""
    job, write = json.load(sys.stdin), messenger()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    module, _, name = sys.argv[1].partition(":")
    try:
        result = getattr(import_module(module), name)(job, write)
    except InputError as error:
        write(status="refused", message=str(error))
    except Exception:
        write(mistake=traceback.format_exc())
    else:
        write(result=result)


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
    """Let SIGTERM and SIGHUP end this process as an exception does: unfinished files are removed, workers are ended."""

    def end(number: int, _: Any) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, end)


@contextlib.contextmanager
def reading(process: subprocess.Popen[str]) -> Iterator[Callable[[float], str | None]]:
    """Read the output of a process by lines, and kill the process at the end of the block.

    The value is a function of a number of seconds: it returns the next line, None at the end of the output, and raises
    queue.Empty where there is no line in that time. A process that leads a group (start_new_session) is killed with it.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield lambda seconds: lines.get(timeout=min(seconds, threading.TIMEOUT_MAX))
    finally:
        if sys.platform != "win32" and process.poll() is None and os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        reader.join(timeout=_READER_END)
        if process.stdout is not None and not reader.is_alive():
            process.stdout.close()


@dataclass
class Worker:
    """A worker. Its status is ``running``; at the end it is what it reports, ``crashed``, ``hung`` or ``stopped``.

    Of the messages with ``records`` it is ``asked`` for so many, and ``results`` came. One that says it is done has
    crashed where the numbers differ.
    """

    name: str
    status: str = "running"
    message: str = ""
    version: str = ""
    device: str = ""
    seconds: float = 0.0
    asked: int = 0
    results: int = 0


def call(worker: Worker, function: str, job: Any, *, patience: float) -> Iterator[Mapping[str, Any]]:
    """Calls ``module:function`` in a process of its own, and yields its messages. The last one has its ``result``.

    Without a result, the process ended before: the worker says how. Ctrl-C ends it, and then it is ``stopped``.

    function: called with the job and with a function that writes a message. An InputError of it is ``refused``, and
        another exception is raised as a RuntimeError with its text: a mistake of this package.
    job, result: values that JSON has.
    patience: as of ``messages``.

    It looks for modules where an installed program does, and not in the current folder (``look_in_current_folder``).
    """
    command = [sys.executable, "-P", "-c", _PROGRAM, function]
    try:
        yield from messages(worker, command, patience=patience, job=job)
    except KeyboardInterrupt:
        stop(worker)


def messages(
    worker: Worker, command: Sequence[str], *, patience: float, job: Any = None
) -> Iterator[Mapping[str, Any]]:
    """Runs the command of a worker, and yields its messages to its end; it is killed where the caller stops before.

    Messages with ``hello`` or ``status`` also set the fields of the worker. One that writes anything else after its
    first message has crashed.

    patience: seconds of silence after which it is killed, and has hung; a message with ``patience`` sets it anew, and
        says in ``doing`` what may take so long.
    job: written to its standard input as JSON.
    """
    began, began_to_speak, doing = time.monotonic(), False, "its start"
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = start(command, stderr=errors, stdin=None if job is None else subprocess.PIPE)
        try:
            with reading(process) as next_line:
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # its end says what went wrong
                        json.dump(job, pipe)
                while (line := next_line(patience)) is not None:
                    message = _message(line)
                    if message is None:
                        if began_to_speak and line.endswith("\n"):
                            worker.status, worker.message = "crashed", f"a result cannot be read: {line.strip()[:80]}"
                            break
                        continue
                    began_to_speak = True
                    patience, doing = message.get("patience", patience), message.get("doing", doing)
                    if "mistake" in message:
                        raise RuntimeError(message["mistake"])
                    worker.results += "records" in message
                    if "hello" in message:
                        worker.version, worker.device = message["hello"], message["device"]
                    elif "status" in message or ("result" in message and worker.status == "running"):
                        worker.status, worker.message = message.get("status", "done"), message.get("message", "")
                        if worker.status == "done" and worker.results != worker.asked:
                            lost = f"{worker.results} results came, expected {worker.asked}"
                            worker.status, worker.message = "crashed", lost
                    worker.seconds = time.monotonic() - began
                    yield message
                else:
                    code = process.wait(timeout=min(patience, threading.TIMEOUT_MAX))
            if worker.status == "running":
                errors.seek(0)
                printed = [line.strip() for line in errors if line.strip()]
                reason = f"signal {-code}" if code < 0 else f"exit status {code}"
                worker.status, worker.message = "crashed", f"{reason}; {printed[-1] if printed else 'no output'}"
        except (queue.Empty, subprocess.TimeoutExpired):
            worker.status, worker.message = "hung", f"{doing} took more than {patience:g} s"
        finally:
            worker.seconds = time.monotonic() - began


def stop(worker: Worker) -> None:
    """The status of a worker that Ctrl-C ended before its end."""
    worker.status, worker.message = "stopped", "by Ctrl-C"


def _message(line: str) -> Mapping[str, Any] | None:
    """The JSON object on a line; None if the line is something else."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
