"""What Dynamo, the front of torch.compile, must know of functions here, without its import, which takes a second.

@in_graph       the function is one node of the graph; nothing in it is traced
@constant       the function is called while a graph is traced, and its result is a constant there
@untraced       the function and all it calls run as they are, also in a program that could not be traced as a whole
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_NAME: Final = "torch._dynamo"


def in_graph(function: F) -> F:
    once_imported(_NAME, lambda: torch.compiler.allow_in_graph(function))
    return function


def constant(function: F) -> F:
    once_imported(_NAME, lambda: torch.compiler.assume_constant_result(function))
    return function


def untraced(function: F) -> F:
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def once_imported(name: str, register: Callable[[], Any]) -> None:
    """Call a function when a module is imported, or now if it already is."""
    if name in sys.modules:
        register()
        return
    if not _WAITING:
        sys.meta_path.insert(0, _Finder())
    _WAITING.setdefault(name, []).append(register)


_WAITING: Final[dict[str, list[Callable[[], Any]]]] = {}


class _Finder(MetaPathFinder):
    """Finds a module as it would be found without this, and calls what waits for it when it is there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _WAITING:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for register in _WAITING.pop(name, ()):  # not before: somebody may only ask whether it is there
                    register()
                if not _WAITING and self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
