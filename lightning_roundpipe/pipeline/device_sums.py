"""Adding up a stage's gradients on the device that computes them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor


class DeviceSums:
    """Takes a call's gradients one by one, as autograd has them, so that besides the sums there is never more than one.

    Args:
        parameters: Those whose gradients are added up on the device, by id.
        add: Called with a parameter and its gradient, which stays on the device.

    Attributes:
        taken: The parameters whose gradients have been taken.
    """

    __slots__ = ("_add", "_parameters", "taken")

    def __init__(self, parameters: set[int], add: Callable[[Tensor, Tensor], None]) -> None:
        self._parameters = parameters
        self._add = add
        self.taken: set[int] = set()

    @contextmanager
    def listening(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """While autograd differentiates for leaves that stand for parameters: takes their gradients. What autograd then
        returns for these means nothing; it is the leaf, which needs no memory of its own.

        Args:
            pairs: Parameters, and the leaves that stand for them.
        """
        hooks = [
            leaf.register_hook(partial(self._take, parameter, leaf))
            for parameter, leaf in pairs
            if id(parameter) in self._parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, parameter: Tensor, leaf: Tensor, gradient: Tensor) -> Tensor | None:
        if gradient.layout != torch.strided:
            return None
        self._add(parameter, gradient)
        self.taken.add(id(parameter))
        return leaf.detach()
