"""What stages need of a device's memory, and the fewest that fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from operator import add
from typing import NamedTuple

from lightning_roundpipe.schedules.costs import stage_ranges
from lightning_roundpipe.schedules.partition import Cost, Partition, balance
from lightning_roundpipe.schedules.schedule import Kind

USABLE = 0.9
"""The share of a real device's memory that is counted on. The rest is left to workspaces and fragmentation."""
_TRIED = 100
"""How many sizes of the largest stage are tried, if there are more."""


class Staying(NamedTuple):
    """Calls of which something stays on the device that has run them, until their backward.

    Attributes:
        graphs: Those whose graph does.
        inputs: Those whose inputs do, for the recompute.
        growth: How many times as large as it was taken to be a call may be, for something of it to stay.
    """

    graphs: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()
    growth: Cost = inf


NOTHING_STAYS = Staying()


@dataclass(frozen=True)
class Memory:
    """What a device has, and what layer calls need there, in one unit.

    Attributes:
        limit: Of the device.
        parameters: Of each call's parameters.
        gradients: Of their gradients, in the type that they are summed in.
        activations: Of all that the call's backward needs besides, for one microbatch.
        fresh: Of a call's gradients until they are added to the sums of the microbatches before. Left out: there are no
            microbatches before.
        besides: Of what is held all the time, such as by the microbatches that wait.
        kept: Of what all microbatches keep of a call for its recompute. Left out: it is kept elsewhere.
        graphs: Of what they keep of a call if it is not to be recomputed; infinite: it must be. Left out: all must be.
    """

    limit: Cost
    parameters: Sequence[Cost]
    gradients: Sequence[Cost]
    activations: Sequence[Cost]
    fresh: Sequence[Cost] = ()
    besides: Cost = 0
    kept: Sequence[Cost] = ()
    graphs: Sequence[Cost] = ()

    def __post_init__(self) -> None:
        if not self.fresh:
            object.__setattr__(self, "fresh", (0,) * len(self.parameters))

    def alone(self) -> tuple[int, Cost]:
        """The call that needs the most in a stage of its own, and how much that is. No stages need less."""
        sizes = [self._held(range(call, call + 1), "B") for call in range(len(self.parameters))]
        most = max(range(len(sizes)), key=sizes.__getitem__, default=0)
        return most, max(sizes, default=0) + max(self.parameters, default=0) + self.besides

    def needed(self, partition: Partition) -> Cost:
        """The most that a device may hold at a time.

        The running stage's parameters and the next one's on the device, in backward its gradients, and the activations
        of one call; in the fused stage of all its calls. In forward one call's gradients of a stage before may be left.
        """
        most: Cost = 0
        largest: Cost = 0
        for number, calls in enumerate(stage_ranges(partition)):
            below = len(partition.forward)
            kind: Kind = "F" if number < below else "FB" if partition.fused and number == below else "B"
            most, largest = max(most, self._held(calls, kind)), max(largest, self._parameters(calls))
        return most + largest + self.besides

    def staying(self, partition: Partition, devices: int) -> Staying:
        """What can stay on devices beside what stages need, of the calls that come back there; see :func:`comes_back`.

        On each device, the most graphs for which there is room, for each of them saves a recompute; and then the
        largest inputs, for each byte that is held need not be copied down and up again. Calls may grow as long as all
        would still fit if everything that a device holds grew likewise.

        Args:
            partition: The stages, dealt round-robin.
            devices: To so many devices.
        """
        room = [self.limit - self.needed(partition)] * devices
        back = comes_back(partition, devices)

        def fitting(sizes: Sequence[Cost], ordered: Sequence[int]) -> frozenset[int]:
            found = set()
            for call in ordered:
                if sizes[call] <= room[device := back[call]]:
                    room[device] -= sizes[call]
                    found.add(call)
            return frozenset(found)

        graphs = fitting(self.graphs, sorted(back, key=self.graphs.__getitem__)) if self.graphs else frozenset()
        others = [call for call in back if call not in graphs] if self.kept else []
        inputs = fitting(self.kept, sorted(others, key=lambda call: -self.kept[call]))
        held = self.limit - min(room)
        return Staying(graphs, inputs, self.limit / held if held > 0 else inf)

    def balance(
        self,
        forward_costs: Sequence[Cost],
        backward_costs: Sequence[Cost],
        *,
        fused: bool,
        fused_costs: Sequence[Cost] = (),
    ) -> Partition:
        """As :func:`partition.balance`, with the fewest stages that fit; one call in each if nothing does.

        The more parameters the largest stage has, the less is left for whatever runs beside it: what is best is found
        by trying. The result is exact for up to a hundred sizes of stages.
        """
        cut = partial(balance, forward_costs, backward_costs, fused=fused, fused_costs=fused_costs)
        loose = cut()
        calls = len(self.parameters)
        if calls == 0 or self.needed(loose) <= self.limit:
            return loose
        sizes = {size for first in range(calls) for size in accumulate(self.parameters[first:])}
        ordered = sorted(size for size in sizes if max(self.parameters) <= size <= max(self.limit, *self.parameters))
        found = [cut(fits=partial(self._fits, largest)) for largest in ordered[:: -(-len(ordered) // _TRIED)]]
        fitting = [partition for partition in found if self.needed(partition) <= self.limit]
        return min(fitting, key=Partition.stage_count) if fitting else finest(calls, fused)

    def _fits(self, largest: Cost, calls: range, kind: Kind) -> bool:
        """Whether a stage fits beside one with so large parameters, and is no larger itself."""
        return self._parameters(calls) <= largest and self._held(calls, kind) + largest + self.besides <= self.limit

    def _parameters(self, calls: range) -> Cost:
        return sum(self.parameters[calls.start : calls.stop])

    def _held(self, calls: range, kind: Kind) -> Cost:
        """By a stage that runs, its own parameters included."""
        part = slice(calls.start, calls.stop)
        activations, fresh = self.activations[part], self.fresh[part]
        held = self._parameters(calls)
        if kind == "F":
            return held + max(map(add, activations, fresh if any(fresh) else self.gradients[part]), default=0)
        held += sum(self.gradients[part])
        if kind == "FB":
            return held + sum(activations) + max(fresh, default=0)
        return held + max(map(add, activations, fresh), default=0)


def besides(inputs: Sequence[Cost], waiting: Cost, microbatches: int, devices: int) -> Cost:
    """What a device may hold besides what its stages need.

    Args:
        inputs: The size of each call's inputs, for one microbatch. Those of the last call may still be there; and if
            the next one runs on another device, those of each microbatch, until it is over.
        waiting: What a microbatch holds that waits.
        microbatches: Their number.
        devices: The number of devices.
    """
    return (microbatches - 1) * waiting + (1 + (microbatches if devices > 1 else 0)) * max(inputs, default=0)


def comes_back(partition: Partition, devices: int) -> dict[int, int]:
    """The calls whose backward comes to the same device as their forward, where stages are dealt round-robin, and which
    device that is, counted from that of the first stage. Those of a fused stage are not among them."""
    below = len(partition.forward)
    stages = stage_ranges(partition)
    forward = {call: stage for stage in range(below) for call in stages[stage]}
    backward = {call: stage for stage in range(below, len(stages)) for call in stages[stage]}
    return {call: stage % devices for call, stage in forward.items() if (backward[call] - stage) % devices == 0}


def finest(calls: int, fused: bool = True) -> Partition:
    """One call per stage."""
    one_each = tuple(range(call, call + 1) for call in range(calls))
    return Partition(one_each[:-1] if fused else one_each, one_each[::-1], fused)
