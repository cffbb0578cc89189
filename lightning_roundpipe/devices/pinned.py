"""Host memory that lasts, and that a device copies from and to by itself.

Torch's own pinned memory comes in powers of two, and is kept for later use: right for what is staged and let go of
again, too much for gradients, and for copies of parameters. For these, pages of our own are registered with the device,
where that can be done (CUDA's runtime, and ROCm's).
"""

import ctypes
import mmap
import weakref
from math import prod
from typing import Any

import torch
from torch import Tensor

_WORTH_PAGES = 2**20
"""Bytes. What is smaller does not matter, and to register it would take longer than it saves."""
_PORTABLE = 1
"""For all devices, in CUDA's words."""


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a tensor made like this one: its own, unless it is a part of a larger one and has gaps."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def pinned_memory(like: Tensor, dtype: torch.dtype, runtime: Any | None) -> Tensor:
    """Pinned memory for a tensor of this shape and these strides, without gaps. Its contents mean nothing.

    Args:
        like: A strided tensor.
        dtype: The type.
        runtime: CUDA's runtime (``torch.cuda.cudart()``), if there is one.

    Raises:
        RuntimeError: When the system does not let the memory be pinned.
    """
    count = prod(like.shape)
    if runtime is not None and (nbytes := count * dtype.itemsize) >= _WORTH_PAGES:
        pages = _registered(nbytes, runtime)
        return torch.frombuffer(pages, dtype=dtype, count=count).as_strided(like.size(), dense_strides(like))
    return torch.empty_strided(like.size(), dense_strides(like), dtype=dtype, device="cpu", pin_memory=True)


def _registered(nbytes: int, runtime: Any) -> Any:
    """Pages that devices reach until nobody holds them any more."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_DONTFORK"):  # a page that a child process shares would move away from under the device
        memory.madvise(mmap.MADV_DONTFORK)
    pages = (ctypes.c_char * size).from_buffer(memory)
    address = ctypes.addressof(pages)
    if (error := runtime.cudaHostRegister(address, size, _PORTABLE)) != runtime.cudaError.success:
        raise RuntimeError(
            f"{size} bytes of host memory cannot be pinned ({runtime.cudaGetErrorString(error)}). Raise the limit of"
            " locked memory (ulimit -l), or train with fewer parameters."
        )
    weakref.finalize(pages, runtime.cudaHostUnregister, address)  # before the memory itself goes
    return pages
