"""RMSNorm as a PyTorch module, a drop-in for torch.nn.RMSNorm in every variant."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter, init
from torch.nn.modules.module import register_module_module_registration_hook

from rmsnorm.specification import errors
from rmsnorm.specification.interface import constructor
from rmsnorm.specification.variants import Preset, Variant, derive
from rmsnorm.torch_impl.autograd import Known, repeat
from rmsnorm.torch_impl.calls import compute
from rmsnorm.torch_impl.functional import rms_norm
from rmsnorm.torch_impl.private import (
    built_in_dtype,
    has_tangents,
    is_dynamo_compiling,
    is_transformed,
    may_differ,
)
from rmsnorm.torch_impl.space import dtype_name


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square layer normalization over the last axes.

        y = h / rho * (o + weight) + bias,    h = x + residual,    rho = sqrt(mean(h_i^2) + eps)

    with the place of eps, the offset o, the counted elements and the roundings of the variant. It is an instance of
    torch.nn.RMSNorm, so that code which looks for one (for weight decay, sharding, initialisation) finds it.

    Args:
        normalized_shape: sizes of the last axes of x, which are normalised; an integer for the last one alone.
        eps: a number >= 0; None for the eps of the variant. That of ``torch`` is the machine epsilon of x, or of f32
            for 16-bit x, and its attribute ``eps`` is None. (The built-in layer of PyTorch 2.5 and 2.6 takes that of
            the 16-bit dtype, 0.0078 for bfloat16: there name the eps for the same numbers.)
        elementwise_affine: whether there are parameters; without them the factor is 1 and there is no bias.
        device, dtype: of the parameters.
        bias: whether there is one; None as in the variant: only ``equinox`` and ``lasagne`` have one.
        partial: fraction of the elements, counted from the first, that the statistic uses; None for the variant's.
        variant: name of a preset or a Variant. By default the layer is ``torch``, as torch.nn.RMSNorm, and the
            functions are ``standard``, with eps 1e-6.

    Attributes:
        weight: gain, of normalized_shape; initially 1 - o, so that the factor is 1. None without parameters.
        bias: of the same shape, initially 0; or None, so that a state dict is that of torch.nn.RMSNorm.

    Raises:
        TypeError: eps, partial or variant is of the wrong type.
        ValueError: normalized_shape is empty or not of sizes, eps, partial or variant is not valid.

    Source: Zhang & Sennrich 2019, arXiv 1910.07467, equation 4.

    Example:
        >>> import torch
        >>> layer = RMSNorm(2, eps=0.0)
        >>> layer(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
        >>> RMSNorm(4, variant="gemma").weight.detach()
        tensor([0., 0., 0., 0.])
    """

    _kept: Known = ()  # calls that were made, for the next ones

    @constructor
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | str | None = None,
        *,
        bias: bool | None = None,
        partial: float | Fraction | None = None,
        variant: Preset | Variant = "torch",
    ) -> None:
        if dtype is not None:
            dtype = getattr(torch, errors.dtype_named("RMSNorm", "dtype", dtype))
        super(torch.nn.RMSNorm, self).__init__()  # the parameters are made here, where there may be two
        eps = derive("RMSNorm", variant, eps, None).eps
        self.variant = derive("RMSNorm", variant, None, partial)
        self.normalized_shape = _sizes(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        has_bias = self.variant.bias if bias is None else bias
        for name, exists in (("weight", elementwise_affine), ("bias", elementwise_affine and has_bias)):
            empty = torch.empty(self.normalized_shape, device=device, dtype=dtype) if exists else None
            self.register_parameter(name, None if empty is None else Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            init.constant_(self.weight, 1 - self.variant.scale_offset)
        if self.bias is not None:
            init.zeros_(self.bias)

    @property
    def _is_hf_initialized(self) -> bool:
        return bool(self.__dict__.get("_is_hf_initialized", False))

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, done: bool) -> None:
        """transformers sets this after it has filled the gain of a class named RMSNorm with 1, whatever its offset is.

        It does so in _initialize_weights of transformers/modeling_utils.py. Meanwhile the functions of torch.nn.init
        are those of transformers/initialization.py, which leave a parameter that was loaded from a file as it is. At
        another time nobody knows which parameters were loaded, and nothing is changed.
        """
        self.__dict__["_is_hf_initialized"] = done
        offset, weight = self.variant.scale_offset, self._parameters.get("weight")
        if done and offset and weight is not None and init.constant_.__module__ != init.__name__:
            with suppress(RuntimeError):  # it has no values, on the meta device or in a compiler
                if bool((weight == 1).all()):  # other values are those that the model chose
                    init.constant_(weight, 1 - offset)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, residual: Tensor | None = None, gate: Tensor | None = None
    ) -> Any:
        """Normalize x, or h = x + residual.

        Args:
            x: floating-point, of a shape that ends in normalized_shape.
            mask: bool, broadcasting to x: True counts in the statistic. Elsewhere y is normalised likewise but constant
                to every derivative, and a row with nothing counted gives 0.
            residual: added to x first, in promote(x, residual).
            gate: z, shaped as x: y is multiplied by f(z), or h is before it is normalised, as ``gate_function`` and
                ``gate_position`` of the variant say.

        Returns:
            y, shaped as x; with ``residual`` (y, x + residual).

        Raises:
            TypeError: x, the residual or the gate is not floating-point, the mask is not bool.
            ValueError: x does not end in normalized_shape, a mask, residual or gate does not fit x.

        Example:
            >>> import torch
            >>> y, h = RMSNorm(2, elementwise_affine=False)(torch.tensor([1.0, 3.0]), residual=torch.tensor([2.0, 1.0]))
            >>> y, h
            (tensor([0.8485, 1.1314]), tensor([3., 4.]))
        """
        parameters = self._parameters  # where Module.__getattr__ would look last, which takes a microsecond
        weight = parameters["weight"] if "weight" in parameters else self.weight  # noqa: SIM401  (get would look it up)
        bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401
        alone = (
            not is_dynamo_compiling() and mask is None and type(x) is Tensor and not x.is_nested
            and not is_transformed() and not has_tangents()
        )  # fmt: skip
        if alone:
            attributes = self.eps, self.variant, self.normalized_shape
            if gate is None and (y := repeat(self._kept, attributes, x, residual, weight, bias)) is not None:
                return y
        out_dtype, axes = None, tuple(range(-len(self.normalized_shape), 0))
        if not isinstance(x, Tensor):
            if isinstance(x, torch.fx.Proxy) and x.tracer.root is not self:  # one node of the graph, as the built-in is
                options = {"mask": mask, "residual": residual, "gate": gate}
                tensors = {name: tensor for name, tensor in options.items() if tensor is not None}
                return x.tracer.create_proxy("call_module", x.tracer.path_of_module(self), (x,), tensors)
        elif x.is_nested and x.layout is torch.strided and mask is residual is gate is None:
            return torch.nested.as_nested_tensor([self.forward(part) for part in x.unbind()])
        elif x.shape[axes[0] :] != self.normalized_shape:
            why = f"normalized_shape, x being {errors.describe(x.shape, dtype_name(x.dtype))}"
            raise errors.wrong_shape("RMSNorm", "the end of x", x.shape[axes[0] :], self.normalized_shape, why)
        elif may_differ(x.device.type):
            out_dtype = built_in_dtype(self.variant.name, x, weight, residual)
        if alone and out_dtype is None:
            call = self.variant, self.eps, None, axes, None, None
            return compute(call, False, x, weight, bias, None, residual, gate, layer=self, attributes=attributes)
        return rms_norm(
            x, weight, bias, variant=self.variant, eps=self.eps, axis=axes, mask=mask, residual=residual, gate=gate,
            out_dtype=out_dtype,
        )  # fmt: skip

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: Tensor, mask: Tensor | None = None, residual: None = None, gate: Tensor | None = None
        ) -> Tensor: ...
        @overload
        def __call__(
            self, x: Tensor, mask: Tensor | None, residual: Tensor, gate: Tensor | None = None
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, x: Tensor, mask: Tensor | None = None, *, residual: Tensor, gate: Tensor | None = None
        ) -> tuple[Tensor, Tensor]: ...
        def __call__(self, x: Tensor, *others: Any, **options: Any) -> Any: ...

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}  # of this process alone

    def __prepare_scriptable__(self) -> Any:
        raise errors.not_scripted("RMSNorm")

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        if (self.bias is not None) != self.variant.bias:
            shown += f", bias={self.bias is not None}"
        if self.variant.partial is not None:
            shown += f", partial={self.variant.partial}"
        if (label := self.variant.replace(partial=None).label) != "torch":
            shown += f", variant={label!r}"
        return f"{shown}, computed by rmsnorm" if "_is_replaced" in self.__dict__ else shown


