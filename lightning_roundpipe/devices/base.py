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
    """Bytes moved to and from a device. On a virtual device nothing is copied: what would have been.

    A stage's parameters come up, and its gradients come down, once for all microbatches. A call's inputs come down to
    be kept for the recompute, and up again for it; those of a stage's first call come from another device: by the host,
    or across, where the devices reach one another.
    """

    parameters_up: int = 0
    activations_up: int = 0
    gradients_down: int = 0
    activations_down: int = 0
    across: int = 0
    """From other devices, past the host."""

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


class Timestamp(Protocol):
    """An event that knows when it was: ``torch.Event(enable_timing=True)``, or a simulated device's."""

    def query(self) -> bool:
        """Whether it has been."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this one to another one. Both have been."""


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


class Stopwatch(Protocol):
    """Measures how long a device works. It runs from the beginning.

    Attributes:
        started: When it began, by the host's clock (:func:`time.perf_counter`).
        stopped: When it was stopped, likewise.
    """

    started: float
    stopped: float

    def leave_out(self, wait: Callable[[], None]) -> None:
        """Lets the device wait for something, which is no work of its own."""

    def stop(self) -> None:
        """The end."""

    def seconds(self) -> float | None:
        """How long it ran. None while the device has not done the work yet."""


class Hardware(Protocol):
    """An accelerator."""

    name: str
    torch_device: torch.device
    autocast: str
    """The kind of device whose autocast is in force for what runs on it."""

    @property
    def generator(self) -> Generator:
        """The one that layers draw from."""

    @property
    def current_stream(self) -> Any:
        """The stream that this thread's work on the device goes to."""

    def stream(self, name: str) -> Any:
        """A new stream."""

    def stopwatch(self, stream: Any) -> Stopwatch:
        """For the work of a stream."""

    def host_memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory for a tensor of this shape and these strides, from which and to which the device copies while the
        host goes on. Its contents mean nothing."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within it, this thread's work on the device goes to a stream. May be entered again."""

    def timestamp(self, stream: Any) -> Timestamp:
        """The time at which a stream has done what it was given so far."""

    def in_thread(self) -> AbstractContextManager[Any]:
        """Around what a thread does with tensors on such devices."""

    def reaches(self, other: torch.device) -> bool:
        """Whether another device's tensors can be copied to it without going by host memory."""

    def total_memory(self) -> int | None:
        """All its bytes, or None where there is no limit."""

    def free_memory(self) -> int | None:
        """The bytes that can be counted on, or None where there is no limit."""

    def held_memory(self) -> int:
        """The bytes that tensors of this process hold."""

    def peak_memory(self) -> int:
        """The most bytes that they have held since :meth:`reset_peak_memory`."""

    def reset_peak_memory(self) -> None:
        """Begins to look for the most anew."""

    def mark(self, stream: Any) -> Mark:
        """Marks the end of what a stream was given so far."""


def arrived(tensor: Tensor) -> Tensor:
    """The same tensor in host memory, after the host has waited for it to come down, if it has to."""
    if (event := arrival(tensor)) is not None:
        event.synchronize()
        del tensor.arrival  # type: ignore[attr-defined]
    return tensor


def arrival(tensor: Tensor) -> Event | None:
    """When a tensor will have come down to host memory, if that is still to be waited for."""
    return getattr(tensor, "arrival", None)


class Device(ABC):
    """A stateless worker: parameters come up for a stage, are used by its calls, and are dropped.

    The calls of one device never overlap (its turnstile sees to that), so a device needs no lock of its own.
    """

    name: str
    torch_device: torch.device
    autocast: str
    """The kind of device whose autocast is in force for what runs on it."""
    shares_host_generator: bool
    """Whether layers draw from the process's own generator here, which user code draws from, too."""

    is_host = False
    """Whether its memory is the host's."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    @property
    def upload_wait_seconds(self) -> float | None:
        """How long its layers have waited for what was on its way up, or None where that is not measured."""
        return None

    @property
    def peak_memory(self) -> int | None:
        """The most bytes that it has held at a time, or None where its memory is not its own."""
        return None

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
    def let_go(self) -> None:
        """Lets go of what was brought up, after the last call, and settles."""

    @abstractmethod
    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The parameters of a layer, on this device, as leaves that autograd can take gradients of."""

    @property
    @abstractmethod
    def uploaded(self) -> Event | None:
        """When the last of these has been read, if that is later than now."""

    @abstractmethod
    def reaches(self, place: torch.device) -> bool:
        """Whether tensors come here from another device of the pipeline without going by host memory."""

    @abstractmethod
    def to_device(self, tensor: Tensor) -> Tensor:
        """An activation, on this device."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A gradient or a result, in host memory."""

    @abstractmethod
    def bring_down(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        """A result of any device, in host memory, where it is when it has arrived; see :func:`arrived`. Until then it
        must not be changed in place on the device, but where that is copied first."""

    @abstractmethod
    def send(self, tensor: Tensor, place: torch.device) -> Tensor:
        """The gradient of an activation that came from another place, there."""

    @abstractmethod
    def host_memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory for a tensor of this shape and these strides, whose contents mean nothing yet. What lies there
        can be copied to the device, and back, while the host goes on, if it may be pinned."""

    @abstractmethod
    def staged(self, tensor: Tensor) -> Tensor:
        """What a copy of a host tensor goes up from while the host goes on: a copy that nobody else writes to. It is
        the tensor itself where there may be none, and the host is to wait."""

    @abstractmethod
    def stopwatch(self) -> Stopwatch:
        """For one call's work."""

    @abstractmethod
    def keep_input(self, tensor: Tensor, *, copy: bool, stays: bool = False) -> Tensor:
        """A call's input, kept for the recompute: in host memory, or on this device if it stays; as a true copy where
        it may be changed in place."""

    @abstractmethod
    def release_inputs(self, kept: Iterable[Any]) -> None:
        """What was kept of a call's inputs is not needed: they may be changed in place from now on."""

    @abstractmethod
    def running(self) -> AbstractContextManager[Any]:
        """Around everything that runs on the device."""

    @abstractmethod
    def in_thread(self) -> AbstractContextManager[Any]:
        """Around everything that a thread does with tensors that may be on devices of this kind."""

    @abstractmethod
    def total_memory(self) -> int | None:
        """All its bytes, or None where it has none of its own, or as many as it takes."""

    @abstractmethod
    def free_memory(self) -> int | None:
        """The bytes that can be counted on, or None likewise."""

    @abstractmethod
    def most_held(self) -> int | None:
        """The most bytes that it has held since it was last asked, besides those of uploaded parameters, or None where
        that is not counted."""

    @abstractmethod
    def random_state(self) -> Tensor | None:
        """The state of its own generator, or None where it has none."""

    @abstractmethod
    def set_random_state(self, state: Tensor | None) -> None:
        """Puts its own generator into a state."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seeds its own generator."""
