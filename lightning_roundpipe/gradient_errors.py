"""How far gradients are from those that are expected."""

import torch
from torch import Tensor

from lightning_roundpipe.verification import GradientError


def gradient_error(
    parameter: str, layer: str | None, found: Tensor | None, expected: Tensor | None, floor: float
) -> GradientError:
    """How far a parameter's gradient is from the expected one; None is no gradient. A norm below the floor counts as
    that."""
    if found is None or expected is None:
        if found is None and expected is None:
            return GradientError(parameter, layer, None, 0.0, 0.0)
        only = dense(found if expected is None else expected)  # type: ignore[arg-type]
        largest = float(only.abs().max()) if only.numel() else 0.0
        if expected is None:
            return GradientError(parameter, layer, None, largest, 1.0, "expected")
        return GradientError(parameter, layer, norm(expected), largest, 1.0, "found")
    apart, size = difference(dense(found), dense(expected)), norm(expected)
    largest = float(apart.abs().max()) if apart.numel() else 0.0
    relative = 0.0 if largest == 0 else norm(apart) / max(size, floor)
    return GradientError(parameter, layer, size, largest, relative)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Zero where both are equal, the same infinity, or no number."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0, a - b)


def norm(tensor: Tensor) -> float:
    """The Euclidean norm, in double precision."""
    return float(torch.linalg.vector_norm(dense(tensor).abs().double()))


def dense(tensor: Tensor) -> Tensor:
    """The tensor with all its zeros."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