def _sizes(normalized_shape: Any) -> tuple[int, ...]:
    sizes = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    if not sizes or not all(isinstance(size, (int, Integral)) and int(size) >= 0 for size in sizes):
        want = "one size >= 0 or a sequence of them"
        raise errors.out_of_domain("RMSNorm", "normalized_shape", normalized_shape, want, "pass the end of x.shape")
    return tuple(int(size) for size in sizes)


def _is_no_layer_norm(norm: RMSNorm, inputs: Any) -> None:
    """A hook that does nothing, by which the encoder layer of PyTorch sees that it must call the norm."""


def _mark(parent: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """Keep torch.nn.TransformerEncoderLayer from computing LayerNorm with the parameters of our norm.

    In evaluation without gradients it takes the eps, weight and bias of its norms to one operator for the whole layer,
    whatever the classes of the norms are, unless a module in it has a hook before or after its forward
    (torch/nn/modules/transformer.py, why_not_sparsity_fast_path). Elsewhere a hook would cost time in every call.
    """
    if (
        isinstance(child, RMSNorm)
        and isinstance(parent, torch.nn.TransformerEncoderLayer)
        and _is_no_layer_norm not in child._forward_pre_hooks.values()
    ):
        child.register_forward_pre_hook(_is_no_layer_norm)


register_module_module_registration_hook(_mark)
