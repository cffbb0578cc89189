"""Lining a batch up: its schedule as turns on each device."""

from collections.abc import Sequence

from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.pipeline.occupancy import Occupancy, Peaks
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.turns import Lines, serial_turn, start_turn
from lightning_roundpipe.schedules import Action, Schedule, Scheduler


class LineUp:
    """Makes the turns of each batch, and notes in the batch where they are.

    Args:
        scheduler: Makes the schedules.
        layers: All layers.
        peaks: For each device, where the most that it holds at a time is noted.
    """

    def __init__(self, scheduler: Scheduler, layers: Sequence[Layer], peaks: Sequence[Peaks]) -> None:
        self._scheduler = scheduler
        self._layers = layers
        self._peaks = peaks

    def lines(self, batch: Batch) -> tuple[Lines, Lines]:
        """The turns on each device, and at the start line; for a deferred batch those of the backward by themselves."""
        forward: Lines = [[] for _ in range(len(self._peaks) + 1)]
        backward: Lines = [[] for _ in range(len(self._peaks) + 1)]
        numbers = range(batch.first, batch.first + batch.microbatches)
        if batch.plan is None:  # one microbatch after the other, on the first device
            for number in numbers:
                forward[0].append((batch.number, serial_turn(number, backward=False)))
                (backward if batch.deferred else forward)[0].append((batch.number, serial_turn(number, backward=True)))
            return forward, backward
        schedule = self._scheduler.schedule(
            batch.plan.partition, batch.microbatches, lanes=batch.plan.lanes, deferred=batch.deferred
        )
        batch.resident = schedule.resident
        batch.summed_on_device = _run_in_order(schedule, batch.microbatches)
        if not batch.deferred:
            batch.occupancy = self._occupancy(schedule, batch.plan)
        for device, line in enumerate(schedule.devices):
            for action in line:
                if action.kind == "W":
                    batch.deferring[action.stage, action.microbatch] = []
                    batch.weights_left[action.microbatch] = batch.weights_left.get(action.microbatch, 0) + 1
                else:
                    batch.places[action.stage, action.microbatch] = device, action.kind
                turn = Action(action.kind, action.stage, batch.first + action.microbatch)
                (backward if batch.deferred and action.kind != "F" else forward)[device].append((batch.number, turn))
        forward[-1] = [(batch.number, start_turn(number)) for number in numbers]
        return forward, backward

    def _occupancy(self, schedule: Schedule, plan: Plan) -> list[Occupancy]:
        sizes = [sum(parameter.numel() for parameter in layer.parameters) for layer in self._layers]
        return [Occupancy(peaks, schedule, device, plan, sizes) for device, peaks in enumerate(self._peaks)]


def _run_in_order(schedule: Schedule, microbatches: int) -> frozenset[int]:
    """The backward stages of which one device runs all microbatches, in their order."""
    order: dict[tuple[int, int], list[int]] = {}
    for device, line in enumerate(schedule.devices):
        for action in line:
            if action.kind in ("B", "FB"):
                order.setdefault((action.stage, device), []).append(action.microbatch)
    return frozenset(stage for (stage, _), run in order.items() if run == list(range(microbatches)))
