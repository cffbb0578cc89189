"""What a module holds besides parameters, to see what a step changes in it."""

import math
from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_roundpipe.gradient_errors import difference, norm

_INTERNAL = {*vars(nn.Module()), *vars(pl.LightningModule()), "log"}
"""Attributes that are PyTorch's, Lightning's and ours."""


class ModuleState:
    """Buffers and attributes of a module and all within it, as they are now: tensors, numbers, sizes of containers."""

    def __init__(self, module: nn.Module) -> None:
        self.values: dict[tuple[str, str], Any] = {}
        self._norms: set[str] = set()
        for path, submodule in module.named_modules():
            private = isinstance(submodule, Metric)  # its caches
            if isinstance(submodule, _BatchNorm):
                self._norms.add(path)
            for name, value in (*vars(submodule).items(), *submodule._buffers.items()):
                if name not in _INTERNAL and not (private and name.startswith("_")):
                    self.values[path, name] = _summary(value)

    def differing(self, other: "ModuleState", tolerance: float = 0.0, *, norms: bool = True) -> list[tuple[str, str]]:
        """What is not as in the other one.

        Args:
            other: The state to compare with.
            tolerance: The largest relative difference of floating point numbers that counts as none.
            norms: Whether the statistics of BatchNorm count. In the pipeline they follow the whole batch.
        """
        return [
            key
            for key in {**other.values, **self.values}
            if (norms or key[0] not in self._norms)
            and not (
                key in self.values and key in other.values and _same(self.values[key], other.values[key], tolerance)
            )
        ]


def _summary(value: Any) -> Any:
    kind = type(value)  # not `isinstance`: it fails for a weak proxy of a trainer that is no more
    if issubclass(kind, Tensor):
        return value.detach().clone()
    if value is None or kind in (bool, int, float, str):
        return value
    return (kind.__name__, _size(value, set()))


def _size(value: Any, seen: set[int]) -> int:
    """How many items containers hold, those of containers within them included."""
    kind = type(value)
    if not issubclass(kind, (list, tuple, dict, set, deque)) or id(value) in seen:
        return 0
    seen.add(id(value))
    return len(value) + sum(_size(item, seen) for item in (value.values() if issubclass(kind, dict) else value))


def _same(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not a.is_floating_point():
            return torch.equal(a, b)
        if not tolerance:
            return torch.equal(a.nan_to_num(), b.nan_to_num())
        return norm(difference(a, b)) <= tolerance * norm(b.nan_to_num())
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=tolerance) or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)
