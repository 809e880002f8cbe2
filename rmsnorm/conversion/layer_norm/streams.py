"""Which LayerNorms of a graph can do without the mean, and which weights are to be centred for that.

With P = I - 11'/n, which takes the mean over n features away, LayerNorm(a) = LayerNorm(P a) = RMSNorm(P a), with the
same gain, offset and eps. A value a can become P a if every operation that knows it agrees:

    what makes it is linear in a weight or in other values:  P (x W + b) = x (W P) + P b,  P (a + c) = P a + P c,
                                                             P (a s) = (P a) s for a factor s that all features share
    what reads it either does not see the mean,              LayerNorm(P a) = LayerNorm(a)
    or passes it on in the same way, and its result becomes P of itself, too.

So values that sums, factors and moves connect are centred together or not at all: a stream, such as the residual stream
of a Transformer. It is centred if it ends, backwards, in parameters alone, and forwards in LayerNorms alone. It is not
where it meets the model's input or output, a nonlinearity, a matrix that reads it, or a parameter with another use.

A LayerNorm writes to a stream where norms follow the sums, as in BERT. The mean of its output diag(g) x^ + b is
g'x^/n + mean(b), which no weight takes away, but for equal gains, where g'x^ = 0 and only b is to be centred. If it is
centred already, the output stays what it is, whoever else reads it.

A parameter is a value as others are, so that a tied weight is seen by all that read it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

Axes = frozenset[int]


class Stop(Exception):
    """Why a value cannot be centred."""


@dataclass(eq=False)
class Value:
    """A floating-point array of the graph.

    Attributes:
        shape: of the sample.
        name: for a leaf, what it is.
        parameter: its name, where it is one that can be changed; ``obstacle`` says why a leaf is none.
        is_output: whether the model gives it to its caller.
    """

    shape: tuple[int, ...]
    name: str = ""
    parameter: str | None = None
    obstacle: str = ""
    is_output: bool = False
    producer: Node | None = None
    readers: list[Node] = field(default_factory=list)

    def __str__(self) -> str:
        return self.name or f"the result of {self.producer}"


State = tuple[Value, Axes]
Rule = Callable[[Value, Axes], list[State]]


class Norm(NamedTuple):
    """A LayerNorm over ``axes`` of the first input of its node, which has one output.

    Attributes:
        constant: whether all its gains are equal.
    """

    layer: str
    axes: Axes
    constant: bool
    bias: Value | None
    bias_is_centred: bool


@dataclass(eq=False)
class Node:
    """An operation on the floating-point ``inputs``; its rule gives what has to be centred so that an output is."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    rule: Rule | None = None
    norm: Norm | None = None

    def __post_init__(self) -> None:
        for value in self.outputs:
            value.producer = self
        for value in dict.fromkeys(self.inputs):
            value.readers.append(self)

    def __str__(self) -> str:
        return self.name

    def needs(self, output: Value, axes: Axes) -> list[State]:
        try:
            if self.norm is not None:
                return _needs_of_norm(self.norm, output, axes)
            if self.rule is None:
                raise Stop("is not linear" if self.inputs else "is in no weight")
            return self.rule(output, axes)
        except Stop as stop:
            raise Stop(f"{self} {stop}") from None


class Operand(NamedTuple):
    """One factor of a term: along which of its axes the axes of the result run, and whether the term is linear in it.

    What is not a value of the graph, such as a mask, is a None that runs along axes.
    """

    value: Value | None
    along: Mapping[int, int]
    linear: bool = True


def spread(value: Value | None, shape: Sequence[int], onto: Sequence[int], linear: bool = True) -> Operand:
    """An array as it is broadcast onto a shape."""
    lead = len(onto) - len(shape)
    return Operand(value, {lead + axis: axis for axis, size in enumerate(shape) if size > 1}, linear)


def sum_of(*terms: Iterable[Operand]) -> Rule:
    """A sum of products, each linear in its factors."""
    held = [list(term) for term in terms]

    def rule(output: Value, axes: Axes) -> list[State]:
        return [_carrier(term, axes) for term in held]

    return rule


def _carrier(term: list[Operand], axes: Axes) -> State:
    along = [operand for operand in term if axes & operand.along.keys()]
    if not along:
        raise Stop("adds the same to every feature")
    if len(along) > 1:
        raise Stop("multiplies features by different factors")
    value, axis_of, linear = along[0]
    if not linear or not axes <= axis_of.keys():
        raise Stop("is not linear")
    if value is None:
        raise Stop("takes features from an array that is not floating-point")
    return value, frozenset(axis_of[axis] for axis in axes)


def moved(inputs: Sequence[Value], move: Callable[[list[np.ndarray]], Sequence[np.ndarray]]) -> Rule:
    """An operation that only moves elements: what ``move`` makes of their numbers says where, for each output."""
    starts = np.cumsum([0, *(math.prod(value.shape) for value in inputs)])
    found: list[np.ndarray] = []  # for all that ask

    def rule(output: Value, axes: Axes) -> list[State]:
        if not found:
            sizes = zip(starts, inputs, strict=False)
            found.extend(move([start + np.arange(math.prod(v.shape)).reshape(v.shape) for start, v in sizes]))
        numbers = found[output.producer.outputs.index(output)] if output.producer else found[0]
        rows = np.moveaxis(numbers, sorted(axes), range(-len(axes), 0)).reshape(-1, _size(output, axes))
        owner = np.searchsorted(starts, rows, side="right") - 1
        states = []
        for index, value in enumerate(inputs):
            mine = owner[:, 0] == index
            if (owner[mine] != index).any() or (owner[~mine] == index).any():
                raise Stop("joins features of several values")
            if mine.any():
                states.append((value, _source(value, rows[mine] - starts[index])))
        return states

    return rule


