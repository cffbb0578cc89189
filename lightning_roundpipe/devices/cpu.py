"""A virtual device: a share of the CPU's cores. Parameters and activations are in place already."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import Device


class CpuDevice(Device):
    """Runs its calls on ``threads`` cores, reading the host's parameters where they lie."""

    shares_host_generator = True

    def __init__(self, index: int, threads: int) -> None:
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self._threads = threads

    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def keep_input(self, tensor: Tensor, *, copy: bool) -> Tensor:
        return tensor.clone() if copy else tensor

    @contextmanager
    def running(self) -> Iterator[None]:
        # OpenMP's thread count belongs to the calling thread: no other device and no user code is affected.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        yield
