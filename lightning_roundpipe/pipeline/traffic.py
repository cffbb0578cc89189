"""What a batch moves between host memory and devices, and between devices, in bytes.

A stage's parameters are uploaded, and its gradients downloaded, once for all microbatches: what has been moved already
is noted with the batch. While microbatches run one after the other, each of them is a stage of its own.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.pipeline.batch import Microbatch
from lightning_roundpipe.pipeline.runs import Mode
from lightning_roundpipe.pipeline.tape import Call


def count_forward(device: Device, microbatch: Microbatch, call: Call, mode: str, *, enters: bool) -> None:
    """Before a call's first run: its parameters, and its inputs if they are kept, or if a stage begins with them.

    Args:
        device: Where it runs.
        microbatch: The call's microbatch, at the stage that it has come to.
        call: The call.
        mode: How it runs.
        enters: Whether it is the microbatch's first call in a stage.
    """
    traffic = device.traffic
    if _first(microbatch, call.layer.index):
        traffic.parameters_up += nbytes(call.parameters)
    drops = mode == Mode.DROP and not call.stays
    if enters or drops:
        leaves = call.arguments.leaves
        inputs = nbytes(leaves)
        across = nbytes(leaf for leaf in leaves if isinstance(leaf, Tensor) and device.reaches(leaf.device))
        if enters:
            traffic.activations_up += inputs - across
            traffic.across += across
        traffic.activations_down += inputs if drops else inputs - across


def count_backward(device: Device, microbatch: Microbatch, call: Call) -> None:
    """Before a call's backward: it takes its parameters up, and for a recompute its inputs."""
    if _first(microbatch, call.layer.index):
        device.traffic.parameters_up += nbytes(call.parameters)
    if not call.stays:
        device.traffic.activations_up += nbytes(call.saved_inputs)  # none where the graph was kept


def count_gradients(device: Device, microbatch: Microbatch, found: Iterable[tuple[Tensor, Tensor]]) -> None:
    """After a call's backward: its (parameter, gradient) pairs, summed on the device in the parameters' precision."""
    downloaded = microbatch.batch.downloaded.setdefault(_place(microbatch), set())
    for parameter, gradient in found:
        if id(parameter) not in downloaded:
            downloaded.add(id(parameter))
            device.traffic.gradients_down += _size(parameter if gradient.layout == torch.strided else gradient)


def nbytes(leaves: Iterable[Any]) -> int:
    """Bytes of the tensors among some values."""
    return sum(_size(leaf) for leaf in leaves if isinstance(leaf, Tensor))


def _size(tensor: Tensor) -> int:
    if tensor.layout == torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return tensor.numel() * tensor.element_size()


def _first(microbatch: Microbatch, layer: int) -> bool:
    """Whether a layer's parameters have not been moved yet in the microbatch's present stage."""
    uploaded = microbatch.batch.uploaded.setdefault(_place(microbatch), set())
    if layer in uploaded:
        return False
    uploaded.add(layer)
    return True


def _place(microbatch: Microbatch) -> tuple[int, int]:
    """Names the stage, for all microbatches; or, where there are none, the microbatch's forward or backward."""
    if microbatch.batch.serial:
        return microbatch.index, int(microbatch.in_backward)
    return -1, microbatch.stage
