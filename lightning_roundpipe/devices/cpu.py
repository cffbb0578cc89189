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
        return copy_with_strides(tensor) if copy else tensor

    @contextmanager
    def running(self) -> Iterator[None]:
        # OpenMP's thread count belongs to the calling thread: no other device and no user code is affected.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        yield


def copy_with_strides(tensor: Tensor) -> Tensor:
    """A copy with the very same strides: kernels choose their way, and so the last bits, by them."""
    if tensor.is_sparse or tensor.layout != torch.strided:
        return tensor.clone()
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or tensor.numel() == 0:
        return copy
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((reach,), (1,), tensor.storage_offset()).clone()
    return flat.as_strided(tensor.shape, tensor.stride())
