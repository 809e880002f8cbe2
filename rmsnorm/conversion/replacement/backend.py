"""What a framework does in its own way with modules that may be replaced, and what is the same in all frameworks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import Proof


class Backend:
    """The modules of a framework.

    Attributes:
        package: how the names of the framework's own files begin.
        call: the method that a call of a module runs.
        passed: arguments of it that the framework passes; they were tried.
        modules: each module of a model once, with its name.
        is_replaced: whether a module is one of rmsnorm.
        tensors: the names of its parameters and buffers.
        has_inner: whether there are modules inside.
        prove: what a module computes; raises Unproven if it must stay as it is.
        key_of: a key that is equal for modules that differ only in the values of their parameters.
        become: turns a module into one of rmsnorm; it stays the same object, with the same parameters and attributes.
    """

    package: ClassVar[str]
    call: ClassVar[str]
    passed: ClassVar[tuple[str, ...]] = ()
    modules: Callable[[Any], Iterable[tuple[str, Any]]]
    is_replaced: Callable[[Any], bool]
    tensors: Callable[[Any], list[str]]
    has_inner: Callable[[Any], bool]
    prove: Callable[[Any], Proof]
    key_of: Callable[[Any], Any]
    become: Callable[[Any, Norm], None]

    def require_as_proven(self, module: Any, norm: Norm) -> None:
        """Raises Unproven if a module computes something else than the one with its key; a copy never does."""

    def finish(self, model: Any) -> None:
        """What is left to do in a model when its modules have changed."""

    def is_candidate(self, module: Any) -> bool:
        """Whether a module may be a norm: by its name, or as it has a gain at most and is not the framework's own."""
        small = self._is_foreign(module) and 1 <= len(self.tensors(module)) <= 2
        return small or "norm" in type(module).__name__.lower()

    def may_be_layer_norm(self, module: Any) -> bool:
        """Whether a module may be a LayerNorm of another class than the framework's."""
        plain = self._is_foreign(module) and self.call not in vars(module)
        return plain and not self.is_replaced(module) and self.is_candidate(module)

    def others(self, module: Any) -> list[str]:
        """What the call takes beside x."""
        names = list(inspect.signature(getattr(module, self.call)).parameters)[1:]
        return [name for name in names if name not in self.passed]

    def _is_foreign(self, module: Any) -> bool:
        return not type(module).__module__.startswith(self.package) and not self.has_inner(module)
