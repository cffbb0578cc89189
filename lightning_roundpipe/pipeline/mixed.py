"""Mixed precision: which parameters may travel to the devices in half precision.

Those of which autocast makes a half-precision copy at their only use anyway. All others (norms, embeddings, whatever a
layer uses in full precision) travel as they are.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_roundpipe.pipeline.replica import Layer


class CastWatch(TorchDispatchMode):
    """Watches what happens to some tensors while a layer runs under autocast.

    Args:
        dtype: Autocast's half-precision type.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._index: dict[int, int] = {}
        self._dtype = dtype
        self._casts: list[int] = []
        self._other: set[int] = set()

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Watches these from now on: what stands for the layer's parameters where it runs."""
        self._index = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._casts = [0] * len(tensors)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == self._dtype
        for item in _flat((*args, *kwargs.values())):
            index = self._index.get(id(item))
            if index is None:
                continue
            if is_cast:
                self._casts[index] += 1
            else:
                self._other.add(index)
        return func(*args, **kwargs)

    def cast_once(self) -> set[int]:
        """The tensors that were cast once and not used in any other way."""
        return {i for i, casts in enumerate(self._casts) if casts == 1 and i not in self._other}


def half_parameters(layers: Iterable[Layer], used_outside: Container[int]) -> dict[nn.Parameter, torch.dtype]:
    """Trained parameters that every layer holding them takes in half precision, and that nothing else uses. A frozen
    one, which may be mapped from a file that is larger than memory, is not copied: it is cast where it is used.

    Args:
        layers: All layers.
        used_outside: Parameters, by id, that something besides them has used.
    """
    votes: dict[nn.Parameter, set[torch.dtype | None]] = {}
    for layer in layers:
        half = layer.traits.half or {}
        for index, parameter in enumerate(layer.parameters):
            votes.setdefault(parameter, set()).add(half.get(index))
    return {
        parameter: dtype
        for parameter, (dtype, *others) in votes.items()
        if parameter.requires_grad and dtype is not None and not others and id(parameter) not in used_outside
    }


def _flat(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        if isinstance(item, (list, tuple)):
            yield from _flat(item)
        else:
            yield item
