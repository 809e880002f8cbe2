"""What Dynamo, the front of torch.compile, must know of functions here, without its import, which takes a second.

@in_graph       the function is one node of the graph; nothing in it is traced
@constant       the function is called while a graph is traced, and its result is a constant there
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
    _once_imported(lambda: torch.compiler.allow_in_graph(function))
    return function


def constant(function: F) -> F:
    _once_imported(lambda: torch.compiler.assume_constant_result(function))
    return function


def _once_imported(register: Callable[[], Any]) -> None:
    if _NAME in sys.modules:
        register()
        return
    if not _WAITING:
        sys.meta_path.insert(0, _Finder())
    _WAITING.append(register)


_WAITING: Final[list[Callable[[], Any]]] = []


class _Finder(MetaPathFinder):
    """Finds Dynamo as it would be found without this, and calls what waits for it when it is there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:  # until then: somebody may only ask whether Dynamo is there
                    sys.meta_path.remove(self)
                while _WAITING:
                    _WAITING.pop()()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
