"""What layer calls need of a device's memory, as the first batch shows, and whether that is there."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.out_of_memory import Purpose, remedies
from lightning_roundpipe.pipeline.batch import Microbatch
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.tape import Call
from lightning_roundpipe.pipeline.traffic import nbytes
from lightning_roundpipe.schedules.memory import Memory, besides
from lightning_roundpipe.schedules.partition import Cost
from lightning_roundpipe.state.parameters import ParameterStore
from lightning_roundpipe.units import size_text


class Footprints:
    """Parameters and gradients are known. Activations are measured in the first batch, where each call is a stage of
    its own: the most that the device holds besides, in a call or in the code before and after it. Where a device does
    not count, they are taken to be what goes into the call.

    Args:
        layers: All layers.
        store: The parameters.
        devices: The number of devices.
        limit: Bytes of each device that stages may take; None: as many as it takes.
        refuses: Whether a layer is refused that needs more in a stage of its own. Otherwise it is tried.
        keeps_graphs: Whether graphs stay on devices where there is room.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        store: ParameterStore,
        devices: int,
        limit: int | None,
        *,
        refuses: bool,
        keeps_graphs: bool,
    ) -> None:
        self._layers = layers
        self._store = store
        self._devices = devices
        self._limit = limit
        self._refuses = refuses
        self._keeps_graphs = keeps_graphs
        self._activations = [0] * len(layers)
        """Besides gradients, while these are there, too."""
        self._without_gradients = [0] * len(layers)
        """While there are none: in code that follows the forward."""
        self._inputs = [0] * len(layers)
        self._last: Layer | None = None
        """The layer of the last call."""
        self._found: int | None = None
        """The bytes of the gradients that it found, if it was a backward."""
        self._kept = 0
        """Otherwise, what it would keep of what it has made, if its graph were kept."""
        self._waiting = 0
        """What a microbatch holds between calls."""
        self._began: tuple[tuple[int, int], int] | None = None
        """Which microbatch is the present one, and what was held when it began."""
        self._now = 0
        """What was held when the present call began."""
        self._microbatches = 1

    # -- in the first batch ----------------------------------------------------------------------------------------

    def before(self, microbatch: Microbatch, layer: Layer, device: Device) -> None:
        """A call is to begin: what the code before it has held is held beside the calls before and after it."""
        if self._measures(microbatch):
            most = device.most_held()
            self._note(layer, most, self._found)
            if self._last is not None and most is not None:
                self._note(self._last, most + (self._kept if self._found is None else 0), self._found)

    def begin(self, microbatch: Microbatch, call: Call, device: Device) -> None:
        """It begins."""
        if self._measures(microbatch):
            device.settle()  # so that nothing is held by what is on its way
            device.most_held()
            self._now = now = device.most_held() or 0
            if self._began is None or self._began[0] != microbatch.identity:
                self._began = microbatch.identity, now
                self._microbatches = max(self._microbatches, microbatch.batch.microbatches)
            if not microbatch.in_backward:
                self._waiting = max(self._waiting, now - self._began[1])
                self._inputs[call.layer.index] = max(self._inputs[call.layer.index], nbytes(call.arguments.leaves))

    def end_forward(self, microbatch: Microbatch, call: Call, device: Device) -> None:
        """Its forward has run."""
        if self._measures(microbatch):
            most = device.most_held()
            self._last, self._found = call.layer, None
            self._kept = 0 if most is None else most - self._now
            self._note(call.layer, most, 0)

    def end_backward(
        self, microbatch: Microbatch, call: Call, device: Device, found: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Its backward has run, and found these (parameter, gradient) pairs."""
        if self._measures(microbatch):
            gradients = nbytes(gradient for _, gradient in found)
            self._last, self._found = call.layer, gradients
            self._note(call.layer, device.most_held(), gradients)

    def _measures(self, microbatch: Microbatch) -> bool:
        return self._limit is not None and microbatch.batch.records

    def _note(self, layer: Layer, most: int | None, gradients: int | None) -> None:
        """So many bytes were held, with so many of gradients among them; None: before there can be any."""
        if most is not None:
            held = self._without_gradients if gradients is None else self._activations
            held[layer.index] = max(held[layer.index], most - (gradients or 0))

    # -- after it --------------------------------------------------------------------------------------------------

    def has_grown(self, call: Call, growth: Cost) -> bool:
        """Whether what a call that is to run takes is more than so many times what its layer took in the first batch,
        by which it was found that there is room."""
        return self._limit is not None and nbytes(call.arguments.leaves) > growth * self._inputs[call.layer.index]

    def memory(self, calls: Sequence[int]) -> Memory | None:
        """What stages of these calls, given by their layers' indices, must fit into, if anything.

        Raises:
            ValueError: One of them does not even in a stage of its own, and that is refused.
        """
        if self._limit is None or not calls:
            return None
        several = self._microbatches > 1
        layers = [self._layers[index] for index in calls]
        leaves = [self._store.layer_leaves(layer, self._store.version_for_next_batch()) for layer in layers]
        as_computed = [nbytes(leaf for leaf in of if leaf.requires_grad) for of in leaves]
        as_summed = [nbytes(parameter for parameter in layer.parameters if parameter.requires_grad) for layer in layers]
        inputs = [self._inputs[index] for index in calls]
        # Of a layer with several calls they are not summed on the device, and come down beside the next call.
        times = Counter(calls)
        apart = [gradients for index, gradients in zip(calls, as_computed, strict=True) if times[index] > 1]
        activations = [self._activations_of(index, own) for index, own in zip(calls, as_computed, strict=True)]
        memory = Memory(
            limit=self._limit,
            parameters=[nbytes(of) for of in leaves],
            gradients=as_summed if several else as_computed,
            activations=activations,
            fresh=as_computed if several else (),
            besides=besides(inputs, max(self._waiting, *inputs), self._microbatches, self._devices)
            + max(apart, default=0),
            kept=[self._microbatches * size for size in inputs],
            graphs=[
                inf if layer.traits.needs_recompute else self._microbatches * size
                for layer, size in zip(layers, activations, strict=True)
            ]
            if self._keeps_graphs
            else (),
        )
        call, needed = memory.alone()
        if needed <= self._limit:
            return memory
        if self._refuses:
            raise ValueError(self._refusal(memory, layers[call], call))
        return replace(memory, limit=needed)  # nothing needs less

    def _activations_of(self, index: int, gradients: int) -> int:
        """Of a layer, beside its gradients of so many bytes."""
        return max(self._activations[index], self._without_gradients[index] - gradients, self._inputs[index])

    def _refusal(self, memory: Memory, layer: Layer, call: int) -> str:
        sizes: dict[Purpose, Cost] = {
            "parameters": memory.parameters[call],
            "gradients": memory.gradients[call] + memory.fresh[call],
            "activations": memory.activations[call],
        }
        needs = ", ".join(f"{size_text(size)} for {purpose}" for purpose, size in sizes.items())
        return (
            f"{layer.label} does not fit into the memory that stages may take of a device, even in a stage of its own:"
            f" it needs {needs}; besides there may be {size_text(max(memory.parameters))} of another stage's parameters"
            f" and {size_text(memory.besides)} of microbatches that wait, {size_text(memory.alone()[1])} in all."
            f" RoundPipeStrategy(device_memory=...) leaves {size_text(memory.limit)}."
            f" {remedies(max(sizes, key=sizes.__getitem__), self._microbatches)}"
        )
