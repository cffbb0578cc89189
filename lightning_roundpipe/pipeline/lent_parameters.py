"""Parameters of a graph that outlasts its stage on a device with memory of its own: they leave with the stage, and come
back for the backward. What autograd saves of them is kept as a reference.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.decorators import skip


class _Part(NamedTuple):
    """Where a saved tensor lies in a parameter."""

    parameter: int
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class LentParameters:
    """The leaves of one call's graph that stand for uploaded parameters. They have memory while the layer runs, and
    again while its graph is differentiated.

    Args:
        place: The device that the graph is on.

    Attributes:
        leaves: One for each parameter.
    """

    __slots__ = ("_index", "_versions", "leaves", "place")

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self.leaves: list[nn.Parameter] = []
        self._index: dict[int, int] = {}
        """Their numbers, by where their memory is."""
        self._versions: list[int] = []
        """When the layer has run."""

    def stand_for(self, uploaded: Sequence[Tensor]) -> list[nn.Parameter]:
        """Leaves of the graph's own, in place of those that all calls of the stage share."""
        self.leaves = [nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in uploaded]
        self._index = {address: i for i, p in enumerate(uploaded) if (address := _address(p))}
        return self.leaves

    def saving(self) -> AbstractContextManager[Any]:
        """In force while the layer runs."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def leave(self) -> None:
        """The layer has run: nothing of the parameters is held any more."""
        self._index = {}
        self._versions = [leaf._version for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    def come_back(self, uploaded: Sequence[Tensor]) -> None:
        """They are on the device again."""
        for leaf, parameter in zip(self.leaves, uploaded, strict=True):
            leaf.data = parameter.detach()

    @skip  # else dynamo compiles the hooks, where it has given up on the code that they are called from
    def _pack(self, tensor: Tensor) -> Any:
        number = self._index.get(_address(tensor))
        if number is None or not _is_part(tensor, self.leaves[number]):
            return tensor.detach(), tensor._version  # not what leads back to the operation, and would be held for ever
        return _Part(number, tensor._version, tensor.size(), tensor.stride(), tensor.storage_offset())

    @skip
    def _unpack(self, saved: Any) -> Tensor:
        """Where there are hooks, autograd itself does not look whether something was changed meanwhile."""
        if isinstance(saved, _Part):
            now, version = self._versions[saved.parameter], saved.version
            tensor = self.leaves[saved.parameter].detach().as_strided(saved.size, saved.stride, saved.offset)
        else:
            tensor, version = saved
            now = tensor._version
        if now != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" {tuple(tensor.shape)}, {tensor.dtype} is at version {now}; expected version {version}"
            )
        return tensor


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory is; 0 where it has none of the usual kind."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _is_part(tensor: Tensor, parameter: Tensor) -> bool:
    """Whether size, strides and offset tell which of the parameter's numbers these are."""
    return tensor.dtype == parameter.dtype and not tensor.is_conj() and not tensor.is_neg()
