"""A device with memory of its own. Parameters and kept inputs are in host memory; what a call needs is copied up."""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.base import Device
from lightning_roundpipe.devices.cpu import copy_with_strides
from lightning_roundpipe.devices.file_pages import release_file_pages
from lightning_roundpipe.devices.hardware import TorchHardware
from lightning_roundpipe.devices.simulated import SimulatedDevice

_HOST = torch.device("cpu")


class AcceleratorDevice(Device):
    """Runs its calls on an accelerator.

    Args:
        hardware: The accelerator.
    """

    shares_host_generator = True

    def __init__(self, hardware: SimulatedDevice | TorchHardware) -> None:
        super().__init__()
        self.hardware = hardware
        self.name = hardware.name
        self.torch_device = hardware.torch_device
        self._stage: Hashable = None
        self._resident: dict[int, tuple[Tensor, Tensor]] = {}
        """The stage's parameters, by id, and what stands for them here."""

    def begin_stage(self, stage: Hashable) -> None:
        if stage != self._stage:
            self._stage, self._resident = stage, {}

    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        resident = self._resident
        for parameter in parameters:
            if id(parameter) not in resident:
                there = moved(parameter.detach(), self.torch_device)
                resident[id(parameter)] = parameter, nn.Parameter(there, requires_grad=parameter.requires_grad)
                if not parameter.requires_grad:
                    release_file_pages([parameter])
        return [resident[id(parameter)][1] for parameter in parameters]

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self.torch_device else moved(tensor.detach(), self.torch_device)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == _HOST else moved(tensor.detach(), _HOST)

    def keep_input(self, tensor: Tensor, *, copy: bool) -> Tensor:
        if tensor.device != _HOST:
            return self.to_host(tensor)
        return copy_with_strides(tensor) if copy else tensor

    def running(self) -> AbstractContextManager[None]:
        return self.hardware.running()

    def in_thread(self) -> AbstractContextManager[None]:
        return self.hardware.in_thread()

    def random_state(self) -> Tensor | None:
        return self.hardware.generator.get_state()

    def set_random_state(self, state: Tensor | None) -> None:
        if state is not None:
            self.hardware.generator.set_state(state)

    def seed(self, seed: int) -> None:
        self.hardware.generator.manual_seed(seed)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on another device with the same strides: what looks at a tensor's layout must see the same there."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return tensor.to(device)
    repeated = [dim for dim in range(tensor.dim()) if tensor.stride(dim) == 0 and tensor.size(dim) > 1]
    if repeated:
        once = tensor
        for dim in repeated:
            once = once.narrow(dim, 0, 1)
        return moved(once, device).expand(tensor.size())
    copy = tensor.to(device)
    if copy.stride() == tensor.stride() or tensor.numel() == 0:
        return copy
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device).copy_(copy)
