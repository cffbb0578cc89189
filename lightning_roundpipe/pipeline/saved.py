"""Early stop of the recompute: the first run's graph is kept without the tensors that it needs, and a second run of the
layer only brings these, up to the last one. What the layer computes after that, often its last linear map, runs once.

Each tensor must be the one that belongs to its place: type, shape, and two of its values are compared with the first
run's. If one differs, as where the layer looks at something more the second time, it is run to its end instead.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.decorators import skip
from torch.autograd.graph import GradientEdge


class Complete(BaseException):
    """Ends a recompute which has brought all that was missing. No error: the layer's code should not catch it."""


class MissingTensors:
    """What autograd would have saved in the first run, in order: empty places, until a second run fills them.

    Args:
        refusal: The error where one is asked for before.
    """

    __slots__ = ("_marks", "_refusal", "_tensors", "difference", "ended")

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._marks: list[Mark] = []
        self._tensors: list[tuple[Tensor, int] | None] = []
        self.ended = False
        """Whether the second run was stopped."""
        self.difference: str | None = None
        """What the second run did otherwise, in words."""

    def __len__(self) -> int:
        return len(self._marks)

    def leaving_out(self) -> AbstractContextManager[Any]:
        """In force during the first run."""
        return torch.autograd.graph.saved_tensors_hooks(self._number, self._take)

    def filling_in(self) -> AbstractContextManager[Any]:
        """In force during the second run, which it ends with :class:`Complete`."""
        return torch.autograd.graph.saved_tensors_hooks(self._fill, self._take)

    def check(self) -> None:
        """After the second run: sets :attr:`difference` if it has brought less."""
        if self.difference is None and len(self._tensors) < len(self._marks):
            self.difference = f"autograd saved {len(self._tensors)} tensors instead of {len(self._marks)}"

    def clear(self) -> None:
        """Lets go of the tensors that were not asked for."""
        self._tensors = []

    @skip  # else dynamo compiles the hooks, where it has given up on the code that they are called from
    def _number(self, tensor: Tensor) -> int:
        self._marks.append(_mark(tensor))
        return len(self._marks) - 1

    @skip
    def _fill(self, tensor: Tensor) -> int:
        number = len(self._tensors)
        if self.ended:
            raise Complete  # again, where the layer has caught it
        mark = _mark(tensor)
        if mark != self._marks[number]:
            self.difference = f"autograd saved a tensor of {_words(mark)} instead of {_words(self._marks[number])}"
            self.ended = True
            raise Complete
        self._tensors.append((tensor, tensor._version))
        if number + 1 == len(self._marks):
            self.ended = True
            raise Complete
        return number

    @skip
    def _take(self, number: int) -> Tensor:
        """Each is asked for once, by the backward of the operation that saved it."""
        found = self._tensors[number] if number < len(self._tensors) else None
        if found is None:
            raise RuntimeError(self._refusal)
        self._tensors[number] = None
        return _if_unchanged(found)


def saving_all() -> AbstractContextManager[Any]:
    """Lets autograd save what it would, whatever hooks are in force. Where there are any, it does not look itself
    whether something was changed in place meanwhile."""
    return torch.autograd.graph.saved_tensors_hooks(_with_version, _if_unchanged)


@skip
def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version  # an operation's own output would lead back to it, and be held for ever


@skip
def _if_unchanged(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" {_words(_mark(tensor))} is at version {tensor._version}; expected version {version}"
        )
    return tensor


class Graph:
    """What is differentiated of a call.

    Args:
        outputs: Those that may have a gradient, or their edges.
        inputs: The edges of the inputs that require one.
        parameters: The tensors that stand for the layer's parameters.
    """

    __slots__ = ("inputs", "outputs", "parameters")

    def __init__(
        self, outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[GradientEdge], parameters: Sequence[Tensor]
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self.parameters = parameters


Mark = tuple[torch.dtype, torch.Size, int, int]
"""What tells a tensor: its type, its shape, and the bits of two of its values."""

_UNSIGNED = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}


@functools.cache
def _reader(dtype: torch.dtype) -> tuple[int, Callable[[int], Any]] | None:
    """The bytes of one value, and what reads its bits at an address."""
    bits = _UNSIGNED.get(dtype.itemsize)
    return None if bits is None else (dtype.itemsize, bits.from_address)


@skip
def _mark(tensor: Tensor) -> Mark:
    """Reads the values from memory: as tensors they would take longer than all the rest."""
    dtype, first, middle = tensor.dtype, 0, 0
    if type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided and (reader := _reader(dtype)):
        size, read = reader
        if (count := tensor.numel()) and (address := tensor.data_ptr()):
            first = read(address).value
            if tensor.is_contiguous():
                middle = read(address + count // 2 * size).value
    return dtype, tensor.shape, first, middle


def _words(mark: Mark) -> str:
    dtype, shape, first, middle = mark
    return f"{tuple(shape)}, {dtype} ({first:x}, {middle:x})"