def _source(value: Value, rows: np.ndarray) -> Axes:
    """The axes of the value such that each row holds all elements along them, in whatever order, and no other."""
    places = np.stack(np.unravel_index(rows, value.shape))  # (axis, row, feature)
    axes = frozenset(np.flatnonzero((places != places[:, :, :1]).any(axis=(1, 2))).tolist())
    still = [axis for axis in range(len(value.shape)) if axis not in axes]
    ordered = np.sort(rows, axis=1)
    if (
        _size(value, axes) != rows.shape[1]
        or (places[still] != places[still][:, :, :1]).any()
        or (ordered[:, 1:] == ordered[:, :-1]).any()
    ):
        raise Stop("takes some of the features, or repeats them")
    return axes


def _needs_of_norm(norm: Norm, output: Value, axes: Axes) -> list[State]:
    if axes != norm.axes:
        raise Stop("is not linear")
    if not norm.constant:
        raise Stop("has gains that differ, so that the mean of its output is in no weight")
    if norm.bias is None or norm.bias_is_centred:
        return []
    return [(norm.bias, frozenset(axis for axis, size in enumerate(norm.bias.shape) if size > 1))]


@dataclass
class Stream:
    """Values that are centred together: the parameters among them, with axes, or why that cannot be."""

    axes: dict[Value, Axes] = field(default_factory=dict)
    obstacle: str = ""

    @property
    def parameters(self) -> Iterator[tuple[str, Axes]]:
        return ((value.parameter, axes) for value, axes in self.axes.items() if value.parameter is not None)


def find_stream(start: State) -> Stream:
    """Everything that is centred if ``start`` is."""
    stream, pending = Stream(), [start]
    try:
        if not start[1]:
            raise Stop("it normalizes a single feature")
        while pending:
            value, axes = pending.pop()
            if value in stream.axes:
                if stream.axes[value] != axes:
                    raise Stop(f"{value} would be centred over several axes")
                continue
            stream.axes[value] = axes
            if _is_centred(value, axes):
                continue
            if value.is_output:
                raise Stop(f"{value} is an output of the model, too")
            if value.producer is not None:
                pending += value.producer.needs(value, axes)
            elif value.parameter is None:
                raise Stop(f"{value} {value.obstacle}")
            for reader in value.readers:
                pending += _passed_on(reader, value, axes)
    except Stop as stop:
        stream.obstacle = str(stop)
    return stream


def _is_centred(value: Value, axes: Axes) -> bool:
    """Whether it is of mean zero whatever is done, so that no reader sees a difference."""
    node = value.producer
    if node is None or node.norm is None or value is not node.outputs[0]:
        return False
    return axes == node.norm.axes and node.norm.constant and (node.norm.bias is None or node.norm.bias_is_centred)


def _passed_on(reader: Node, value: Value, axes: Axes) -> list[State]:
    """The outputs of a reader that are centred if the value is."""
    if reader.norm is not None and value is reader.inputs[0] and reader.inputs.count(value) == 1:
        if axes == reader.norm.axes:
            return []
        raise Stop(f"{reader} normalizes other axes of {value}")
    wanted = [(value, axes)] * reader.inputs.count(value)
    found = []
    for output in reader.outputs:
        for candidate in _choices(output, _size(value, axes)):
            with contextlib.suppress(Stop):
                if [state for state in reader.needs(output, candidate) if state[0] is value] == wanted:
                    found.append((output, candidate))
                    break
    if not found or len(found) < len(reader.outputs):
        raise Stop(f"{reader} reads {value}, too")
    return found


def _choices(value: Value, size: int) -> Iterator[Axes]:
    """Sets of axes along which there are that many elements."""
    wide = [axis for axis, each in enumerate(value.shape) if each > 1]
    for count in range(1, len(wide) + 1):
        yield from (axes for axes in map(frozenset, combinations(wide, count)) if _size(value, axes) == size)


def _size(value: Value, axes: Axes) -> int:
    return math.prod(value.shape[axis] for axis in axes)


@dataclass(frozen=True)
class Plan:
    """What to do: the layers that become RMSNorm, with the parameters of their streams; and why others do not."""

    converted: Mapping[str, Sequence[str]]
    centred: Mapping[str, Axes]
    left: Mapping[str, str]
    values: frozenset[Value]


def plan(nodes: Iterable[Node], obstacles: Mapping[str, str]) -> Plan:
    """Convert every layer all of whose calls read a stream that can be centred.

    Args:
        nodes: of the graph, all.
        obstacles: why a layer cannot be replaced, whatever it reads.
    """
    streams: dict[str, list[Stream]] = {}
    whole: dict[State, Stream] = {}
    for node in nodes:
        norm = node.norm
        if norm is None:
            continue
        start = (node.inputs[0], norm.axes)
        if start not in whole:
            stream = find_stream(start)
            whole[start] = stream
            if not stream.obstacle:
                whole |= dict.fromkeys(stream.axes.items(), stream)
        streams.setdefault(norm.layer, []).append(whole[start])
    left = dict(obstacles)
    for layer, read in streams.items():
        obstacle = next((stream.obstacle for stream in read if stream.obstacle), None)
        if obstacle is not None:
            left.setdefault(layer, obstacle)
    converted = {layer: read for layer, read in streams.items() if layer not in left}
    used = [stream for read in converted.values() for stream in read]
    return Plan(
        {
            layer: list(dict.fromkeys(key for stream in read for key, _ in stream.parameters))
            for layer, read in converted.items()
        },
        {key: axes for stream in used for key, axes in stream.parameters},
        left,
        frozenset(value for stream in used for value in stream.axes),
    )
