"""Running a call on its device: beside other calls, or alone with the random generators of the process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.pipeline.batch import Microbatch
from lightning_roundpipe.pipeline.compiling import unprepared_compilations
from lightning_roundpipe.pipeline.device_sums import DeviceSums
from lightning_roundpipe.pipeline.handover import Handover
from lightning_roundpipe.pipeline.measuring import Measured
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.rng import RandomState, derive_seed, noting_sets, seed_all
from lightning_roundpipe.pipeline.runs import Run
from lightning_roundpipe.pipeline.tape import Call


class Executor:
    """Runs calls. One that draws on the host, sets a generator or compiles holds the baton meanwhile.

    Args:
        devices: The devices.
        layers: All layers.
        handover: The baton.
        measured: Where the time is noted.
        seed: Base of all random numbers drawn in microbatches.
    """

    def __init__(
        self, devices: Sequence[Device], layers: Sequence[Layer], handover: Handover, measured: Measured, seed: int
    ) -> None:
        self._devices = devices
        self._layers = layers
        self._handover = handover
        self._measured = measured
        self._seed = seed

    def forward(self, microbatch: Microbatch, call: Call, mode: str, number: int) -> Run:
        """Runs a layer for the first time; with random numbers of its own where it draws some.

        Args:
            microbatch: The microbatch, which does not hold the baton.
            call: The call.
            mode: What is kept of it; see :class:`Mode`.
            number: The call's number in the microbatch.

        Raises:
            RuntimeError: When others may have drawn what the layer takes back.
        """
        batch, layer, traits = microbatch.batch, call.layer, call.layer.traits
        device = self._devices[microbatch.device]
        measured = self._measured.forward_call(microbatch.device, layer.index, microbatch.noting(layer.index))
        many = batch.microbatches > 1
        watch = batch.serial or not many  # nothing else runs then, so whoever drew is the layer
        alone = traits.compiles or traits.sets_generator or (layer.draws() and device.shares_host_generator)
        if not (watch or alone):
            compiled = unprepared_compilations()
            with measured:
                run = call.run(device, mode)
            self._handover.end_compiling(microbatch)
            if unprepared_compilations() != compiled:
                self._found_compilation(call)
            return run
        self._handover.take(microbatch)
        compiled = unprepared_compilations()
        before = RandomState.capture()
        on_device = device.random_state()
        call.random_state, call.device_random_state = before, on_device
        if many:
            call.seed = derive_seed(self._seed, batch.seed_step, microbatch.number, number)
            seed_all(call.seed)
            device.seed(call.seed)
            started = RandomState.capture()
        else:
            started = before
        started_on_device = device.random_state()
        microbatch.accesses.in_layer = batch.records
        with _noting_sets(call), measured:
            run = call.run(device, mode)
        microbatch.accesses.in_layer = False
        if watch and not (RandomState.capture().same(started) and _same(device.random_state(), started_on_device)):
            traits.draws = True
        if unprepared_compilations() != compiled:
            traits.compiles = True
        if many:
            before.restore()
            device.set_random_state(on_device)
        if not layer.draws():
            call.seed = call.random_state = call.device_random_state = None
        self._handover.release(microbatch)
        return run

    def backward(
        self,
        microbatch: Microbatch,
        call: Call,
        gradients: Sequence[Tensor | None],
        *,
        parameters: bool,
        defers: bool,
        sums: DeviceSums | None,
    ) -> tuple[list[Tensor | None], list[tuple[Tensor, Tensor]]]:
        """Runs a call's recompute, if there must be one, and its backward; see :meth:`Call.backward`."""
        traits, device = call.layer.traits, self._devices[microbatch.device]
        alone = traits.compiles or (call.random_state is not None and device.shares_host_generator)
        before = on_device = None
        if traits.sets_generator or (alone and call.kept is None):
            self._handover.take(microbatch)
            before, on_device = RandomState.capture(), device.random_state()
        layer = call.layer.index
        measured = self._measured.backward_call(
            microbatch.device, layer, microbatch.noting(layer), recomputes=call.kept is None
        )
        with measured, _noting_sets(call):
            result = call.backward(device, gradients, parameters=parameters, defers=defers, sums=sums)
        if before is not None:
            before.restore()
            device.set_random_state(on_device)
            self._handover.release(microbatch)
        else:
            self._handover.end_compiling(microbatch)
        return result

    def _found_compilation(self, call: Call) -> None:
        """A function of the user's was compiled in a layer that did not hold the baton. From now on it does."""
        call.layer.traits.compiles = True
        if any(layer.draws() for layer in self._layers):
            raise RuntimeError(
                f"{call.label}: a function with torch.compile that the layer calls was compiled for the first time, or"
                " anew, while other microbatches may have drawn random numbers, which it takes back. Call it in the"
                " same way in the first batch, compile the layer as a whole with RoundPipeStrategy(compile=True), or"
                " train with RoundPipeStrategy(microbatches=1)."
            )


def _same(state: Tensor | None, other: Tensor | None) -> bool:
    return state is other if state is None or other is None else torch.equal(state, other)


def _noting_sets(call: Call) -> AbstractContextManager[None]:
    """First batch: finds the layers that set the generator for a while. From now on they hold the baton."""
    return noting_sets(partial(setattr, call.layer.traits, "sets_generator", True)) if call.record else nullcontext()
