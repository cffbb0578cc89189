"""What the pipeline asks of a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

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


Mark = Callable[[], float]
"""When a stream has done what it was given before, in seconds of :func:`time.perf_counter`; to be asked afterwards."""


class Event(Protocol):
    """A mark in the work that a device was given: ``torch.Event``, or a simulated device's."""

    def synchronize(self) -> None:
        """The host waits until the work before it is done."""


class Stream(Protocol):
    """Work of a device that is done in its order: ``torch.Stream``, or a simulated device's."""

    def record_event(self) -> Any:
        """An event after all that it was given so far."""

    def wait_event(self, event: Any) -> None:
        """What it is given from now on comes after the event. The host does not wait."""


class Generator(Protocol):
    """A device's random number generator."""

    def get_state(self) -> Tensor: ...

    def set_state(self, state: Tensor) -> Any: ...

    def manual_seed(self, seed: int) -> Any: ...


class Hardware(Protocol):
    """An accelerator."""

    name: str
    torch_device: torch.device

    @property
    def generator(self) -> Generator:
        """The one that layers draw from."""

    def stream(self, name: str) -> Any:
        """A new stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, this thread's work on the device goes to a stream. May be entered again."""

    def in_thread(self) -> AbstractContextManager[Any]:
        """Around what a thread does with tensors on such devices."""

    def mark(self, stream: Any) -> Mark:
        """Marks the end of what a stream was given so far."""


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
    def begin_call(self, stage: Hashable) -> None:
        """A call's first run, or its backward, begins. Parameters that are uploaded from now on stay until calls of
        another stage begin."""

    @abstractmethod
    def begin_gradients(self) -> None:
        """A call's gradients are computed from now on."""

    @abstractmethod
    def outlasting(self, tensors: Iterable[Any]) -> None:
        """Of a call: they may be used when its stage is over, and be what was brought up for it, or parts of that."""

    @abstractmethod
    def settle(self) -> None:
        """The host waits until all is done that the device was given."""

    @abstractmethod
    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of a layer, on this device, as leaves that autograd can take gradients of."""

    @property
    @abstractmethod
    def uploaded(self) -> Event | None:
        """When the last of these has been read, if that is later than now."""

    @abstractmethod
    def to_device(self, tensor: Tensor) -> Tensor:
        """An activation, on this device."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A gradient or a result, in host memory."""

    @abstractmethod
    def send(self, tensor: Tensor, place: torch.device) -> Tensor:
        """The gradient of an activation that came from another place, there."""

    @abstractmethod
    def bring_gradient_down(self, gradient: Tensor, memory: Tensor) -> Event:
        """Copies a gradient of this device into host memory, where it is after the event."""

    @abstractmethod
    def keep_input(self, tensor: Tensor, *, copy: bool) -> Tensor:
        """A call's input, kept in host memory for the recompute; a true copy where asked for."""

    @abstractmethod
    def running(self) -> AbstractContextManager[Any]:
        """Around everything that runs on the device."""

    @abstractmethod
    def in_thread(self) -> AbstractContextManager[Any]:
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
