"""Layers that take a given time without holding the interpreter or a core, so that many virtual devices run on few
cores: forward the time given, backward twice that.
"""

import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from lightning_roundpipe.pipeline.weight_gradients import OPERATIONS, Operation


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(x, weight)  # else torch's checkpoint would have nothing to compute again
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        time.sleep(2 * ctx.seconds)
        return gradient * weight, (gradient * x).sum().reshape(1), None


@wrap_torch_function(lambda x, weight, seconds: (x,))
def sleeping(x: Tensor, weight: Tensor, seconds: float) -> Tensor:
    result: Tensor = _Sleeps.apply(x, weight, seconds)
    return result


class _SleepingOperation(Operation):
    """The same in two halves: the gradient of the input, and of the weight."""

    names = ("x", "weight", "seconds")

    def __init__(self, weight: Tensor, seconds: float) -> None:
        self.weight, self.bias, self._seconds = weight, None, seconds

    def takes(self, x: Tensor) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return x * self.weight.detach()

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        time.sleep(self._seconds)
        return gradient * self.weight.detach()

    def weight_gradients(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(self._seconds)
        return (gradient * x).sum().reshape(1), None


OPERATIONS[sleeping] = _SleepingOperation


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return sleeping(x, self.weight, self.seconds)


class Sleepers(L.LightningModule):
    """Layers whose forwards take these times, in seconds."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, seconds))

    def training_step(self, x: Tensor, index: int = 0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)
