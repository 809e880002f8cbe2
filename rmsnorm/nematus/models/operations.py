"""The operations that the models are written with: what a framework's module of operations must have.

What Python's operators and indices do is the same in all frameworks and is not here. A shape may hold numbers that are
known only when a graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

Array: TypeAlias = Any
Arrays: TypeAlias = tuple[Array, ...]
Step: TypeAlias = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]


class Operations(Protocol):
    """A module with these functions; operations on elements have their usual names."""

    tanh: Callable[[Array], Array]
    sigmoid: Callable[[Array], Array]
    relu: Callable[[Array], Array]

    def shape(self, x: Array, /) -> Sequence[Any]: ...
    def rows(self, x: Array, indices: Any, /) -> Array: ...  # of these indices, which are NumPy's
    def where(self, condition: Array, x: Array, other: float, /) -> Array: ...
    def concatenated(self, arrays: Sequence[Array], axis: int, /) -> Array: ...
    def split(self, x: Array, parts: int, /) -> Sequence[Array]: ...  # equal parts of the last axis
    def repeated(self, x: Array, times: int, axis: int, /) -> Array: ...  # each entry so many times, one after another
    def sum(self, x: Array, axis: int, /, *, keepdims: bool = False) -> Array: ...
    def softmax(self, x: Array, axis: int, /) -> Array: ...
    def logsumexp(self, x: Array, axis: int, /) -> Array: ...
    def log_softmax(self, x: Array) -> Array: ...  # over the last axis, in at least float32
    def reshape(self, x: Array, shape: Sequence[Any], /) -> Array: ...
    def transposed(self, x: Array, /) -> Array: ...  # the last two axes in the other order
    def swapped(self, x: Array, /) -> Array: ...  # the second and the third of four axes in the other order
    def to_host(self, x: Array, /) -> Any: ...  # as an array of NumPy
    def as_ids(self, ids: Any, like: Array) -> Array: ...  # of NumPy or of the framework, beside a parameter
    def cast(self, x: Any, like: Array) -> Array: ...  # an array of NumPy or of the framework
    def filled(self, shape: Sequence[Any], value: float, like: Array) -> Array: ...
    def take(self, table: Array, ids: Array) -> Array: ...  # rows of a table; an id below 0 gives row 0
    def picked(self, x: Array, ids: Array, /) -> Array: ...  # of the last axis the entry with this id, of three axes
    def rms_norm(
        self, x: Array, gain: Array, offset: Array | None, /, *, eps: float, partial: float | None
    ) -> Array: ...
    def layer_norm(self, x: Array, gain: Array, offset: Array | None, eps: float) -> Array: ...

    @property
    def cached(self) -> Callable[..., Array] | None:
        """The cache with what follows the first words, of a cache, new entries and the number of words.

        None where caches grow; else they have their full length from the start, as where shapes must be known.
        """

    @property
    def attention(self) -> Callable[..., Array] | None:
        """softmax(q k^T / sqrt(d) + bias) v of q, k, v, bias, rate and random; of the weights a share is dropped.

        None where the framework has it not as one operation.
        """

    def matmul(self, x: Array, w: Array) -> Array:
        """x w, in the full precision of their dtype; w is one matrix, or as many as x has."""

    def dropout(self, x: Array, rate: float, random: Any) -> Array:
        """x without some of its features, and scaled. ``random``: where from."""

    def positions(self, start: Any, count: Any, length: Any, size: int, like: Array) -> Array:
        """sin(t w_i), then cos(t w_i), for t from ``start`` on; zeros if size is odd. At most ``length`` in all.

        w goes from 1 to 1/10000 in equal ratios.
        """

    def future(self, start: Any, count: Any, length: Any, score: float, like: Array) -> Array:
        """What is added to the scores (count, length) of words from ``start`` on: a score where a key comes later."""

    def checked(self, check: Callable[..., Any], ids: Any, mask: Any) -> Any:
        """What ``check(ids, mask)`` returns; ids and mask themselves while a compiler or a tracer is at work.

        Then they have no values to check.
        """

    def scan(
        self, step: Step, state: Arrays, inputs: Arrays, others: Arrays = (), *, reverse: bool = False
    ) -> tuple[Arrays, Arrays]:
        """The states after each step, and what else the steps return, along the first axis of the inputs.

        others: arrays with the shapes and dtypes of what else a step returns.
        """


def looped(
    stack: Callable[[Sequence[Array]], Array], step: Step, state: Arrays, inputs: Arrays, others: Arrays = (),
    *, reverse: bool = False,
) -> tuple[Arrays, Arrays]:  # fmt: skip
    """The scan of a framework whose loops are those of Python; its arrays are iterated over and stacked."""
    steps, kept, first = list(zip(*inputs, strict=True)), [], state
    for at_step in reversed(steps) if reverse else steps:
        state, more = step(state, at_step)
        kept.append((*state, *more))
    if not kept:
        return tuple(part[None][:0] for part in first), tuple(part[None][:0] for part in others)
    stacked = [stack(column[:: -1 if reverse else 1]) for column in zip(*kept, strict=True)]
    return tuple(stacked[: len(first)]), tuple(stacked[len(first) :])
