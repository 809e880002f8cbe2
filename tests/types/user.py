"""A user's file as type checkers see it (``make types``): a line is ignored where an error is expected."""

from typing import assert_type

import jax
import numpy as np
import torch
from flax import nnx
from torch import Tensor

from rmsnorm import Variant, flax_impl
from rmsnorm.flax_impl import linen
from rmsnorm.numpy_impl import rms_norm as numpy_rms_norm
from rmsnorm.parity import Report, check
from rmsnorm.torch_impl import RMSNorm, rms_norm, rms_norm_vjp

x = torch.ones(2, 4)
assert_type(rms_norm(x), Tensor)
assert_type(rms_norm(x, variant="llama", residual=x), tuple[Tensor, Tensor])
assert_type(rms_norm(x, return_inverse_rms=True), tuple[Tensor, Tensor])
assert_type(rms_norm(x, residual=x, return_inverse_rms=True), tuple[Tensor, Tensor, Tensor])
assert_type(rms_norm_vjp(x, x)[0], Tensor)
assert_type(rms_norm_vjp(x, x, residual=x)[3], Tensor)

layer = RMSNorm(4, variant=Variant.get("llama").replace(eps=1e-5))
assert_type(layer(x), Tensor)
assert_type(layer(x, residual=x), tuple[Tensor, Tensor])

a = jax.numpy.ones((2, 4))
assert_type(flax_impl.rms_norm(a), jax.Array)
assert_type(flax_impl.RMSNorm(4, rngs=nnx.Rngs(0))(a), jax.Array)
assert_type(flax_impl.RMSNorm(4, rngs=nnx.Rngs(0))(a, residual=a), tuple[jax.Array, jax.Array])
linen.RMSNorm(variant="gemma")

assert_type(numpy_rms_norm(np.ones(4), variant="gemma").ndim, int)
assert_type(check(rms_norm, "standard"), Report)

rms_norm(x, varient="llama")  # type: ignore
rms_norm(x, variant=3)  # type: ignore
rms_norm(x, variant="lama")  # type: ignore
rms_norm(x, epsilon=1e-6)  # type: ignore
numpy_rms_norm(np.ones(4), varient="llama")  # type: ignore
RMSNorm(4, varient="llama")  # type: ignore
RMSNorm(4, variant=3)  # type: ignore
RMSNorm(4, variant="LLaMA")  # type: ignore
flax_impl.RMSNorm(4, variant="lama", rngs=nnx.Rngs(0))  # type: ignore
linen.RMSNorm(variant="lama")  # type: ignore
check(rms_norm, "lama")  # type: ignore
Variant.get("llama").repalce(eps=1e-5)  # type: ignore
