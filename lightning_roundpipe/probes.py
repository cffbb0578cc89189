"""What later batches may be like, as far as the first one does not show: to tell apart what agrees in it by chance."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.file_pages import is_on_file
from lightning_roundpipe.microbatch import IGNORED_LABEL, LABEL_FIELDS
from lightning_roundpipe.trees import flatten

Counting = Callable[[Any], float]
"""A weighting: how much of a microbatch counts."""


@contextmanager
def moved_parameters(module: nn.Module) -> Iterator[None]:
    """For a while, parameters that are constants (zeros, mostly) are none: while they are, whatever depends on the
    samples only by way of them is the same for all samples.
    """
    generator = torch.Generator().manual_seed(0)
    moved: list[tuple[nn.Parameter, float]] = []
    with torch.no_grad():
        try:
            for parameter in module.parameters():
                if not parameter.is_floating_point() or parameter.numel() == 0:
                    continue
                if not parameter.requires_grad and is_on_file(parameter):  # neither read nor written for this
                    continue
                low, high = (float(value) for value in parameter.aminmax())
                if low != high or (parameter.numel() == 1 and low != 0):
                    continue
                moved.append((parameter, low))
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(noise.to(parameter.device, parameter.dtype))
            yield
        finally:
            for parameter, value in moved:
                parameter.data.fill_(value)


def changed_batches(batch: Any, samples: int, ignored: Collection[int]) -> Iterator[tuple[Any, Counting]]:
    """The batch with something of the first sample left out: masks that hold less, labels that do not count.

    Args:
        batch: The batch; left as it is.
        samples: How many samples it has.
        ignored: Labels that its losses do not count.

    Yields:
        Each such batch, and the weighting that would be right if that is what the loss's mean is over.
    """
    leaves, rebuild = flatten(batch)
    named = [name in LABEL_FIELDS for name in _names(batch, len(leaves))]
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            continue
        if leaf.ndim == 0 or leaf.size(0) != samples or leaf[0].numel() == 0:
            continue
        for value in _values_left_out(leaf, ignored, may_be_labels=named[position] or not any(named)):
            changed = leaf.clone(memory_format=torch.contiguous_format)
            row = changed[0].view(-1)
            row[len(row) // 2 :] = value
            if not torch.equal(changed, leaf):
                yield (
                    rebuild([*leaves[:position], changed, *leaves[position + 1 :]]),
                    _count_of(position, len(leaves), value, weights=leaf.is_floating_point()),
                )


def _values_left_out(leaf: Tensor, ignored: Collection[int], *, may_be_labels: bool) -> list[float]:
    if leaf.dtype is torch.bool:
        return [0]
    if leaf.is_complex():
        return []
    is_mask = bool(((leaf == 0) | (leaf == 1)).all())
    if leaf.is_floating_point():
        return [0, 0.5] if is_mask else []
    values = {0} if is_mask or leaf.ndim > 1 else set()  # often what pads sequences
    if may_be_labels:  # labels of samples are left out only by losses that name a value for it
        values.update(value for value in ignored if leaf.ndim > 1 or value != IGNORED_LABEL)
    return sorted(value for value in values if value >= torch.iinfo(leaf.dtype).min)


def _count_of(position: int, leaves: int, value: float, *, weights: bool) -> Counting:
    def count(piece: Any) -> float:
        found = flatten(piece)[0]
        if len(found) != leaves:
            raise ValueError(f"The batch is not laid out as the first one: {len(found)} fields instead of {leaves}.")
        field = found[position]
        return float(field.sum() if weights else (field != value).sum())

    count.__name__ = f"the sum of field {position}" if weights else f"values other than {value} in field {position}"
    return count


def _names(batch: Any, leaves: int) -> list[Any]:
    """The fields of a batch that is a flat mapping."""
    if hasattr(batch, "keys") and len(batch) == leaves:
        return list(batch)
    return [None] * leaves
