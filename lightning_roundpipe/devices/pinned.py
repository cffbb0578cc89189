"""Host memory that a device copies from and to by itself, and how much of it there may be.

Torch's own pinned memory comes in powers of two, and is kept for later use: right for what is staged and let go of
again, too much for gradients, and for copies of parameters. For these, pages of our own are registered with the device,
where that can be done (CUDA's runtime, and ROCm's).
"""

import ctypes
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_roundpipe.units import size_text

PinMemory: TypeAlias = bool | Literal["auto"]
"""Whether what copies go from and to is pinned; ``"auto"``: as much as may be."""

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
        raise RuntimeError(f"{size} bytes of host memory cannot be pinned ({runtime.cudaGetErrorString(error)})")
    weakref.finalize(pages, runtime.cudaHostUnregister, address)  # before the memory itself goes
    return pages


class Pinning:
    """Which of the host memory that copies go from and to is pinned. All devices of a pipeline have one.

    Args:
        wanted: True: all; False: none; ``"auto"``: as much as the system allows, and `most` does.
        most: With ``"auto"``, how many bytes at a time; None: as many as the system allows.
        warn: Told, once, when ``"auto"`` has come to its limit.
    """

    def __init__(
        self, wanted: PinMemory = True, most: int | None = None, warn: Callable[[str], None] = warnings.warn
    ) -> None:
        self.wanted = wanted
        self._most = most
        self._warn = warn
        self._held = 0
        self._lock = threading.RLock()  # what is freed may be so at any time, in this thread, too
        self._has_warned = False

    def memory(self, nbytes: int, pinned: Callable[[], Tensor], ordinary: Callable[[], Tensor]) -> Tensor:
        """A tensor in host memory.

        Args:
            nbytes: Its size.
            pinned: Makes it in pinned memory.
            ordinary: Makes it in memory of the ordinary kind.

        Raises:
            RuntimeError: All is to be pinned, and the system refuses.
        """
        if self.wanted is False:
            return ordinary()
        if not self._reserve(nbytes):
            self._say(f"{size_text(self._most or 0)} are pinned, as much as is sensible on this machine")
            return ordinary()
        try:
            made = pinned()
        except torch.OutOfMemoryError:  # of a device
            self._release(nbytes)
            raise
        except RuntimeError as error:
            self._release(nbytes)
            other = ordinary()  # raises what was no matter of pinning
            if self.wanted is True:
                raise RuntimeError(
                    f"The system does not let {size_text(nbytes)} more of host memory be pinned ({error}). Raise the"
                    " limit of locked memory (ulimit -l), or use RoundPipeStrategy(pin_memory='auto'), which pins what"
                    " can be, or pin_memory=False."
                ) from error
            with self._lock:
                self._most = self._held
            self._say(f"the system does not let {size_text(nbytes)} more be pinned ({error})")
            return other
        if self.wanted == "auto":
            weakref.finalize(made.untyped_storage(), self._release, nbytes).atexit = False
        return made

    def _reserve(self, nbytes: int) -> bool:
        with self._lock:
            if self.wanted == "auto" and self._most is not None and self._held + nbytes > self._most:
                return False
            self._held += nbytes
            return True

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self._held -= nbytes

    def _say(self, why: str) -> None:
        with self._lock:
            if self._has_warned:
                return
            self._has_warned = True
        self._warn(
            f"roundpipe: pin_memory='auto': of the host memory that is copied to devices and back {why}; the rest is"
            " ordinary memory. Numbers are the same, but for copies from and to it the host waits, so they take time"
            " beside computing. Raise the limit of locked memory (ulimit -l) and use"
            " RoundPipeStrategy(pin_memory=True), which pins all, or pin_memory=False to pin nothing."
        )


def check_pin_memory(wanted: object) -> None:
    """
    Raises:
        ValueError: It is neither True, nor False, nor ``"auto"``.
    """
    if not (isinstance(wanted, bool) or wanted == "auto"):
        raise ValueError(f"`pin_memory` must be True, False or 'auto', got {wanted!r}.")
