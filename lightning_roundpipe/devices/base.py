"""What the pipeline asks of a device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Device(ABC):
    """A stateless worker: parameters come up for a stage, are used by its calls, and are dropped.

    The calls of one device never overlap (its turnstile sees to that), so a device needs no lock of its own.
    """

    name: str
    torch_device: torch.device
    shares_host_generator: bool
    """Whether layers draw from the process's own generator here, which user code draws from, too."""

    @abstractmethod
    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of a layer, on this device, as leaves that autograd can take gradients of."""

    @abstractmethod
    def to_device(self, tensor: Tensor) -> Tensor:
        """An activation, on this device."""

    @abstractmethod
    def keep_input(self, tensor: Tensor, *, copy: bool) -> Tensor:
        """A call's input, kept in host memory for the recompute; a true copy where asked for."""

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Around everything that runs on the device."""
