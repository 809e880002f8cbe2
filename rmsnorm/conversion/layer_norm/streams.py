"""Finds the LayerNorms of a graph that do not need the mean, and the weights that must be centred for that.

P = I - 11'/n subtracts the mean over n features. LayerNorm(v) = LayerNorm(P v) = RMSNorm(P v), with the same gain, bias
and eps. A value v can be replaced by P v if that is right for the operation that makes it and for all that read it:

    The operation that makes v is linear in a weight or in other values:
        P (x W + b) = x (W P) + P b,   P (v + c) = P v + P c,   P (v s) = (P v) s for a factor s that all features share
    An operation that reads v does not see the mean, LayerNorm(P v) = LayerNorm(v),
    or it passes the mean on, so that its own result z becomes P z.

So values that are connected by sums, factors and moves are centred together or not at all. They form a stream, for
example the residual stream of a Transformer. A stream is centred if every path backwards ends in a parameter and every
path forwards ends in a LayerNorm. It is not centred if it meets the model's input or output, a nonlinearity, a matrix
that reads it, or a parameter that is used elsewhere.

A LayerNorm can also write to a stream: where norms follow the sums, as in BERT. With x^ for the normalised input, the
mean of its output diag(g) x^ + b is g'x^/n + mean(b). No weight can remove that, except when all gains are equal: then
g'x^ = 0 and only b must be centred. If b has mean zero already, the output does not change, and other readers do not
matter.

A parameter is a value like the others, so a tied weight has all its readers.
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
        shape: its shape in the run on the sample inputs.
        name: a description; only leaves have one.
        parameter: the name of the parameter, for a leaf that can be changed.
        obstacle: why a leaf cannot be changed.
        is_output: whether the model returns it.
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


class LayerNorm(NamedTuple):
    """A LayerNorm over ``axes`` of the first input of its node. The node has one output.

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
    """An operation on the floating-point ``inputs``. Its rule says which inputs must be centred to centre an output."""

    name: str
    inputs: list[Value]
    outputs: list[Value]
    rule: Rule | None = None
    norm: LayerNorm | None = None

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
    """One factor of a term.

    Attributes:
        value: None for an array that is not a value of the graph, such as a mask.
        along: axis of the result -> the axis of this factor that runs along it.
        linear: whether the term is linear in this factor.
    """

    value: Value | None
    along: Mapping[int, int]
    linear: bool = True


def spread(value: Value | None, shape: Sequence[int], onto: Sequence[int], linear: bool = True) -> Operand:
    """The operand for an array that is broadcast onto a shape."""
    offset = len(onto) - len(shape)
    return Operand(value, {offset + axis: axis for axis, size in enumerate(shape) if size > 1}, linear)


def sum_of(*terms: Iterable[Operand]) -> Rule:
    """The rule of a sum of products of operands."""
    products = [list(term) for term in terms]

    def rule(output: Value, axes: Axes) -> list[State]:
        return [_carrier(term, axes) for term in products]

    return rule


def _carrier(term: list[Operand], axes: Axes) -> State:
    """The factor of the term that carries the features, which is the one to centre."""
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
    """The rule of an operation that only moves elements.

    ``move`` applies the operation to arrays of element numbers; its outputs show where each element goes.
    """
    starts = np.cumsum([0, *(math.prod(value.shape) for value in inputs)])
    moved_numbers: list[np.ndarray] = []  # one array for each output; computed once, at the first call

    def rule(output: Value, axes: Axes) -> list[State]:
        if not moved_numbers:
            sizes = zip(starts, inputs, strict=False)
            moved_numbers.extend(move([start + np.arange(math.prod(v.shape)).reshape(v.shape) for start, v in sizes]))
        numbers = moved_numbers[output.producer.outputs.index(output) if output.producer else 0]
        rows = np.moveaxis(numbers, sorted(axes), range(-len(axes), 0)).reshape(-1, _size(output, axes))
        owner = np.searchsorted(starts, rows, side="right") - 1
        states = []
        for index, value in enumerate(inputs):
            from_value = owner[:, 0] == index
            if (owner[from_value] != index).any() or (owner[~from_value] == index).any():
                raise Stop("joins features of several values")
            if from_value.any():
                states.append((value, _source(value, rows[from_value] - starts[index])))
        return states

    return rule


