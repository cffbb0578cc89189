"""A real accelerator, as far as :class:`AcceleratorDevice` needs it, by torch's device-neutral API."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import Generator, Mark
from lightning_roundpipe.devices.pinned import pinned_memory
from lightning_roundpipe.devices.simulated import SimulatedDevice, simulated_device
from lightning_roundpipe.devices.stopwatch import EventStopwatch
from lightning_roundpipe.schedules.memory import USABLE


class TorchHardware:
    """One accelerator of this machine.

    Args:
        torch_device: Which, with its index among those that are visible.

    Attributes:
        name: As torch writes it.
        autocast: The kind of device whose autocast is in force.
        generator: The one that layers draw from.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.name = str(torch_device)
        self.autocast = torch_device.type
        module = torch.get_device_module(torch_device)
        module.init()  # there are no generators before
        self.generator: Generator = module.default_generators[torch_device.index]
        self._module = module
        self._reference: tuple[torch.Event, float] | None = None
        """A moment on the device's clock and on the host's."""

    @property
    def current_stream(self) -> torch.Stream:
        """The stream that this thread's work on the device goes to."""
        return torch.accelerator.current_stream(self.torch_device)

    def stream(self, name: str = "") -> torch.Stream:
        """A new stream. Those of torch have no names."""
        return torch.Stream(self.torch_device)

    def on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Within it, this thread's operations on the device go to a stream, and tensors that are made on "the"
        accelerator are on this one."""
        # An object of its own each time: it remembers what was current before, and several threads use the stream.
        return torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Around what a thread does with its tensors. It begins with the machine's first device, on which nothing is to
        be left: whatever comes back to that one would take some of its memory."""
        torch.accelerator.set_device_index(self.torch_device)
        yield

    def stopwatch(self, stream: torch.Stream) -> EventStopwatch:
        """For the work of a stream."""
        return EventStopwatch(partial(self.timestamp, stream))

    def timestamp(self, stream: torch.Stream) -> torch.Event:
        """The time at which a stream has done what it was given so far."""
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        return event

    def host_memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Pinned memory for a tensor of this shape and these strides.

        Raises:
            RuntimeError: When the system does not let it be pinned.
        """
        if self.torch_device.type != "cuda":
            return pinned_memory(like, dtype, None)
        try:
            return pinned_memory(like, dtype, torch.cuda.cudart())
        except RuntimeError:
            with suppress(RuntimeError):  # the runtime's last error, which torch would take for that of a later kernel
                torch.ones((), device=self.torch_device)
            raise

    def reaches(self, other: torch.device) -> bool:
        """Whether another device's tensors can be copied to it without going by host memory: torch tells of CUDA's and
        ROCm's devices only."""
        kinds = self.torch_device.type, other.type
        return kinds == ("cuda", "cuda") and torch.cuda.can_device_access_peer(self.torch_device, other)

    def total_memory(self) -> int:
        """All its bytes."""
        return self._module.mem_get_info(self.torch_device)[1]

    def free_memory(self) -> int:
        """The bytes that can be counted on: of those that nobody uses, or that torch keeps for the next tensors."""
        free, _ = self._module.mem_get_info(self.torch_device)
        kept = self._module.memory_reserved(self.torch_device) - self.held_memory()
        return int(USABLE * (free + kept))

    def held_memory(self) -> int:
        """The bytes that tensors of this process hold."""
        return self._module.memory_allocated(self.torch_device)

    def peak_memory(self) -> int:
        """The most bytes that they have held since :meth:`reset_peak_memory`."""
        return self._module.max_memory_allocated(self.torch_device)

    def reset_peak_memory(self) -> None:
        """Begins to look for the most anew."""
        self._module.reset_peak_memory_stats(self.torch_device)

    def mark(self, stream: torch.Stream) -> Mark:
        """Marks the end of what a stream was given so far."""
        if self._reference is None:
            reference = self.timestamp(stream)
            reference.synchronize()
            self._reference = reference, time.perf_counter()
        return partial(self._seconds, self.timestamp(stream), *self._reference)

    def _seconds(self, event: torch.Event, reference: torch.Event, at: float) -> float:
        event.synchronize()
        return at + reference.elapsed_time(event) / 1e3


def hardware_of(torch_device: torch.device) -> TorchHardware | SimulatedDevice:
    """What stands for a device that tensors can be on; ``meta:k`` is the simulated device k.

    Raises:
        ValueError: When the device has no index.
    """
    if torch_device.index is None:
        raise ValueError(f"{torch_device} has no index, so it is not said which device is meant.")
    return simulated_device(torch_device) if torch_device.type == "meta" else TorchHardware(torch_device)
