"""Host memory that devices reach by themselves: as large as was asked for, and registered for as long as it is held.

CUDA's runtime is a stand-in here; `test_gpu.py` has the true one.
"""

import mmap
from types import SimpleNamespace

import pytest
import torch

from lightning_roundpipe.devices.pinned import dense_strides, pinned_memory


class Runtime:
    """Notes what is registered."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1, "for all devices"
        if self.answer == 0:
            self.registered[address] = size
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return f"error {error}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_its_own(dtype: torch.dtype) -> None:
    runtime = Runtime()
    like = torch.randn(1001, 700).t()
    tensor = pinned_memory(like, dtype, runtime)
    assert tensor.shape == like.shape and tensor.stride() == like.stride() and tensor.dtype == dtype
    ((address, size),) = runtime.registered.items()
    assert address == tensor.data_ptr() and address % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
    assert 0 <= size - tensor.numel() * dtype.itemsize < mmap.PAGESIZE
    assert torch.equal(tensor.copy_(like), like.to(dtype))
    part = tensor[3]
    del tensor
    assert runtime.registered and torch.equal(part, like[3].to(dtype)), "the view holds it"
    del part
    assert not runtime.registered


def test_gaps_are_left_out() -> None:
    like = torch.randn(600, 2000)[:, ::2]
    tensor = pinned_memory(like, torch.float32, Runtime())
    assert tensor.stride() == dense_strides(like) == (1000, 1)


def test_what_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"2002944 bytes of host memory cannot be pinned \(error 2\)"):
        pinned_memory(torch.empty(500, 1000), torch.float32, Runtime(answer=2))
