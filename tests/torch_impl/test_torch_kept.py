"""Calls that a layer keeps: which, how many, for which tensors, in threads, and that no tensor is kept with them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest

from rmsnorm import cpu
from rmsnorm.engines import _prepared

torch = pytest.importorskip("torch")
from torch_arrays import randn  # noqa: E402

from rmsnorm.torch_impl import RMSNorm, rms_norm  # noqa: E402
from rmsnorm.torch_impl.private import is_widened  # noqa: E402

needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="without kernels no call is kept")
SHAPES = (7, 24), (9, 24), (2, 3, 24), (1, 24), (5, 24), (7, 24)


@needs_kernels
def test_lengths_that_alternate_are_looked_up_once() -> None:
    layer, inputs = RMSNorm(24), [randn(*shape) for shape in SHAPES[:4]]
    for x in inputs:
        layer(x)
    before, kept = _prepared.cache_info(), layer._kept
    for x in (*inputs, *inputs):
        assert torch.equal(layer(x), rms_norm(x, layer.weight, variant="torch", eps=layer.eps))
    assert layer._kept is kept
    assert len(kept) == 4
    seen = _prepared.cache_info()
    assert seen.hits - before.hits + seen.misses - before.misses == 8  # those of the functions
    layer(randn(5, 24))
    assert len(layer._kept) == 4


@needs_kernels
@pytest.mark.parametrize("needs", [False, True])
def test_a_residual_is_in_a_kept_call_and_a_gate_is_not(needs: bool) -> None:
    layer, residual, gate = RMSNorm(24, variant="llama"), randn(7, 24, seed=1), randn(7, 24, seed=2)
    x = randn(7, 24).requires_grad_(needs)
    for options in ({"residual": residual}, {"gate": gate}, {"residual": residual, "gate": gate}):
        first = layer(x, **options)
        kept = layer._kept
        again = layer(x, **options)
        assert layer._kept is kept
        outputs = [y if isinstance(y, tuple) else (y,) for y in (first, again)]
        assert all(map(torch.equal, *outputs))
        if needs:
            one, other = (torch.autograd.grad(sum(o.sum() for o in y), (x, layer.weight)) for y in outputs)
            assert all(map(torch.equal, one, other))
    assert len(layer._kept) == 1
    wide = layer(x, residual=residual.double())  # of another dtype it is another call
    assert [t.dtype for t in wide] == [torch.float64] * 2
    assert torch.equal(layer(x, residual=residual.t().contiguous().t())[0], layer(x, residual=residual)[0])


@needs_kernels
def test_a_kept_call_keeps_no_tensor() -> None:
    layer, x, residual = RMSNorm(24), randn(7, 24), randn(7, 24, seed=1)
    for _ in range(2):
        y, h = layer(x, residual=residual)
    tensors = [weakref.ref(t) for t in (x, residual, y, h)]
    del x, residual, y, h
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * 4


def test_threads_with_other_shapes_have_their_own_results() -> None:
    layer, failures = RMSNorm(24), []
    wanted = {shape: rms_norm(randn(*shape), layer.weight, variant="torch", eps=layer.eps) for shape in SHAPES}

    def work(first: int) -> None:
        for i in range(300):
            shape = SHAPES[(first + i) % len(SHAPES)]
            y = layer(randn(*shape))
            if y.shape != shape or not torch.equal(y, wanted[shape]):
                failures.append(shape)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_list_of_axes_is_looked_up_as_a_tuple_is() -> None:
    x: Any = randn(7, 24)
    want = rms_norm(x, axis=(-1,))
    before = _prepared.cache_info().misses
    assert torch.equal(rms_norm(x, axis=[-1]), want)
    assert _prepared.cache_info().misses == before
    with pytest.raises(TypeError, match="axis"):
        rms_norm(x, axis=[True])


def test_autocast_of_the_cpu_changes_no_dtype_of_a_norm() -> None:
    """So a call on the CPU may be kept without it. Where it does, ``Kept.autocast`` asks in each call."""
    assert not is_widened("cpu")
    layer, x = RMSNorm(24, dtype=torch.bfloat16), randn(7, 24, dtype=torch.bfloat16)
    for is_on in (False, True, False, True):
        with torch.autocast("cpu", enabled=is_on):
            assert layer(x).dtype == torch.bfloat16
    assert all(call.autocast is None for _, call in layer._kept)


def test_a_switch_for_the_gpu_counts_from_when_it_is_set(monkeypatch: pytest.MonkeyPatch, forget: Any) -> None:
    """Also for a call whose launch was made before."""
    from rmsnorm import gpu
    from rmsnorm.specification.call import Spec
    from rmsnorm.specification.resolve import resolve
    from rmsnorm.specification.variants import Variant
    from rmsnorm.torch_impl import gpu as rows
    from rmsnorm.torch_impl import kernels

    call, device = resolve("test", Spec((5, 8), "float32"), variant=Variant.get("llama")), torch.device("cpu")
    monkeypatch.setattr(gpu, "is_interpreted", lambda: True)
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    forget(rows.card_of)
    made = kernels.kept_on(device, call).launch
    assert type(made) is rows.Launch
    assert kernels.kept_on(device, call).launch is made  # with the kernels that it has started
    monkeypatch.setenv("RMSNORM_GPU_KERNELS", "0")
    assert kernels.refusal(device, call) == "RMSNORM_GPU_KERNELS=0 switches the kernels off"
