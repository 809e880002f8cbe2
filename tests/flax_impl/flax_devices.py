"""Arrays over eight virtual devices: the numbers of one device, and nothing of x's size goes between them.

test_flax_devices runs it in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from flax_arrays import gradients, normal
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rmsnorm import cpu
from rmsnorm.accuracy.terms import term_sizes
from rmsnorm.flax_impl import RMSNorm, linen, rms_norm, rms_norm_vjp
from rmsnorm.specification import dtypes

ROWS, WIDTH = 16, 64  # on a device at least 8 rows or 16 columns: no part of x is as small as a row or a column of it
SPECS = {"batch": P("batch", None), "features": P(None, "features"), "both": P("batch", "features")}
COLLECTIVE = re.compile(r"= (\S.*?) ((?:ragged-)?all-[a-z-]+|collective-[a-z-]+|reduce-scatter|send|recv)\(")


@functools.cache
def mesh_of(kind: str) -> Any:
    """A row of eight devices, or two by four, which jax places by itself (Auto) or by types (Explicit)."""
    if kind == "Row":
        return jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    return jax.make_mesh((2, 4), ("batch", "features"), axis_types=(AxisType[kind],) * 2)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """For functions that are compiled in it."""
    with mock.patch.object(cpu, "missing", return_value="there are none"):
        yield


def custom_calls(compiled: Any) -> str:
    return " ".join(re.findall(r'custom_call_target="(\w+)"', compiled.as_text()))


def arrays(dtype: str) -> tuple[Any, ...]:
    """x, scale, bias and dy."""
    shapes = {0: (ROWS, WIDTH), 4: (WIDTH,), 5: (WIDTH,), 1: (ROWS, WIDTH)}
    return tuple(normal(seed, *shape, dtype=dtype) for seed, shape in shapes.items())


def few(dtype: str) -> float:
    """Roundings of two programs of the same formula: of sums of a row, and over rows, in two orders, and of results."""
    u = dtypes.unit_roundoff(dtype)
    return 2 * (WIDTH + ROWS) * min(u, 2.0**-24) + 2 * u


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """Every exchange between devices in the compiled program, and the elements of the largest array in it."""
    found = []
    for what, kind in COLLECTIVE.findall(compiled.as_text()):
        shapes = [shape.split(",") for shape in re.findall(r"\[([0-9,]*)\]", what)]
        found.append((kind, max(int(np.prod([int(size) for size in shape if size])) for shape in shapes)))
    return found


def distance(got: Any, want: Any, unit: Any = None) -> float:
    """Largest difference in units, or beside the largest number; 0 for equal bits."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    if got.tobytes() == want.tobytes():
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = abs(got.astype(np.float64) - want.astype(np.float64))
        return float(np.nanmax(difference / (np.max(abs(want)) if unit is None else unit)))


def masked_gradients(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, scale, bias, mask, dy: gradients(lambda *args: norm(*args, mask), x, scale, bias, dy)


def units(x: Any, scale: Any, bias: Any, mask: Any, dy: Any, variant: str = "flax") -> list[Any]:
    arrays = [np.asarray(each) for each in (x, scale, bias)]
    kept = None if mask is None else np.asarray(mask)
    found = term_sizes(*arrays, dy=np.asarray(dy), tangents=(None, None, None), mask=kept, variant=variant)
    return [found[name] for name in ("y", "dx", "dscale", "dbias")]


def spread(mesh: Any, spec: Any, *arrays: Any) -> list[Any]:
    """Arrays shaped as x and such as lie along its last axis."""
    specs = [spec if array is None or array.ndim == 2 else P(spec[1]) for array in arrays]
    pairs = zip(arrays, specs, strict=True)
    return [None if array is None else jax.device_put(array, NamedSharding(mesh, each)) for array, each in pairs]


def partitioned(dtype: str, masked: bool, kind: str) -> None:
    """By the compiler, from the shardings of the arguments alone; beside the recipe of one device."""
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=(ROWS, WIDTH)) < 0.6).at[2].set(False) if masked else None
    args = *arrays(dtype)[:3], mask, arrays(dtype)[3]
    derive = masked_gradients(lambda x, scale, bias, mask: rms_norm(x, scale, bias, mask=mask, variant="flax"))
    with without_kernels():
        want = jax.jit(lambda *args: derive(*args))(*args)
    for name, spec in SPECS.items():
        given = spread(mesh_of(kind), spec, *args)
        compiled = jax.jit(lambda *args: derive(*args)).lower(*given).compile()
        got = compiled(*given)
        assert max(distance(*each) for each in zip(got, want, units(*args), strict=True)) <= few(dtype), name
        assert "rmsnorm" not in custom_calls(compiled)
        for each, to in zip(got, (spec, spec, P(spec[1]), P(spec[1])), strict=True):  # as x and the parameters lie
            assert each.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), to), each.ndim), name
        moved = collectives(compiled)
        assert {what for what, _ in moved} == {"all-reduce"}
        assert max(size for _, size in moved) <= (WIDTH if name == "batch" else ROWS)


