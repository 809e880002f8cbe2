"""What a framework does in its own way with modules that may be replaced, and what is the same in all frameworks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from rmsnorm.conversion.replacement.layout import Norm
from rmsnorm.conversion.replacement.proof import Proof


class Backend(ABC):
    """The modules of a framework.

    Attributes:
        package: how the names of the framework's own files begin.
        call: the method that a call of a module runs.
        passed: arguments of it that the framework passes; they were tried.
    """

    package: ClassVar[str]
    call: ClassVar[str]
    passed: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def modules(self, model: Any) -> Iterable[tuple[str, Any]]:
        """Each module once, with its name."""

    @abstractmethod
    def is_replaced(self, module: Any) -> bool: ...

    @abstractmethod
    def tensors(self, module: Any) -> list[str]:
        """The names of its parameters and buffers."""

    @abstractmethod
    def has_inner(self, module: Any) -> bool:
        """Whether there are modules inside."""

    @abstractmethod
    def prove(self, module: Any) -> Proof:
        """What a module computes. Raises Unproven if it must stay as it is."""

    @abstractmethod
    def key_of(self, module: Any) -> Any:
        """A key that is equal for modules that differ only in the values of their parameters."""

    @abstractmethod
    def become(self, module: Any, norm: Norm) -> None:
        """Turns a module into one of rmsnorm. It stays the same object, with the same parameters and attributes."""

    def require_as_proven(self, module: Any, norm: Norm) -> None:  # noqa: B027
        """Raises Unproven if a module computes something else than the one with its key; a copy never does."""

    def finish(self, model: Any) -> None:  # noqa: B027
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
