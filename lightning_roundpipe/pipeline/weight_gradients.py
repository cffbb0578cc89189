"""Weight gradients left for later: what a schedule's ``W`` actions do.

Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2: the backward of a linear map falls into two
matrix products, and only that of the input's gradient is waited for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_roundpipe.devices import SimulatedTensor

Found = list[tuple[Tensor, Tensor]]
"""Parameters and their gradients."""


class DeferredWeights(TorchFunctionMode):
    """In force while a layer is recomputed and differentiated.

    Linear maps and convolutions by the layer's own weights then give their inputs' gradients only. :meth:`gradients`
    computes those of the weights. Whatever else has parameters is differentiated as a whole.

    Args:
        parameters: The layer's own, where it runs.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.parameters = parameters
        self._later: list[Callable[[], Found]] = []
        with torch.enable_grad():
            self._token = torch.empty(0, requires_grad=True).clone()
        """Differentiated for, too: so that the backward also visits what leads to no other input."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = OPERATIONS.get(func)
        if kind is not None and torch.is_grad_enabled():
            x, *settings = _in_order(kind.names, args, kwargs)
            operation = kind(*settings)
            if self._may_wait(operation, x) and operation.takes(x):
                return _InputGradient.apply(operation, self._later, self._token, x)
        return func(*args, **kwargs)

    def differentiate(
        self, outputs: Sequence[Tensor | GradientEdge], targets: Sequence[Any], seeds: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """As :func:`torch.autograd.grad`, with the mode in force: a checkpoint in the layer runs part of it again."""
        with self:
            found: tuple[Tensor | None, ...] = _engine_run_backward(
                tuple(outputs), tuple(seeds), False, False, (*targets, self._token), True, accumulate_grad=False
            )
        return found[:-1]

    def _may_wait(self, operation: "Operation", x: Tensor) -> bool:
        bias = operation.bias
        return (
            self._owns(operation.weight)
            and (bias is None or not bias.requires_grad or self._owns(bias))
            and all(tensor is None or _is_plain(tensor) for tensor in (x, operation.weight, bias))
            and not _is_transformed()
        )

    def _owns(self, tensor: Tensor) -> bool:
        return any(tensor is parameter for parameter in self.parameters) and tensor.requires_grad

    @property
    def waiting(self) -> bool:
        """Whether any gradient is left to compute."""
        return bool(self._later)

    def gradients(self) -> Found:
        """The gradients that were left, use by use, last use first."""
        later, self._later = self._later, []
        with torch.no_grad():
            return [pair for compute in later for pair in compute()]


class Operation(ABC):
    """An operation by a weight, and a bias if there is one."""

    names: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None

    @abstractmethod
    def takes(self, x: Tensor) -> bool:
        """Whether it can be taken apart for this input."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Itself differentiable for the weight: a layer may take gradients in its forward."""

    @abstractmethod
    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def found(self, x: Tensor, gradient: Tensor) -> Found:
        """The parameters' gradients. Under autocast the products are taken in the type of the output."""
        weight, bias = self.weight_gradients(x.to(gradient.dtype), gradient)
        pairs = [(self.weight, weight)]
        if self.bias is not None and self.bias.requires_grad and bias is not None:
            pairs.append((self.bias, bias))
        return [(parameter, value.to(parameter.dtype)) for parameter, value in pairs]


class _Linear(Operation):
    names = ("input", "weight", "bias")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def takes(self, x: Tensor) -> bool:
        return self.weight.ndim == 2 and (self.bias is None or self.bias.shape == self.weight.shape[:1])

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.detach(), None if self.bias is None else self.bias.detach())

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        return gradient @ self.weight.to(gradient.dtype)

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        rows = gradient.shape[:-1].numel()
        gradient = gradient.reshape(rows, gradient.shape[-1])
        return gradient.t() @ x.reshape(rows, x.shape[-1]), gradient.sum(0)


class _Convolution(Operation):
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> None:  # fmt: skip
        self.weight, self.bias = weight, bias
        self._settings = stride, padding, dilation, groups
        self._dims = weight.ndim - 2

    def takes(self, x: Tensor) -> bool:
        return x.ndim == self.weight.ndim and not isinstance(self._settings[1], str)

    def forward(self, x: Tensor) -> Tensor:
        run = (functional.conv1d, functional.conv2d, functional.conv3d)[self._dims - 1]
        return run(x, self.weight.detach(), None if self.bias is None else self.bias.detach(), *self._settings)

    def _backward(self, x: Tensor, gradient: Tensor, mask: list[bool]) -> Any:
        stride, padding, dilation = (
            [value] * self._dims if isinstance(value, int) else list(value) for value in self._settings[:3]
        )
        return torch.ops.aten.convolution_backward(
            gradient, x.to(gradient.dtype), self.weight.to(gradient.dtype), [self.weight.shape[0]], stride,
            padding, dilation, False, [0] * self._dims, self._settings[3], mask,
        )  # fmt: skip

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        found: Tensor = self._backward(x, gradient, [True, False, False])[0]
        return found

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        _, weight, bias = self._backward(x, gradient, [False, True, self.bias is not None])
        return weight, bias


OPERATIONS: dict[Any, Any] = {
    functional.linear: _Linear,
    functional.conv1d: _Convolution,
    functional.conv2d: _Convolution,
    functional.conv3d: _Convolution,
}
"""How each function is taken apart."""


def _in_order(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments by position, as far as they are given one after the other."""
    given = dict(zip(names, args, strict=False)) | kwargs
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return [given[name] if name in given else defaults[name] for name in names]


def _is_plain(tensor: Tensor) -> bool:
    """Neither complex, whose products are with the conjugate, nor sparse, nested or of a type of somebody's own."""
    return (
        type(tensor) in (Tensor, nn.Parameter, SimulatedTensor)
        and tensor.layout == torch.strided
        and not tensor.is_complex()
    )


def _is_transformed() -> bool:
    """Whether a transform such as ``vmap`` or ``jvp`` is at work, which would have to know of our function."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class _InputGradient(torch.autograd.Function):
    """The operation, with the gradients of its parameters left for later."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, later: list[Callable[[], Found]], token: Tensor, x: Tensor) -> Tensor:
        ctx.operation, ctx.later = operation, later
        ctx.token_node = get_gradient_edge(token).node
        ctx.save_for_backward(x, operation.weight)  # so that autograd sees if one is changed in place before backward
        ctx.set_materialize_grads(False)
        return operation.forward(x).detach()  # no view of what is in here, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None
        x = ctx.saved_tensors[0].detach()
        if torch._C._will_engine_execute_node(ctx.token_node):  # not where the layer itself takes a gradient
            ctx.later.append(partial(_found_later, ctx.operation, x, x._version, gradient, gradient._version))
        wanted = ctx.needs_input_grad[3]
        return None, None, None, ctx.operation.input_gradient(x, gradient).to(x.dtype) if wanted else None


def _found_later(operation: Operation, x: Tensor, x_version: int, gradient: Tensor, gradient_version: int) -> Found:
    """The parameters' gradients, of what was there in the backward."""
    if (x._version, gradient._version) != (x_version, gradient_version):
        raise RuntimeError(
            "An input or a gradient of a linear map or convolution was changed in place after its backward, before the"
            " schedule's weight gradients were computed of it. A hook on a gradient should return a new tensor"
            " (gradient.clamp(...) instead of gradient.clamp_(...)), and a batch's tensors must not be overwritten"
            " while it is trained with; or use a schedule that leaves no weight gradients for later."
        )
    return operation.found(x, gradient)
