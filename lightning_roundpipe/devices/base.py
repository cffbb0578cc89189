"""What the pipeline asks of a device."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Traffic:
    """Bytes moved between host memory and a device. On a virtual device nothing is copied: what would have been.

    A stage's parameters come up, and its gradients come down, once for all microbatches. A call's inputs come down to
    be kept for the recompute, and up again for it; those of a stage's first call come from another device, by the host.
    """

    parameters_up: int = 0
    activations_up: int = 0
    gradients_down: int = 0
    activations_down: int = 0

    @property
    def up(self) -> int:
        """Host to device."""
        return self.parameters_up + self.activations_up

    @property
    def down(self) -> int:
        """Device to host."""
        return self.gradients_down + self.activations_down


class Device(ABC):
    """A stateless worker: parameters come up for a stage, are used by its calls, and are dropped.

    The calls of one device never overlap (its turnstile sees to that), so a device needs no lock of its own.
    """

    name: str
    torch_device: torch.device
    shares_host_generator: bool
    """Whether layers draw from the process's own generator here, which user code draws from, too."""

    is_host = False
    """Whether its memory is the host's."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    @abstractmethod
    def begin_stage(self, stage: Hashable) -> None:
        """Parameters that are uploaded from now on stay until another stage begins."""

    @abstractmethod
    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of a layer, on this device, as leaves that autograd can take gradients of."""

    @abstractmethod
    def to_device(self, tensor: Tensor) -> Tensor:
        """An activation, on this device."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A gradient or a result, in host memory."""

    @abstractmethod
    def keep_input(self, tensor: Tensor, *, copy: bool) -> Tensor:
        """A call's input, kept in host memory for the recompute; a true copy where asked for."""

    @abstractmethod
    def running(self) -> AbstractContextManager[None]:
        """Around everything that runs on the device."""

    @abstractmethod
    def in_thread(self) -> AbstractContextManager[None]:
        """Around everything that a thread does with tensors that may be on devices of this kind."""

    @abstractmethod
    def random_state(self) -> Tensor | None:
        """The state of its own generator, or None where it has none."""

    @abstractmethod
    def set_random_state(self, state: Tensor | None) -> None:
        """Puts its own generator into a state."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds its own generator."""
