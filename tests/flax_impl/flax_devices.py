"""What test_flax_devices.py asks of eight virtual devices: a process of its own, which prints its findings as JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import flax.linen
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

ROWS, WIDTH = 16, 64  # on a device at least 8 rows or 16 columns: no part of x is as small as a row or a column of it
SPECS = {"batch": P("batch", None), "features": P(None, "features"), "both": P("batch", "features")}
COLLECTIVE = re.compile(r"= (\S.*?) ((?:ragged-)?all-[a-z-]+|collective-[a-z-]+|reduce-scatter|send|recv)\(")
FOUND: dict[str, Any] = {"shape": [ROWS, WIDTH]}


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


def kernels(compiled: Any) -> int:
    return compiled.as_text().count('custom_call_target="rmsnorm"')


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
    unit = np.max(abs(want)) if unit is None else unit
    if got.tobytes() == want.tobytes():
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nanmax(abs(got.astype(np.float64) - want.astype(np.float64)) / unit))


def masked_gradients(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, scale, bias, mask, dy: gradients(lambda *args: norm(*args, mask), x, scale, bias, dy)


def second(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Of x and the scale, the gradient of the size of the gradient of a loss."""
    loss = lambda x, scale, dy: jnp.sum(jnp.sin(norm(x, scale)) * dy)  # noqa: E731
    size = lambda *args: sum(jnp.sum(part**2) for part in jax.grad(loss, (0, 1))(*args))  # noqa: E731
    return jax.grad(size, (0, 1))


def units(x: Any, scale: Any, bias: Any, mask: Any, dy: Any) -> list[Any]:
    arrays = [np.asarray(each) for each in (x, scale, bias)]
    kept = None if mask is None else np.asarray(mask)
    found = term_sizes(*arrays, dy=np.asarray(dy), tangents=(None, None, None), mask=kept, variant="flax")
    return [found[name] for name in ("y", "dx", "dscale", "dbias")]


def spread(mesh: Any, spec: Any, *arrays: Any) -> list[Any]:
    """Arrays shaped as x and such as lie along its last axis."""
    specs = [spec if array is None or array.ndim == 2 else P(spec[1]) for array in arrays]
    pairs = zip(arrays, specs, strict=True)
    return [None if array is None else jax.device_put(array, NamedSharding(mesh, each)) for array, each in pairs]


def partitioned(dtype: str, masked: bool, mesh: str) -> None:
    """By the compiler, from the shardings of the arguments alone; beside the recipe of one device."""
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=(ROWS, WIDTH)) < 0.6).at[2].set(False) if masked else None
    x, dy = (normal(seed, ROWS, WIDTH, dtype=dtype) for seed in (0, 1))
    scale, bias = (normal(seed, WIDTH, dtype=dtype) for seed in (4, 5))
    args = x, scale, bias, mask, dy
    derive = masked_gradients(lambda x, scale, bias, mask: rms_norm(x, scale, bias, mask=mask, variant="flax"))

    with without_kernels():
        want = jax.jit(lambda *args: derive(*args))(*args)
    for name, spec in SPECS.items():
        given = spread(mesh_of(mesh), spec, *args)
        compiled = jax.jit(lambda *args: derive(*args)).lower(*given).compile()
        got = compiled(*given)
        FOUND[f"{mesh} {name} {dtype}{' masked' * masked}"] = {
            "collectives": collectives(compiled),
            "kernels": kernels(compiled),
            "apart": [distance(*each) for each in zip(got, want, units(*args), strict=True)],
            "kept": [each.sharding.is_equivalent_to(NamedSharding(mesh_of(mesh), to), each.ndim)
                     for each, to in zip(got, (spec, spec, P(spec[1]), P(spec[1])), strict=True)],
        }  # fmt: skip


