"""The baton, and what goes with it from hand to hand.

Who holds it runs the user's code. The random generators of the process, and the attributes that microbatches set on
modules, are then as that microbatch has left them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_roundpipe.pipeline.attributes import ModuleAttributes
from lightning_roundpipe.pipeline.batch import Batch, Microbatch
from lightning_roundpipe.pipeline.device_rng import DeviceGenerators
from lightning_roundpipe.pipeline.rng import RandomState, derive_seed, same_state, seed_all
from lightning_roundpipe.pipeline.turnstile import Baton, Monitor, Place


class Handover:
    """Takes and releases the baton for microbatches.

    Args:
        monitor: Of all waits.
        attributes: What microbatches have set on modules.
        generators: Those of the devices.
        seed: Base of all random numbers drawn in microbatches.
    """

    def __init__(self, monitor: Monitor, attributes: ModuleAttributes, generators: DeviceGenerators, seed: int) -> None:
        self.backward_draws = False
        """Whether the code between layers sets the generator in its backward, as a checkpoint does."""
        self._monitor = monitor
        self._baton = Baton(monitor)
        self._attributes = attributes
        self._generators = generators
        self._seed = seed
        self._left: Tensor | None = None
        """The generator's state when the baton was last released in a forward."""
        self._swaps_everything = False
        """Whether the code between layers draws from Python's or NumPy's generator."""

    def request(self) -> Place:
        """A place in the queue for the baton; see :class:`Baton`."""
        return self._baton.request()

    def take(self, microbatch: Microbatch, place: Place | None = None) -> None:
        """Waits for the baton, by default at the end of the queue."""
        place = place or self._baton.request()
        self._baton.take(place, microbatch.batch.number)
        microbatch.place = place
        try:
            if microbatch.in_backward:
                self._swap_in_backward(microbatch)
            else:
                self._generators.put(microbatch)
                if microbatch.batch.microbatches > 1:
                    self._swap_in(microbatch)
        except BaseException:
            self._baton.release(place)
            microbatch.place = None
            raise

    def release(self, microbatch: Microbatch) -> None:
        """Hands the baton on, if the microbatch has it."""
        if microbatch.place is None:
            return
        if microbatch.in_backward:
            self._swap_out_backward(microbatch)
        else:
            self._generators.note(microbatch)
            if microbatch.batch.microbatches > 1:
                self._swap_out(microbatch)
        self._baton.release(microbatch.place)
        microbatch.place = None

    @contextmanager
    def lending_generators(self, batch: Batch) -> Iterator[None]:
        """For the forward of a batch: the random numbers of the code around it, on the main thread or in a step that
        sees the whole batch, go on as if the microbatches had drawn none. A single one draws as that code would.

        Raises:
            RuntimeError: When microbatches have drawn from generators that nobody has kept for them.
        """
        self._left = None
        self._generators.begin_batch()
        if batch.microbatches == 1:
            yield
            return
        outside = RandomState.capture()
        try:
            yield
        finally:
            self._restore(batch, outside)
            self._left = None

    def hold_to_compile(self, microbatch: Microbatch) -> None:
        """A layer's code is about to be compiled. It holds the baton until the end of the call: dynamo sets the
        process's random generators to what it found at first, which may be what another compilation left for a while.
        """
        if microbatch.place is None:
            self.take(microbatch)
            microbatch.before_compiling = RandomState.capture()

    def end_compiling(self, microbatch: Microbatch) -> None:
        """The end of the call."""
        if microbatch.before_compiling is not None:
            microbatch.before_compiling.restore()
            microbatch.before_compiling = None
            self.release(microbatch)

    def _restore(self, batch: Batch, outside: RandomState) -> None:
        if batch.records or self._swaps_everything:
            outside.restore()
            return
        now = RandomState.capture()
        RandomState(outside.torch_cpu).restore()
        if not now.same_outside_torch(outside) and self._monitor.failure is None:
            raise RuntimeError(
                "Random numbers of Python's or NumPy's generator were drawn in this batch, and none in the first one:"
                " they are neither repeatable nor, if a layer drew them, the same in its recompute. Draw one in every"
                " training_step from the first batch on, use torch's, or train with RoundPipeStrategy(microbatches=1)."
            )

    def _swap_in(self, microbatch: Microbatch) -> None:
        batch = microbatch.batch
        now = torch.default_generator.get_state()
        if self._left is not None and not same_state(now, self._left):
            raise RuntimeError(
                "A layer drew random numbers on the CPU that it did not draw in the first batch, or a thread of your"
                " own did while the step ran: neither can be repeated in the recompute. If it is a layer, it is one of"
                " those running at this moment; let it draw from the first batch on. A thread should draw from a"
                " torch.Generator of its own. Or train with RoundPipeStrategy(microbatches=1)."
            )
        if microbatch.random_state is not None:
            microbatch.random_state.restore()
        else:
            everything = batch.records or self._swaps_everything
            seed_all(derive_seed(self._seed, batch.seed_step, microbatch.number, -1), everything=everything)
            microbatch.random_state = RandomState.capture(everything=everything)
        self._attributes.put(microbatch)

    def _swap_out(self, microbatch: Microbatch) -> None:
        batch = microbatch.batch
        state = RandomState.capture(everything=batch.records or self._swaps_everything)
        if batch.records and microbatch.random_state is not None and not self._swaps_everything:
            self._swaps_everything = not state.same_outside_torch(microbatch.random_state)
        microbatch.random_state = state
        self._left = state.torch_cpu
        self._attributes.note(microbatch)

    def _swap_in_backward(self, microbatch: Microbatch) -> None:
        """The backward draws nothing of its own, but a checkpoint in the step sets the generator for a while."""
        if not (microbatch.batch.records or self.backward_draws):
            return  # the generator belongs to the main thread, which may be at its own work by now
        microbatch.outside_random_state = torch.default_generator.get_state()
        if microbatch.backward_random_state is not None:
            torch.default_generator.set_state(microbatch.backward_random_state)

    def _swap_out_backward(self, microbatch: Microbatch) -> None:
        outside = microbatch.outside_random_state
        if outside is None:
            return
        now = torch.default_generator.get_state()
        microbatch.outside_random_state = microbatch.backward_random_state = None
        if not same_state(now, outside):
            self.backward_draws = True
            microbatch.backward_random_state = now
            torch.default_generator.set_state(outside)
