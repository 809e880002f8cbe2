"""`check` and `identify` leave a layer, the generators, and the modes of their caller as they were."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from commands import rmsnorm

from rmsnorm.identify import identify
from rmsnorm.parity import check
from rmsnorm.targets import NoTarget

pytestmark = pytest.mark.usefixtures("few_circumstances")
ASK: dict[str, Callable[[Any], Any]] = {"check": lambda layer: check(layer, dtypes="float32"), "identify": identify}


def torch_layer() -> Any:
    """A norm that counts, moves, drops out, and writes to a buffer."""
    torch = pytest.importorskip("torch")

    class Norm(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(8, eps=1e-6)
            self.drop = torch.nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))
            self.calls, self.moves = [0], 0

        def to(self, *where: Any, **how: Any) -> Any:
            self.moves += 1
            return super().to(*where, **how)

        def forward(self, x: Any) -> Any:
            self.calls[0] += 1
            self.seen += 1
            random.random()
            np.random.random()
            return self.drop(self.norm(x))

    layer = Norm().to(torch.bfloat16)
    layer.norm.weight.requires_grad_(requires_grad=False)
    layer.norm.weight.grad = torch.ones(8, dtype=torch.bfloat16)
    layer.drop.eval()
    layer.register_forward_hook(lambda *what: None)
    return layer


def keras_layer() -> Any:
    layer = pytest.importorskip("keras").layers.LayerNormalization()
    layer.build((2, 8))
    return layer


def nnx_layer() -> Any:
    nnx = pytest.importorskip("flax.nnx")
    return nnx.Sequential(nnx.RMSNorm(8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))


def state(layer: Any) -> str:
    """Everything that a layer has, and the generators."""
    shown: list[Any] = [random.getstate(), [repr(part) for part in np.random.get_state()]]
    if hasattr(layer, "get_config"):
        shown += [layer.get_config(), [(v.name, v.dtype, v.trainable, v.numpy().tolist()) for v in layer.variables]]
    elif hasattr(layer, "named_modules"):
        import torch

        shown += [torch.get_rng_state().tolist(), layer.calls, layer.moves, len(layer._forward_hooks)]
        shown += [(name, module.training) for name, module in layer.named_modules()]
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        shown += [(name, id(t), t.dtype, t.device, t.requires_grad, t.grad, t.tolist()) for name, t in tensors]
    else:
        from flax import nnx

        shown += [*nnx.split(layer)]
    return repr(shown)


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("make", [torch_layer, keras_layer, nnx_layer])
def test_a_layer_is_left_as_it_was(make: Callable[[], Any], ask: str) -> None:
    layer = make()
    before = state(layer)
    ASK[ask](layer)
    assert state(layer) == before


@pytest.mark.parametrize("ask", ASK)
def test_a_layer_without_values_and_one_that_cannot_be_copied_get_a_sentence(ask: str) -> None:
    torch = pytest.importorskip("torch")
    want = "torch.nn.modules.normalization:RMSNorm is on the device meta, expected cpu, where x is; load its values"
    with pytest.raises(NoTarget, match=want):
        ASK[ask](torch.nn.RMSNorm(8, device="meta"))
    layer = torch.nn.RMSNorm(8)
    layer.lock = threading.Lock()
    with pytest.raises(NoTarget, match=r"RMSNorm cannot be copied \(TypeError: .*; pass its class, or a function that"):
        ASK[ask](layer)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["anomaly", "inference", "no_grad", "autocast"])
def test_no_mode_of_the_caller_makes_a_defect_and_it_is_there_afterwards(name: str) -> None:
    torch = pytest.importorskip("torch")
    context, is_there = {
        "anomaly": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
        "inference": (torch.inference_mode, torch.is_inference_mode_enabled),
        "no_grad": (torch.no_grad, lambda: not torch.is_grad_enabled()),
        "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    }[name]
    with context():
        report = check(zoo.standard, dtypes="float32", framework="torch")
        assert (report.passed, is_there()) == (True, True), report.text


@pytest.mark.parametrize("command", ["check", "identify"])
def test_what_lies_beside_a_target_that_is_no_module_of_the_folder_is_not_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder has a module for a worker only where the target is one of it."""
    monkeypatch.chdir(tmp_path)
    norms = tmp_path / "elsewhere" / "norms.py"
    norms.parent.mkdir()
    norms.write_text(
        "import numpy as np\ndef norm(x):\n    wide = x.astype(np.float64)\n"
        "    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)\n"
    )
    beside = [tmp_path / f"{name}.py" for name in ("json", "queue", "rich", "ml_dtypes")]
    for target in ("elsewhere/norms.py:norm", "elsewhere.norms:norm"):  # the latter is a module of this folder
        for path in beside if "/" in target else ():
            path.write_text(f"raise SystemExit('{path.name} was run')\n")
        done = rmsnorm(command, target, "--framework", "numpy")
        assert done.exit_code == 0, done.output
        for path in beside:
            path.unlink(missing_ok=True)
