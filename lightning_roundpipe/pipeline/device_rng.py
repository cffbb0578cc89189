"""Random numbers on devices that have generators of their own.

A microbatch draws one sequence of numbers, whichever devices its layers run on: the state goes with it. With several
microbatches each has a sequence of its own; a single one goes on where the last batch ended.
"""

from collections.abc import Sequence

from torch import Tensor

from lightning_roundpipe.devices import Device
from lightning_roundpipe.pipeline.batch import Microbatch
from lightning_roundpipe.pipeline.rng import derive_seed, same_state


class DeviceGenerators:
    """Puts a microbatch's state in place while it has the baton.

    Args:
        devices: The devices.
        seed: Base of all random numbers drawn in microbatches.
    """

    def __init__(self, devices: Sequence[Device], seed: int) -> None:
        self._devices = devices
        self._seed = seed
        self._left: dict[int, Tensor] = {}
        """The state of each device's generator when a microbatch last gave up the baton there."""
        self._program: Tensor | None = None
        """The state that a single microbatch has left."""

    def begin_batch(self) -> None:
        """What the program does with the generators between batches is its own affair."""
        self._left.clear()

    def put(self, microbatch: Microbatch) -> None:
        """The microbatch takes the baton.

        Raises:
            RuntimeError: When a layer has drawn numbers that it was not known to draw.
        """
        device, batch = self._devices[microbatch.device], microbatch.batch
        now = device.random_state()
        if now is None:
            return
        left = self._left.get(microbatch.device)
        if left is not None and batch.microbatches > 1 and not same_state(now, left):
            raise RuntimeError(
                f"A layer drew random numbers on {device.name} that it did not draw in the first batch, so they cannot"
                " be repeated in the recompute: it is one of those running at this moment. Let it draw from the first"
                " batch on, or train with RoundPipeStrategy(microbatches=1)."
            )
        if microbatch.device_random_state is None:
            if batch.microbatches > 1 or self._program is None:
                device.seed(derive_seed(self._seed, batch.seed_step, microbatch.number, -1))
            else:
                device.set_random_state(self._program)
        else:
            device.set_random_state(microbatch.device_random_state)

    def note(self, microbatch: Microbatch) -> None:
        """The microbatch gives the baton up."""
        state = self._devices[microbatch.device].random_state()
        if state is not None:
            microbatch.device_random_state = self._left[microbatch.device] = state
            if microbatch.batch.microbatches == 1:
                self._program = state
