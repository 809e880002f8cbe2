from typing import Any

class Plan:
    def __init__(
        self, *, rows: int, n: int, k: int, groups: int, features: int, spread: int, step: int, eps: float,
        offset: float, position: str, x: str, y: str, norm: str | None, product: str | None,
        scale: str | None, bias: str | None, gate: str | None, function: str | None, gate_before: bool,
    ) -> None: ...  # fmt: skip
    def forward(
        self, *, threads: int, gomp_parallel: int, x: Any, x_step: int, residual: Any, scale: Any, bias: Any, mask: Any,
        mask_step: int, mask_stride: int, y: Any, h: Any, inverse_rms: Any, gate: Any = None, gate_step: int = 0,
    ) -> None: ...  # fmt: skip
    def backward(
        self, *, threads: int, gomp_parallel: int, h: Any, h_step: int, scale: Any, mask: Any, mask_step: int,
        mask_stride: int, inverse_rms: Any, dy: Any, dh: Any, dx: Any, dscale: Any, dbias: Any, gate: Any = None,
        gate_step: int = 0, dgate: Any = None, bias: Any = None,
    ) -> None: ...  # fmt: skip
    def xla_forward(self, threads: int, mask: tuple[int, int] | None) -> bytes: ...
    def xla_backward(
        self, threads: int, mask: tuple[int, int] | None, inverse_rms: bool, bias: bool, dh: bool, dx: bool,
        dscale: bool, dbias: bool, dgate: bool,
    ) -> bytes: ...  # fmt: skip

def level() -> str | None: ...
def xla_handler() -> object: ...