def whole_rows() -> None:
    """In a shard_map and a pmap, in the formula of the gradients and in slices: as the recipe of one device."""
    x, dy, scale = normal(0, ROWS, WIDTH), normal(1, ROWS, WIDTH), normal(4, WIDTH)
    mesh, rows, whole = mesh_of("Row"), P("devices"), P()
    in_shard_map = jax.shard_map(rms_norm, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    in_pmap = lambda *args: jax.pmap(rms_norm, in_axes=(0, None))(*args)  # noqa: E731

    def derivatives(norm: Any) -> Callable[..., Any]:
        return functools.partial(gradients, norm)

    def record(name: str, function: Any, want: Any, *args: Any) -> None:
        given = [jax.device_put(each, NamedSharding(mesh, rows if each.ndim > 1 else whole)) for each in args]
        compiled = jax.jit(function).lower(*given).compile()
        with without_kernels():
            plain = jax.jit(lambda *args: want(*args))(*args)
        apart = [distance(*each) for each in zip(compiled(*given), plain, strict=True)]
        FOUND[name] = {"apart": apart, "kernels": kernels(compiled)}

    record("shard_map", derivatives(in_shard_map), derivatives(rms_norm), x, scale, dy)
    parts = x.reshape(8, -1, WIDTH), scale, dy.reshape(8, -1, WIDTH)
    of_x = lambda norm: lambda *args: derivatives(norm)(*args)[:2]  # noqa: E731  dscale is rounded on each device
    record("pmap", of_x(in_pmap), of_x(rms_norm), *parts)
    formula = lambda *args: rms_norm_vjp(*args)[:2]  # noqa: E731
    record("formula", formula, formula, dy, x, scale)
    some = lambda x, scale: jnp.concatenate([rms_norm(x[:-3], scale), x[-3:]])  # noqa: E731
    record("slice", derivatives(some), derivatives(some), x, scale, dy)


def controls() -> None:
    """Programs that gather x, and that send it about: the inspection finds both."""
    x, scale = spread(mesh_of("Auto"), SPECS["features"], normal(0, ROWS, WIDTH), normal(4, WIDTH))
    for name, spec in {"gathered": P(), "sent about": P("features", None)}.items():
        to = NamedSharding(mesh_of("Auto"), spec)
        moved = jax.jit(lambda x, scale, to=to: rms_norm(jax.lax.with_sharding_constraint(x, to), scale))
        FOUND[name] = collectives(moved.lower(x, scale).compile())


def over_shard_map(function: Callable[..., Any], *args: Any) -> Any:
    column, own = P(None, "devices"), P("devices")
    specs = column, own, own, column, column
    return jax.jit(jax.shard_map(function, mesh=mesh_of("Row"), in_specs=specs, out_specs=(column, column, own, own)))(
        *args
    )


def over_pmap(function: Callable[..., Any], *args: Any) -> Any:
    parts = jax.pmap(function, axis_name="devices")(*(jnp.stack(jnp.split(each, 8, -1)) for each in args))
    return [jnp.concatenate(list(each), -1) for each in parts]


def over_a_named_axis(dtype: str) -> None:
    """Rows in eight parts, of which the mask counts more and less, and of one nothing."""
    share = np.repeat([0.9, 0.2, 0.5, 0.0, 1.0, 0.1, 0.7, 0.3], WIDTH // 8)
    mask = jnp.asarray(np.random.default_rng(3).uniform(size=(ROWS, WIDTH)) < share).at[2].set(False)
    somewhere = mask.at[:, :: WIDTH // 8].set(True)  # the built-in one needs some elements on every device
    x, dy = (normal(seed, ROWS, WIDTH, dtype=dtype) for seed in (0, 1))
    scale, bias = normal(4, WIDTH, dtype=dtype), jnp.zeros(WIDTH, dtype)
    options = {"axis_name": "devices", "param_dtype": dtype}

    def of_nnx(made: Any, **more: Any) -> Callable[..., Any]:
        def call(x: Any, scale: Any, bias: Any, mask: Any) -> Any:
            layer = made(WIDTH // 8, rngs=nnx.Rngs(0), **options, **more)
            layer.scale[...] = scale
            return layer(x, mask) + bias

        return call

    def of_linen(made: Any) -> Callable[..., Any]:
        module = made(**options)
        return lambda x, scale, bias, mask: module.apply({"params": {"scale": scale}}, x, mask=mask) + bias

    def on_one(x: Any, scale: Any, bias: Any, mask: Any) -> Any:
        return rms_norm(x, scale, mask=mask, variant="flax") + bias

    args = x, scale, bias, mask, dy
    whole = jax.jit(lambda *args: masked_gradients(on_one)(*args))
    halves = [[each[..., half] for each in args] for half in (slice(WIDTH // 2), slice(WIDTH // 2, WIDTH))]
    groups = {"axis_index_groups": [[0, 1, 2, 3], [4, 5, 6, 7]]}  # a row is two, each with a statistic of its own
    with without_kernels():
        want = whole(*args)
        want_of_halves = [np.concatenate(parts, -1) for parts in zip(*(whole(*half) for half in halves), strict=True)]
    unit_of_halves = [np.concatenate(parts, -1) for parts in zip(*(units(*half) for half in halves), strict=True)]
    for name, over, ours, wanted, unit in (
        ("nnx, shard_map", over_shard_map, of_nnx(RMSNorm), want, units(*args)),
        ("linen, pmap", over_pmap, of_linen(linen.RMSNorm), want, units(*args)),
        ("nnx in groups, pmap", over_pmap, of_nnx(RMSNorm, **groups), want_of_halves, unit_of_halves),
    ):
        results = over(masked_gradients(ours), *args)
        FOUND[f"{name} {dtype}"] = [distance(*each) for each in zip(results, wanted, unit, strict=True)]
    if dtype == "float64":
        specs = P(None, "devices"), P("devices"), P("devices"), P(None, "devices")
        spread_out = jax.shard_map(of_nnx(RMSNorm), mesh=mesh_of("Row"), in_specs=specs, out_specs=specs[0])
        found, wanted = (
            jax.jit(second(lambda x, scale, norm=norm: norm(x, scale, bias, mask)))(x, scale, dy)
            for norm in (spread_out, on_one)
        )
        FOUND["second over a named axis"] = [distance(*each) for each in zip(found, wanted, strict=True)]
    for name, over, built_in in (
        ("nnx, shard_map", over_shard_map, of_nnx(nnx.RMSNorm)),
        ("linen, pmap", over_pmap, of_linen(flax.linen.RMSNorm)),
    ):
        if dtype == "float32":
            with jax.numpy_dtype_promotion("standard"):
                theirs = over(masked_gradients(built_in), x, scale, bias, somewhere, dy)[0]
            wanted = np.asarray(whole(x, scale, bias, somewhere, dy)[0], np.float64)
            FOUND[f"{name}, built-in"] = float(np.max(abs(np.asarray(theirs, np.float64) - wanted)))


def main(only: list[str]) -> None:
    """All, or layers over a named axis in these dtypes only."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    assert jax.device_count() == 8
    for dtype in only or ("float32", "float64"):
        over_a_named_axis(dtype)
    if not only:
        partitioned("bfloat16", False, "Explicit")
        partitioned("float32", True, "Auto")
        for check in (whole_rows, controls):
            check()
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main(sys.argv[1:])
