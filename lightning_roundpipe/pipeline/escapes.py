"""Tensors that leave a layer unnoticed: their gradient cannot be computed, so asking for it is an error."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor


class RecomputeError(RuntimeError):
    """A layer did not do the same thing when it was run again for the backward pass."""


def escape_text(label: str) -> str:
    return (
        f"{label}: a tensor made inside the layer is used outside it, but did not leave it as an output, an attribute,"
        " a changed argument or through a forward hook. Its gradient cannot be computed. Return it from the layer, or"
        " keep the layer out of the pipeline with RoundPipeStrategy(layers=...)."
    )


def saving_nothing(label: str) -> AbstractContextManager[Any]:
    """Lets autograd keep its graph, but none of the tensors that it would save; asking for one is an error."""
    return torch.autograd.graph.saved_tensors_hooks(_nothing, partial(_refuse, label))


def _nothing(_: Tensor) -> None:
    """In place of a tensor that autograd would save."""


def _refuse(label: str, _: None) -> Tensor:
    """When that is asked for."""
    raise RuntimeError(escape_text(label))


def refuse_escapes(leaves: Iterable[Tensor], label: str) -> None:
    """Leaves that are made for one run get no gradients but those that :meth:`Call.backward` asks for."""

    def refuse(_: Tensor) -> None:
        raise RecomputeError(escape_text(label))

    for leaf in leaves:
        if leaf.requires_grad and not leaf._post_accumulate_grad_hooks:
            leaf.register_post_accumulate_grad_hook(refuse)
