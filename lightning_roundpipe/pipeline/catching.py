"""Gradients that autograd computes for the module's own parameters, past the pipeline.

A custom autograd function that was handed a parameter, a reentrant checkpoint that runs layers again, a script: their
gradients lead to the parameters themselves instead of to the leaves that stand for them. In ``.grad`` they would meet
those of other microbatches, and Lightning's ``zero_grad`` on the main thread. So they are taken where they arrive, in
front of the node that would add them to ``.grad``, and never get there.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

Catch = Callable[[nn.Parameter, Tensor], bool]
"""Takes a parameter's gradient, the user's hooks on the parameter already applied. Returns whether it did."""


class GradientCatcher:
    """Watches the nodes that accumulate into the parameters' ``.grad``. The parameters themselves are untouched.

    Args:
        parameters: Frozen ones, too: a step may unfreeze them.
        catch: Called in the thread that runs the backward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], catch: Catch) -> None:
        self._catch = catch
        self._watched = [self._watch(parameter) for parameter in parameters if _may_have_gradient(parameter)]

    def refresh(self) -> None:
        """Follows the user's changes of type: new data of another type comes with a new node."""
        for number, (parameter, dtype, device, _, handle) in enumerate(self._watched):
            if parameter.dtype != dtype or parameter.device != device:
                handle.remove()
                self._watched[number] = self._watch(parameter)

    def close(self) -> None:
        for *_, handle in self._watched:
            handle.remove()
        self._watched = []

    def _watch(self, parameter: nn.Parameter) -> tuple[nn.Parameter, torch.dtype, torch.device, Node, RemovableHandle]:
        frozen = not parameter.requires_grad
        if frozen:
            parameter.requires_grad_(True)
        node = get_gradient_edge(parameter).node  # autograd uses this one as long as it is held
        if frozen:
            parameter.requires_grad_(False)
        handle = node.register_prehook(partial(self._arrived, parameter))
        return parameter, parameter.dtype, parameter.device, node, handle

    def _arrived(self, parameter: nn.Parameter, gradients: tuple[Tensor, ...]) -> tuple[None] | None:
        (gradient,) = gradients
        taken = gradient is not None and self._catch(parameter, gradient)
        return (None,) if taken else None  # without a gradient, the node does nothing


def _may_have_gradient(parameter: nn.Parameter) -> bool:
    return (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference()
