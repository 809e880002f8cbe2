"""What this package needs of JAX and JAX has no public function for, or not in every version.

A version of JAX may lack such a function. So each has a substitute, with which the results are the same but take
longer. There is none for the modules that make a primitive (``Primitive``, ``ad``, ``batching``, ``mlir``): every
version of JAX from 0.4.36 on has them at these places.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["Primitive", "ad", "batching", "enable_x64", "mlir"]

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:
    from jax.experimental import enable_x64  # type: ignore[no-redef, unused-ignore]

# The type of an array, or of what a transformation passes in place of one.
typeof: Any = jax.typeof if hasattr(jax, "typeof") else jax.core.get_aval
# What says that a module is for a number of devices. Without it none is for one device, and none calls a kernel.
_ShardingContext: Any = getattr(mlir, "ShardingContext", ())


def check_for_nan(primitive: Any) -> None:
    """Let checkify find a NaN that a primitive returns. Without this it checks JAX's own primitives alone."""
    try:
        from jax._src.checkify import error_checks, nan_error_check
    except ImportError:
        return
    error_checks[primitive] = partial(nan_error_check, primitive)


def is_divided(x: Any) -> bool:
    """Whether each device has its own part of an array, and its type says so: in a shard_map, or by explicit sharding.

    Where the types say nothing about devices, every named axis counts as one of a shard_map.
    """
    mesh = getattr(getattr(typeof(x), "sharding", None), "mesh", None)
    kinds = getattr(mesh, "axis_types", None)
    if isinstance(kinds, tuple):
        return any(kind.name != "Auto" for kind in kinds)
    has_names = getattr(jax.core, "nonempty_axis_env_DO_NOT_USE", lambda: True)
    return bool(has_names())


def type_like(h: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of an array of another shape, beside one of type ``h``, whose mesh it keeps."""
    mesh = getattr(getattr(h, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty:
        return jax.core.ShapedArray(shape, dtype)
    sharding = NamedSharding(mesh, PartitionSpec(*(None for _ in shape)))
    return h.update(shape=shape, dtype=dtype, sharding=sharding, weak_type=False)


def is_for_one_device(module: Any) -> bool:
    """Whether a module runs on one device of this process; False if that is not known."""
    context, parameters = getattr(module, "axis_context", None), getattr(module, "lowering_parameters", None)
    is_here = getattr(parameters, "for_export", True) is False
    return is_here and isinstance(context, _ShardingContext) and getattr(context, "num_devices", None) == 1
