"""A real accelerator, as far as :class:`AcceleratorDevice` needs it, by torch's device-neutral API."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from lightning_roundpipe.devices.simulated import SimulatedDevice, simulated_device


class Generator(Protocol):
    """A device's random number generator."""

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor) -> Any: ...

    def manual_seed(self, seed: int) -> Any: ...


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

    def stream(self, name: str = "") -> torch.Stream:
        """A new stream. Those of torch have no names."""
        return torch.Stream(self.torch_device)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """Within it, this thread's operations on the device go to a stream, and new tensors to the device."""
        with stream:
            yield

    def running(self) -> AbstractContextManager[Any]:
        """Around what runs on the device: tensors that are made on "the" accelerator are on this one."""
        return torch.get_device_module(self.torch_device).device(self.torch_device)

    def in_thread(self) -> AbstractContextManager[None]:
        """Around what a thread does with its tensors."""
        return nullcontext()


def hardware_of(torch_device: torch.device) -> TorchHardware | SimulatedDevice:
    """What stands for a device that tensors can be on; ``meta:k`` is the simulated device k.

    Raises:
        ValueError: When the device has no index.
    """
    if torch_device.index is None:
        raise ValueError(f"{torch_device} has no index, so it is not said which device is meant.")
    return simulated_device(torch_device) if torch_device.type == "meta" else TorchHardware(torch_device)
