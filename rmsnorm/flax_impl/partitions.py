"""The primitives of rows.py on several CPU devices: each device computes its own part of x.

XLA decides how arrays lie on a mesh after JAX has lowered a program. So a primitive is lowered to an operation with a
rule that says which axes of its arrays belong together. When XLA has decided, it asks for the program of one device.
Rows that are whole are computed by a kernel; rows in parts by arithmetic.py, whose sums go over the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rmsnorm.call import Call, Shape
from rmsnorm.flax_impl.arithmetic import Across
from rmsnorm.flax_impl.rounding import convert

Names: TypeAlias = tuple[str, ...]  # of axes of a mesh


def lie_alike(call: Call, h: Any, *others: Any) -> bool:
    """Whether arrays lie on devices so that a kernel can compute each device's part, as far as their types say it."""
    sharding = jax.typeof(h).sharding
    kinds, present = set(sharding.mesh.axis_types), [x for x in others if x is not None]
    if AxisType.Manual in kinds:  # in a shard_map
        return kinds == {AxisType.Manual} and not any(_same_over(h, x) for x in present)
    if AxisType.Explicit not in kinds:  # XLA decides
        return True
    wanted = [_spec(call, sharding.spec, jax.typeof(x).shape) for x in (h, *present)]
    return wanted == [jax.typeof(x).sharding.spec for x in (h, *present)]


def as_varying(x: Any, like: Any, dtype: str | None = None) -> Any:
    """A parameter as an array of a shard_map that differs between the devices over which ``like`` differs.

    If that changes its type, the parameter is converted to ``dtype``, of which its gradient then is.
    """
    if x is None or not (names := _same_over(x, like)):
        return x
    return lax.pcast(convert(x, dtype or x.dtype.name), names, to="varying")


def _same_over(x: Any, like: Any) -> Names:
    """The axes of the mesh of a shard_map over which ``like`` differs between devices and x does not."""
    mine, other = (jax.typeof(array).manual_axis_type.varying for array in (x, like))
    return tuple(name for name in jax.typeof(like).sharding.mesh.axis_names if name in other - mine)


def result_type(call: Call, h: Any, shape: Shape, dtype: Any) -> Any:
    """The type of an array that lies as h does, whose type is ``h``."""
    if h is None or h.sharding.mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    sharding = NamedSharding(h.sharding.mesh, _spec(call, h.sharding.spec, shape))
    return h.update(shape=shape, dtype=dtype, sharding=sharding, weak_type=False)


def device_count(module: Any) -> int:
    """Over how many devices the arrays of a module lie; 0 if it may run in another process, or that is not known."""
    context = module.axis_context
    if module.lowering_parameters.for_export:
        return 0
    if isinstance(context, mlir.SPMDAxisContext):
        return int(context.manual_axes == set(context.mesh.axis_names))
    return context.num_devices if isinstance(context, mlir.ShardingContext) else 0


def lower(
    context: Any, operands: Sequence[Any], call: Call, plain: Callable[..., Any], part: Callable[..., Any]
) -> Any:
    """Lowers ``plain`` to be computed in parts; None if that cannot be.

    ``part`` computes one: from operands, the call on them, the names of the mesh's axes over which the rows are spread,
    and an Across if each row is, too.
    """
    module, count = context.module_context, context.module_context.axis_context.num_devices
    mesh = next((x.sharding.mesh for x in context.avals_in if not x.sharding.mesh.empty), None)
    devices = tuple(jax.devices("cpu")[:count])  # only how many they are matters
    if mesh is None or not mesh.size == len(devices) == count or not jax.config.jax_use_shardy_partitioner:
        return None
    if call.k != call.n:  # part of a row, which may be on some of its devices alone
        return None
    operation = custom_partitioning(lambda *arrays: plain(*arrays))
    operation.def_partition(_partition(call, part), sharding_rule=_rule(call, context.avals_in, context.avals_out))
    axes = mlir.ShardingContext(count, devices, mesh)
    return mlir.lower_fun(operation, multiple_results=True)(
        context.replace(module_context=module.replace(axis_context=axes)), *operands
    )


def _rule(call: Call, operands: Iterable[Any], results: Iterable[Any]) -> SdyShardingRule:
    """Which axes of the arrays are spread over the same devices: those that are the same axis of x."""

    def mapping(array: Any) -> ArrayMapping:
        return ArrayMapping(*(f"axis{axis}" if size > 1 else f"one{axis}" for axis, size in _axes(call, array.shape)))

    return SdyShardingRule(tuple(map(mapping, operands)), tuple(map(mapping, results)))


def _partition(call: Call, part: Callable[..., Any]) -> Callable[..., Any]:
    """The answer to XLA: from the shardings that it found, those that are wanted, and the program of one device."""

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        like_x = [x.sharding.spec for x in (*operands, *jax.tree.leaves(results)) if x.shape == call.shape]
        spec = max(like_x, key=lambda spec: prod(_parts(mesh, _names(entry)) for entry in spec))
        names = [_names(entry) for entry in spec]
        for axis, size in enumerate(call.shape):
            if size % _parts(mesh, names[axis]):  # XLA would fill up the last part with numbers that are none of x
                names[axis] = ()
        shape = tuple(size // _parts(mesh, own) for size, own in zip(call.shape, names, strict=True))
        own = replace(call, shape=shape)
        over_rows, over_row = (sum((names[axis] for axis in axes), ()) for axes in (call.shared_axes, call.axes))

        def sharding(array: Any) -> NamedSharding:
            return NamedSharding(mesh, _spec(call, [own or None for own in names], array.shape))

        def compute(*arrays: Any) -> Any:
            return part(*arrays, call=own, over_rows=over_rows, across=Across(over_row) if over_row else None)

        return mesh, compute, jax.tree.map(sharding, results), jax.tree.map(sharding, operands)

    return partition


def _spec(call: Call, spec: Sequence[Any], shape: Shape) -> PartitionSpec:
    """How an array lies if x lies as ``spec`` says."""
    return PartitionSpec(*(spec[axis] if size > 1 else None for axis, size in _axes(call, shape)))


def _axes(call: Call, shape: Shape) -> list[tuple[int, int]]:
    """The axes of x that those of another array are, with their sizes: it has all axes, or it is a parameter."""
    axes = range(len(call.shape)) if len(shape) == len(call.shape) else call.feature_axes
    return list(zip(axes, shape, strict=True))


def _names(entry: Any) -> Names:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _parts(mesh: Any, names: Names) -> int:
    return prod(mesh.shape[name] for name in names)
