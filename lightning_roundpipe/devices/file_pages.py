"""Memory that is mapped from files, such as weights that ``torch.load(mmap=True)`` or safetensors have loaded.

What has been read of a file stays in the process's memory until the system takes it back. Where a device has a copy,
it is needed no longer: let go of, it is still in the system's cache of files, and the next upload finds it there, or on
the disk.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor

_IN_MEMORY, _SWAPPED, _OF_A_FILE = (numpy.uint64(1 << bit) for bit in (63, 62, 61))
_DONTNEED = 4


def release_file_pages(tensors: Iterable[Tensor]) -> None:
    """Lets go of the pages of files that the tensors' memory is mapped from. Values do not change: a page that has been
    written to is the process's own, and a tensor that has one keeps all it has.

    Only Linux tells which pages are which; elsewhere nothing happens.

    Args:
        tensors: In host memory. Nobody may write to them meanwhile.
    """
    with _page_map() as page_map:
        for tensor in tensors:
            first, count = _pages(tensor)
            if page_map is None:
                return
            # Of ordinary memory one look is enough.
            if count and _is_of_a_file(page_map, first, 1) and _is_of_a_file(page_map, first, count):
                length = ctypes.c_size_t(count * mmap.PAGESIZE)
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first * mmap.PAGESIZE), length, _DONTNEED)


def is_on_file(tensor: Tensor) -> bool:
    """Whether a tensor of some size in host memory is mapped from a file, where that can be told."""
    with _page_map() as page_map:
        first, count = _pages(tensor)
        return page_map is not None and count > 0 and _is_of_a_file(page_map, first, 1)


@contextmanager
def _page_map() -> Iterator[int | None]:
    try:
        page_map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield page_map
    finally:
        os.close(page_map)


def _pages(tensor: Tensor) -> tuple[int, int]:
    """The first of the pages that belong to a tensor alone, and how many these are."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        return 0, 0
    start = tensor.data_ptr()
    first, end = -(-start // mmap.PAGESIZE), (start + tensor.nbytes) // mmap.PAGESIZE
    return first, max(0, end - first)


def _is_of_a_file(page_map: int, first: int, pages: int) -> bool:
    """Whether all of these pages that are in memory are a file's, as it is."""
    entries = numpy.frombuffer(os.pread(page_map, 8 * pages, 8 * first), dtype=numpy.uint64)
    in_memory, of_a_file = (entries & _IN_MEMORY) != 0, (entries & _OF_A_FILE) != 0
    own = (entries & _SWAPPED) != 0
    return len(entries) == pages and not bool((own | (in_memory & ~of_a_file)).any())
