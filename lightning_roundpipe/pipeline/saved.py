"""Early stop of the recompute: the first run's graph is kept without the tensors that it needs, and a second run of the
layer only brings these, up to the last one. What the layer computes after that, often its last linear map, runs once.
"""

from collections.abc import Sequence
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

    __slots__ = ("_kinds", "_refusal", "_tensors", "difference", "ended")

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._tensors: list[tuple[Tensor, int] | None] = []
        self.ended = False
        """Whether the second run was stopped."""
        self.difference: str | None = None
        """What the second run did otherwise, in words."""

    def __len__(self) -> int:
        return len(self._kinds)

    def leaving_out(self) -> AbstractContextManager[Any]:
        """In force during the first run."""
        return torch.autograd.graph.saved_tensors_hooks(self._number, self._take)

    def filling_in(self) -> AbstractContextManager[Any]:
        """In force during the second run, which it ends with :class:`Complete`."""
        return torch.autograd.graph.saved_tensors_hooks(self._fill, self._take)

    def check(self) -> None:
        """After the second run: sets :attr:`difference` if it has brought less."""
        if self.difference is None and len(self._tensors) < len(self._kinds):
            self.difference = f"autograd saved {len(self._tensors)} tensors instead of {len(self._kinds)}"

    def clear(self) -> None:
        """Lets go of the tensors that were not asked for."""
        self._tensors = []

    @skip  # else dynamo compiles the hooks, where it has given up on the code that they are called from
    def _number(self, tensor: Tensor) -> int:
        self._kinds.append((tensor.dtype, tensor.shape))
        return len(self._kinds) - 1

    @skip
    def _fill(self, tensor: Tensor) -> int:
        number = len(self._tensors)
        if self.ended:
            raise Complete  # again, where the layer has caught it
        kind = tensor.dtype, tensor.shape
        if kind != self._kinds[number]:
            self.difference = f"autograd saved a tensor of {_words(kind)} instead of {_words(self._kinds[number])}"
            self.ended = True
            raise Complete
        self._tensors.append((tensor, tensor._version))
        if number + 1 == len(self._kinds):
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
        tensor, version = found
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" {_words((tensor.dtype, tensor.shape))} is at version {tensor._version}; expected version {version}"
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


def _words(kind: tuple[torch.dtype, torch.Size]) -> str:
    return f"{tuple(kind[1])}, {kind[0]}"
