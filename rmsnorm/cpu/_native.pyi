from typing import Any

class Plan:
    def __init__(
        self, *, rows: int, n: int, k: int, groups: int, step: int, eps: float, offset: float, position: str, x: str,
        y: str, norm: str | None, product: str | None, scale: str | None, bias: str | None,
    ) -> None: ...  # fmt: skip
    def forward(
        self, *, threads: int, gomp_parallel: int, x: Any, x_step: int, residual: Any, scale: Any, bias: Any, y: Any,
        h: Any, inverse_rms: Any,
    ) -> None: ...  # fmt: skip
    def backward(
        self, *, threads: int, gomp_parallel: int, h: Any, h_step: int, scale: Any, inverse_rms: Any, dy: Any, dh: Any,
        dx: Any, dscale: Any, dbias: Any,
    ) -> None: ...  # fmt: skip
    def xla_forward(self, threads: int) -> bytes: ...
    def xla_backward(
        self, threads: int, inverse_rms: bool, bias: bool, dh: bool, dx: bool, dscale: bool, dbias: bool
    ) -> bytes: ...

def level() -> str | None: ...
def xla_handler() -> object: ...
