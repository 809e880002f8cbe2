"""Where the numbers of a tensor are: what a kernel may read, and rows without gaps."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from rmsnorm.gpu import is_switched_off
from rmsnorm.specification import errors
from rmsnorm.torch_impl.private import format_of, is_zero_tensor, modes
from rmsnorm.torch_impl.space import dtype_name

_DENSE: Final = {torch.strided, torch.jagged}


def is_plain(place: int, *tensors: Tensor | None) -> bool:
    """Whether all are ordinary tensors on the GPU of this index, or on the CPU with -1, and no operation is traced.

    Only these have an address that a kernel may read: the numbers of a tensor with the negative bit are stored with the
    other sign, those of a tensor of zeros that autograd makes are not stored at all. False on a GPU from when
    RMSNORM_GPU_KERNELS=0 is set.
    """
    if is_dynamo_compiling():  # which cannot trace these questions
        return False
    for tensor in tensors:
        if tensor is not None and (
            (type(tensor) is not Tensor and type(tensor) is not Parameter)
            or tensor.get_device() != place
            or tensor.is_neg()
            or not _is_in_memory(tensor)
        ):
            return False
    return not modes() and (place < 0 or not is_switched_off())


def _is_in_memory(tensor: Tensor) -> bool:
    """Whether a tensor has an address. That of a parameter which FSDP has freed is an error."""
    try:
        if tensor.data_ptr() or not tensor.numel():
            return True
        if not is_zero_tensor(tensor) and not tensor.untyped_storage().nbytes():
            raise errors.no_memory("rms_norm", tuple(tensor.shape))
    except RuntimeError:  # sparse, or a batch of gradients
        pass
    return False


def check_storage(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Refuse sparse tensors, and tensors without numbers beside others that have some."""
    for name, tensor in {"x": x, **others}.items():
        if tensor is None:
            continue
        if tensor.layout not in _DENSE:
            got = errors.describe(tensor.shape, dtype_name(tensor.dtype))
            raise errors.wrong_layout(op, name, got, str(tensor.layout).removeprefix("torch."))
        if tensor.is_meta != x.is_meta:
            raise errors.wrong_device(op, name, str(tensor.device), str(x.device))


def rows_of(x: Tensor, n: int) -> Tensor:
    """A matrix whose rows have no gap: a view of x if that is possible, else a copy."""
    x = x.reshape(-1, n)
    return x if x.stride(1) == 1 else x.contiguous()


def laid_out(result: Any, x: Any) -> Any:
    """The result as torch.nn.RMSNorm lays it: contiguous, but with the channels last in memory where those of x are."""
    if result is None or x.layout is not torch.strided:
        return result
    if x.is_contiguous() or torch.jit.is_tracing() or format_of(x) is torch.contiguous_format:
        return result.contiguous()
    return result.movedim(1, -1).contiguous().movedim(-1, 1)  # vmap has no memory formats
