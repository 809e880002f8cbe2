"""Follows a process of its own for each backend: it writes a JSON object a line, and may crash, hang or be absent."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Worker:
    """How a worker fares: ``running``, what it says of itself at the end, ``crashed`` or ``hung``."""

    name: str
    status: str = "running"
    message: str = ""
    version: str = ""
    device: str = ""
    seconds: float = 0.0


def follow(
    worker: Worker,
    command: Sequence[str],
    take: Callable[[Mapping[str, Any]], None],
    *,
    patience: float,
    progress: Callable[[], str],
) -> None:
    """Run the command of a worker to its end; it is killed where it says nothing for so many seconds.

    ``hello`` and ``status`` go to the worker, and every message to ``take``; ``progress`` says how far it came.
    """
    began = time.monotonic()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)

        def read() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            while (line := lines.get(timeout=patience)) is not None:
                message = _message(line)
                if "hello" in message:
                    worker.version, worker.device = message["hello"], message["device"]
                elif "status" in message:
                    worker.status, worker.message = message["status"], message.get("message", "")
                worker.seconds = time.monotonic() - began
                take(message)
            code = process.wait(timeout=patience)
            if worker.status == "running":
                errors.seek(0)
                said = [entry.strip() for entry in errors if entry.strip()]
                reason = f"signal {-code}" if code < 0 else f"exit status {code}"
                worker.status, worker.message = "crashed", f"{reason}; {said[-1] if said else 'it said nothing'}"
        except (queue.Empty, subprocess.TimeoutExpired):
            worker.status, worker.message = "hung", f"no word in {patience:g} s after {progress()}"
        finally:
            process.kill()
            process.wait()
            reader.join(timeout=patience)
            if process.stdout is not None and not reader.is_alive():  # a process of its own may hold the pipe
                process.stdout.close()
            worker.seconds = time.monotonic() - began


def _message(line: str) -> Mapping[str, Any]:
    """Nothing for a framework's own chatter."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
