"""Mends the interpreters of Triton 3.6 and 3.7 in every process of a rehearsal: Python imports this file by its name.

They turn an array of one element into a number in a way that NumPy 2.5 refuses, and their fused multiplication rounds
twice, so that no arithmetic in pairs is exact. Triton 3.9 has mended both.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any


def mend() -> None:
    import numpy as np
    from triton.runtime import interpreter

    library, patch, functions = ctypes.CDLL("libm.so.6"), interpreter._patch_lang_tensor, {}
    for name, dtype, kind in (("fmaf", np.float32, ctypes.c_float), ("fma", np.float64, ctypes.c_double)):
        function = getattr(library, name)
        function.restype, function.argtypes = kind, [kind] * 3
        functions[np.dtype(dtype)] = np.frompyfunc(function, 3, 1)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        fused = functions[x.data.dtype](x.data, y.data, z.data)
        return interpreter.TensorHandle(np.asarray(fused, dtype=x.data.dtype), x.dtype.scalar)

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpreterBuilder.create_fma = create_fma


if os.environ.get("TRITON_INTERPRET") == "1":
    mend()
