"""A real accelerator, as far as :class:`AcceleratorDevice` needs it, by torch's device-neutral API."""

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from lightning_roundpipe.devices.base import Generator, Mark
from lightning_roundpipe.devices.simulated import SimulatedDevice, simulated_device


class TorchHardware:
    """One accelerator of this machine.

    Args:
        torch_device: Which, with its index among those that are visible.

    Attributes:
        name: As torch writes it.
        generator: The one that layers draw from.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.name = str(torch_device)
        module = torch.get_device_module(torch_device)
        module.init()  # there are no generators before
        self.generator: Generator = module.default_generators[torch_device.index]
        self._reference: tuple[torch.Event, float] | None = None
        """A moment on the device's clock and on the host's."""

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

    def in_thread(self) -> AbstractContextManager[None]:
        """Around what a thread does with its tensors."""
        return nullcontext()

    def mark(self, stream: torch.Stream) -> Mark:
        """Marks the end of what a stream was given so far."""
        if self._reference is None:
            reference = self._timed_event(stream)
            reference.synchronize()
            self._reference = reference, time.perf_counter()
        return partial(self._seconds, self._timed_event(stream), *self._reference)

    def _timed_event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(stream)
        return event

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
