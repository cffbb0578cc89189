"""What a call computes with on its device, besides its arguments: parameters, buffers, tensors among the attributes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.out_of_memory import asking_for
from lightning_roundpipe.pipeline.lent_parameters import LentParameters
from lightning_roundpipe.pipeline.replica import AttributeState

Buffers = list[dict[str, Tensor | None]]
"""Those of each module of a layer."""


class OnDevice:
    """Brought up for one run of a layer. What the layer changes in place is brought back.

    Args:
        device: Where the layer runs. On a virtual one everything is in place already.
        parameters: The layer's.
        buffers: The layer's.
        state: The layer's attributes.
        copies: What stands for some of them in this run.
        lent: Stands for the parameters, where the run's graph outlasts them.

    Attributes:
        parameters: On the device, as leaves of autograd's graph.
        buffers: On the device.
        copies: What stands for attributes, all tensors among them on the device.
    """

    __slots__ = (
        "_buffers_before",
        "_changing",
        "_device",
        "_host_buffers",
        "_of_host",
        "buffers",
        "copies",
        "parameters",
    )

    def __init__(
        self,
        device: Device,
        parameters: Sequence[Tensor],
        buffers: Buffers,
        state: AttributeState,
        copies: dict[tuple[int, str], Any],
        lent: LentParameters | None = None,
    ) -> None:
        self.parameters: Sequence[Tensor] = parameters
        self.buffers = buffers
        self.copies = copies
        self._device = device
        if device.is_host:
            return
        self._changing: list[tuple[Tensor, Tensor, int]] = []
        """Host tensors, what stands for them on the device, and its version."""
        self._of_host: dict[int, Tensor] = {}
        self._host_buffers = buffers
        with asking_for("parameters"):
            self.parameters = device.upload(parameters)
        if lent is not None:
            self.parameters = lent.stand_for(self.parameters)
        self._changing += [(x, y, y._version) for x, y in zip(parameters, self.parameters, strict=True)]
        self.buffers = [
            {name: None if buffer is None else self._up(buffer) for name, buffer in items.items()} for items in buffers
        ]
        self._buffers_before = [dict(items) for items in self.buffers]
        self.copies = dict(copies)
        for i, name in state.tensors:
            self.copies[i, name] = self._up(copies.get((i, name), state.dicts[i][name]))

    def _up(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._of_host:
            there = self._of_host[id(tensor)] = self._device.to_device(tensor)
            if there is not tensor:
                self._changing.append((tensor, there, there._version))
        return self._of_host[id(tensor)]

    def write_back(self) -> None:
        """After the first run: does to the layer's own tensors what the run has done to these."""
        if not self._device.is_host:
            self._write_back()

    @torch.no_grad()
    def _write_back(self) -> None:
        for own, there, version in self._changing:
            if there._version != version:
                own.copy_(there)
        for own_items, items, before in zip(self._host_buffers, self.buffers, self._buffers_before, strict=True):
            for name in {**before, **items}:
                now = items.get(name)
                if name not in items:
                    own_items.pop(name, None)
                elif name not in before or now is not before[name]:
                    own_items[name] = None if now is None else self._device.to_host(now)