def whole_rows() -> None:
    """In a shard_map and a pmap, and in the formula of the gradients: as the recipe of one device, without kernels."""
    x, scale, _, dy = arrays("float32")
    mesh, rows, whole = mesh_of("Row"), P("devices"), P()
    in_shard_map = jax.shard_map(rms_norm, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    in_pmap = lambda *args: jax.pmap(rms_norm, in_axes=(0, None))(*args)  # noqa: E731
    derivatives = lambda norm: lambda *args: gradients(norm, *args)[:2]  # noqa: E731  dscale is rounded on each device
    formula = lambda x, scale, dy: rms_norm_vjp(dy, x, scale)[:2]  # noqa: E731
    parts = x.reshape(8, -1, WIDTH), scale, dy.reshape(8, -1, WIDTH)
    for function, plain, own in (
        (derivatives(in_shard_map), derivatives(rms_norm), (x, scale, dy)),
        (derivatives(in_pmap), derivatives(rms_norm), parts),
        (formula, lambda *args: formula(*args), (x, scale, dy)),
    ):
        given = [jax.device_put(each, NamedSharding(mesh, rows if each.ndim > 1 else whole)) for each in own]
        compiled = jax.jit(function).lower(*given).compile()
        with without_kernels():
            want = jax.jit(lambda *args: plain(*args))(*own)  # noqa: B023
        assert max(distance(*each) for each in zip(compiled(*given), want, strict=True)) <= few("float32")
        assert "rmsnorm" not in custom_calls(compiled)


def controls() -> None:
    """Programs that gather x, and that send it about: the inspection finds both."""
    x, scale = spread(mesh_of("Auto"), SPECS["features"], *arrays("float32")[:2])
    for to, found in ((P(), ("all-gather", ROWS * WIDTH)), (P("features", None), None)):
        to = NamedSharding(mesh_of("Auto"), to)
        moved = jax.jit(lambda x, scale, to=to: rms_norm(jax.lax.with_sharding_constraint(x, to), scale))
        kinds = collectives(moved.lower(x, scale).compile())
        assert found in kinds or (found is None and "all-to-all" in {kind for kind, _ in kinds}), kinds


def over_shard_map(function: Callable[..., Any], *args: Any) -> Any:
    column, own = P(None, "devices"), P("devices")
    specs = column, own, own, column, column
    out = column, column, own, own
    return jax.jit(jax.shard_map(function, mesh=mesh_of("Row"), in_specs=specs, out_specs=out))(*args)


def over_pmap(function: Callable[..., Any], *args: Any) -> Any:
    parts = jax.pmap(function, axis_name="devices")(*(jnp.stack(jnp.split(each, 8, -1)) for each in args))
    return [jnp.concatenate(list(each), -1) for each in parts]


def of_nnx(**options: Any) -> Callable[..., Any]:
    def call(x: Any, scale: Any, bias: Any, mask: Any) -> Any:
        layer = RMSNorm(WIDTH // 8, rngs=nnx.Rngs(0), axis_name="devices", **options)
        layer.scale[...] = scale
        return layer(x, mask) + bias

    return call


def of_linen(**options: Any) -> Callable[..., Any]:
    module = linen.RMSNorm(axis_name="devices", **options)
    return lambda x, scale, bias, mask: module.apply({"params": {"scale": scale}}, x, mask=mask) + bias


def over_a_named_axis(dtype: str, variant: str) -> None:
    """Rows in eight parts, of which the mask counts more and less, and of one nothing; and in two groups of four."""
    share = np.repeat([0.9, 0.2, 0.5, 0.0, 1.0, 0.1, 0.7, 0.3], WIDTH // 8)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=(ROWS, WIDTH)) < share).at[2].set(False)
    x, scale, bias, dy = arrays(dtype)
    args, options = (x, scale, bias, mask, dy), {"param_dtype": dtype, "variant": variant}

    def on_one(*args: Any) -> list[tuple[Any, Any]]:
        with without_kernels():
            norm = lambda x, scale, bias, mask: rms_norm(x, scale, mask=mask, variant=variant) + bias  # noqa: E731
            results = jax.jit(lambda *args: masked_gradients(norm)(*args))(*args)
        return [*zip(results, units(*args, variant=variant), strict=True)]

    whole = on_one(*args)
    halves = [on_one(*(each[..., half] for each in args)) for half in (slice(WIDTH // 2), slice(WIDTH // 2, WIDTH))]
    joined = [[np.concatenate(pair, -1) for pair in zip(*two, strict=True)] for two in zip(*halves, strict=True)]
    groups = {"axis_index_groups": [[0, 1, 2, 3], [4, 5, 6, 7]]}  # a row is two, each with a statistic of its own
    for over, ours, wanted in (
        (over_shard_map, of_nnx(**options), whole), (over_pmap, of_linen(**options), whole),
        (over_pmap, of_linen(**options, **groups), joined), (over_pmap, of_nnx(**options, **groups), joined),
    ):  # fmt: skip
        results = over(masked_gradients(ours), *args)
        assert max(distance(got, *each) for got, each in zip(results, wanted, strict=True)) <= few(dtype)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    assert jax.device_count() == 8
    for dtype, variant in (("float32", "flax"), ("float32", "x_transformers"), ("float64", "zhang_torch")):
        over_a_named_axis(dtype, variant)
    partitioned("bfloat16", False, "Explicit")
    partitioned("float32", True, "Auto")
    whole_rows()
    controls()
    print("done")
