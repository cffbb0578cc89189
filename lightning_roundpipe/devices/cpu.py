"""A virtual device: a share of the CPU's cores. Parameters and activations are in place already."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices.base import Device
from lightning_roundpipe.devices.stopwatch import HostStopwatch

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


class CpuDevice(Device):
    """Runs its calls on ``threads`` cores, reading the host's parameters where they lie."""

    autocast = "cpu"
    shares_host_generator = True
    is_host = True

    def __init__(self, index: int, threads: int) -> None:
        super().__init__()
        self.name = f"cpu:{index}"
        self.torch_device = torch.device("cpu")
        self._threads = threads

    def begin_call(self, stage: Hashable) -> None:
        """Nothing: parameters are in place."""

    def begin_gradients(self) -> None:
        """Nothing."""

    def outlasting(self, tensors: Iterable[Any]) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing: what is done is done."""

    def let_go(self) -> None:
        """Nothing: nothing was."""

    def upload(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters)

    @property
    def uploaded(self) -> None:
        return None

    def reaches(self, place: torch.device) -> bool:
        return False

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, place: torch.device) -> Tensor:
        return tensor

    def bring_down(self, tensor: Tensor, *, copy: bool = False) -> Tensor:
        return tensor

    def keep_input(self, tensor: Tensor, *, copy: bool, stays: bool = False) -> Tensor:
        return copy_with_strides(tensor) if copy else tensor

    def release_inputs(self, kept: Iterable[Any]) -> None:
        """Nothing: nobody reads them."""

    def host_memory(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)

    def staged(self, tensor: Tensor) -> Tensor:
        return tensor

    def stopwatch(self) -> HostStopwatch:
        return HostStopwatch()

    def running(self) -> AbstractContextManager[None]:
        # OpenMP's thread count belongs to the calling thread: no other device and no user code is affected.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        return nullcontext()

    def in_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def total_memory(self) -> None:
        return None

    def free_memory(self) -> None:
        return None

    def most_held(self) -> None:
        return None

    def random_state(self) -> Tensor | None:
        return None

    def set_random_state(self, state: Tensor | None) -> None:
        """Nothing: there is no generator but the host's."""

    def seed(self, seed: int) -> None:
        """Nothing, likewise."""


def copy_with_strides(tensor: Tensor) -> Tensor:
    """A copy with the same strides and alignment: kernels choose their way, and so the last bits, by them."""
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_quantized:
        return tensor.clone()
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    item = tensor.element_size()
    memory = torch.empty(reach + _ALIGNMENT // item, dtype=tensor.dtype, device=tensor.device)
    start = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNMENT // item
    memory[start : start + reach].copy_(tensor.as_strided((reach,), (1,), tensor.storage_offset()))
    return memory.as_strided(tensor.shape, tensor.stride(), start)
