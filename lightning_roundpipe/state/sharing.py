"""Who else holds a tensor, or its memory, and so may change it in place."""

import sys
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor


def is_shared(tensor: Tensor) -> bool:
    """Whether there are other tensors with the same memory, besides the one that it is a view of."""
    alone = tensor.new_empty(0, 0)
    if tensor._is_view():  # gradients of weights often are views of views, of which some kinds of tensors keep each
        alone = alone.t().t()
    return _memory_uses(tensor) > _memory_uses(alone)


def is_held(tensor: Tensor) -> bool:
    """Whether anybody but the caller's one variable may hold the tensor, or another one with the same memory. Of a
    sparse tensor it is not known who holds its parts."""
    if tensor.layout != torch.strided:
        return True
    base = tensor._base
    if base is not None and sys.getrefcount(base) > _references()[0]:
        return True
    return sys.getrefcount(tensor) > _references()[1] or is_shared(tensor)


def _memory_uses(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@cache
def _references() -> tuple[int, int]:
    """What Python counts where nobody else holds it: for what a view is a view of, in a variable, and for a tensor in
    the variable of a caller."""

    def in_called(tensor: Tensor) -> int:
        return sys.getrefcount(tensor)

    view = torch.empty(0, 0).t()
    base = view._base
    return sys.getrefcount(base), in_called(view)


def memory_of(tensor: Tensor) -> int | None:
    """Where a tensor's memory is, if it has any."""
    if tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one and the same part of memory, laid out alike."""
    return tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.stride() == other.stride()


def share_memory(tensors: Iterable[Tensor]) -> bool:
    memories = [memory for tensor in tensors if (memory := memory_of(tensor)) is not None]
    return len(set(memories)) < len(memories)


def version_of(tensor: Tensor) -> Tensor:
    """Counts the changes of a tensor without keeping its memory."""
    counter = tensor.detach()
    counter.data = counter.new_empty(0)
    return counter