def _source(value: Value, rows: np.ndarray) -> Axes:
    """The axes of the value such that each row has exactly the elements along them, in any order."""
    indices = np.stack(np.unravel_index(rows, value.shape))  # (axis, row, feature)
    axes = frozenset(np.flatnonzero((indices != indices[:, :, :1]).any(axis=(1, 2))).tolist())
    other_axes = [axis for axis in range(len(value.shape)) if axis not in axes]
    ordered = np.sort(rows, axis=1)
    if (
        _size(value, axes) != rows.shape[1]
        or (indices[other_axes] != indices[other_axes][:, :, :1]).any()
        or (ordered[:, 1:] == ordered[:, :-1]).any()
    ):
        raise Stop("takes some of the features, or repeats them")
    return axes


def _needs_of_norm(norm: LayerNorm, output: Value, axes: Axes) -> list[State]:
    if axes != norm.axes:
        raise Stop("is not linear")
    if not norm.constant:
        raise Stop("has gains that differ, so that the mean of its output is in no weight")
    if norm.bias is None or norm.bias_is_centred:
        return []
    return [(norm.bias, frozenset(axis for axis, size in enumerate(norm.bias.shape) if size > 1))]


@dataclass
class Stream:
    """Values that are centred together, with their axes; or the obstacle because of which they cannot be."""

    axes: dict[Value, Axes] = field(default_factory=dict)
    obstacle: str = ""

    @property
    def parameters(self) -> Iterator[tuple[str, Axes]]:
        return ((value.parameter, axes) for value, axes in self.axes.items() if value.parameter is not None)


def find_stream(start: State) -> Stream:
    """Finds every value that must be centred when ``start`` is centred."""
    stream, pending = Stream(), [start]
    try:
        if not start[1]:
            raise Stop("it normalises a single feature")
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
    """Whether its mean is zero already, so that no reader sees a difference."""
    node = value.producer
    if node is None or node.norm is None or value is not node.outputs[0]:
        return False
    return axes == node.norm.axes and node.norm.constant and (node.norm.bias is None or node.norm.bias_is_centred)


def _passed_on(reader: Node, value: Value, axes: Axes) -> list[State]:
    """The outputs of a reader that become centred when the value is centred."""
    if reader.norm is not None and value is reader.inputs[0] and reader.inputs.count(value) == 1:
        if axes == reader.norm.axes:
            return []
        raise Stop(f"{reader} normalises other axes of {value}")
    wanted = [(value, axes)] * reader.inputs.count(value)
    passed_on = []
    for output in reader.outputs:
        for candidate in _choices(output, _size(value, axes)):
            with contextlib.suppress(Stop):
                if [state for state in reader.needs(output, candidate) if state[0] is value] == wanted:
                    passed_on.append((output, candidate))
                    break
    if not passed_on or len(passed_on) < len(reader.outputs):
        raise Stop(f"{reader} reads {value}, too")
    return passed_on


def _choices(value: Value, size: int) -> Iterator[Axes]:
    """Sets of axes whose sizes multiply to ``size``."""
    wide = [axis for axis, length in enumerate(value.shape) if length > 1]
    for count in range(1, len(wide) + 1):
        yield from (axes for axes in map(frozenset, combinations(wide, count)) if _size(value, axes) == size)


def _size(value: Value, axes: Axes) -> int:
    return math.prod(value.shape[axis] for axis in axes)


@dataclass(frozen=True)
class Plan:
    """What to do with a model.

    Attributes:
        converted: the layers that become RMSNorm, with the names of the parameters of their streams.
        centred: the parameters to centre, and over which axes.
        left: the layers that stay LayerNorm, with the reason.
        values: all values that are centred.
    """

    converted: Mapping[str, Sequence[str]]
    centred: Mapping[str, Axes]
    left: Mapping[str, str]
    values: frozenset[Value]


def make_plan(nodes: Iterable[Node], obstacles: Mapping[str, str]) -> Plan:
    """Plans to convert each layer if every value that it reads, in all its calls, is in a stream that can be centred.

    Args:
        nodes: all nodes of the graph.
        obstacles: layers that cannot be replaced, whatever they read, with the reason.
    """
    streams: dict[str, list[Stream]] = {}
    stream_of: dict[State, Stream] = {}
    for node in nodes:
        norm = node.norm
        if norm is None:
            continue
        start = (node.inputs[0], norm.axes)
        if start not in stream_of:
            stream = find_stream(start)
            stream_of[start] = stream
            if not stream.obstacle:
                stream_of |= dict.fromkeys(stream.axes.items(), stream)
        streams.setdefault(norm.layer, []).append(stream_of[start])
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
