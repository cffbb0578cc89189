"""What a device holds at a time: stages' parameters, and microbatches whose activations it keeps.

Virtual devices share the host's memory, so this is counted, by the actions that a device really begins and ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.schedules import Action, Schedule
from lightning_roundpipe.schedules.costs import stage_ranges


@dataclass(slots=True)
class Peaks:
    """The most that a device has held at a time.

    Attributes:
        parameters: As a number of scalars; once per layer call.
        live: Microbatches; once per stage.
    """

    parameters: int = 0
    live: int = 0


class Occupancy:
    """What one device holds of one batch.

    Where parameters are not resident there is room for the running stage's and, on their way, the next one's; nothing
    stays between actions. Where they are, they stay to the end of the batch, and so do a microbatch's activations from
    its forward to its backward, or to the weight gradients.

    Args:
        peaks: Where the most is noted.
        schedule: The batch's schedule.
        device: Number of the device.
        plan: The calls of the stages.
        sizes: Number of parameters of each layer.
    """

    def __init__(self, peaks: Peaks, schedule: Schedule, device: int, plan: Plan, sizes: Sequence[int]) -> None:
        line = schedule.devices[device]
        self._peaks = peaks
        self._resident = schedule.resident
        self._calls = stage_ranges(plan.partition)
        self._size_of_call = [sizes[layer] for layer in plan.calls]
        stages = [stage for stage, _ in groupby(line, key=lambda action: action.stage)]
        self._following = dict(pairwise(stages))
        self._deferred = {(action.stage, action.microbatch) for action in line if action.kind == "W"}
        self._held: set[int] = set()
        self._live = 0

    def begin(self, action: Action) -> None:
        """The device begins an action."""
        if self._resident:
            self._held.update(self._calls[action.stage])
            self._live += action.kind == "F"
            held = sum(self._size_of_call[call] for call in self._held)
        else:
            self._live = 1
            held = self._size(action.stage)
            if action.stage in self._following:
                held += self._size(self._following[action.stage])
        self._peaks.parameters = max(self._peaks.parameters, held)
        self._peaks.live = max(self._peaks.live, self._live)

    def end(self, action: Action) -> None:
        """The device ends an action."""
        if not self._resident:
            self._live = 0
        elif action.kind == "W" or (action.kind == "B" and (action.stage, action.microbatch) not in self._deferred):
            self._live -= 1

    def _size(self, stage: int) -> int:
        return sum(self._size_of_call[call] for call in self._calls[stage])
