"""Chooses the stages, and the number of lanes, that take the least time per batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from lightning_roundpipe.schedules.costs import Costs, stage_ranges
from lightning_roundpipe.schedules.memory import Memory, finest
from lightning_roundpipe.schedules.partition import Cost, Partition
from lightning_roundpipe.schedules.recurrence import Prefixes, steady_state

BUDGET = 5_000_000  # how many actions the search may time: about half a second


@dataclass(frozen=True)
class Plan:
    """What the planner found.

    Attributes:
        partition: The stages.
        lanes: Number of lanes.
        time: Time per batch in steady state.
    """

    partition: Partition
    lanes: int
    time: Cost


def check_numbers(devices: int, microbatches: int, lanes: int | None) -> None:
    """
    Raises:
        ValueError: One of the numbers is less than 1, or the devices cannot be divided into the lanes.
    """
    if devices < 1 or microbatches < 1:
        raise ValueError(
            f"There must be at least 1 device and 1 microbatch, not {devices} devices and {microbatches} microbatches."
        )
    if lanes is not None and (lanes < 1 or devices % lanes):
        raise ValueError(f"{devices} devices cannot be divided into {lanes} lanes of equal size.")


def plan(
    costs: Costs,
    microbatches: int,
    devices: int,
    *,
    staleness: int = 0,
    lanes: int | None = 1,
    fused: bool = True,
    memory: Memory | None = None,
    give_way: Callable[[], None] | None = None,
) -> Plan:
    """Searches the plan for RoundPipe with the least time per batch.

    From many limits on the length of a stage, with stages filled up from either end and left fine at both ends of the
    batch or not, the fastest are improved step by step: a stage boundary is moved, taken out or put in. One layer per
    stage is among them, so nothing that is worse is returned. The number of trials is limited, not their time: the
    same costs give the same plan.

    Args:
        costs: The times of the layers.
        microbatches: Number of microbatches of the batch.
        devices: Number of devices.
        staleness: How many steps the parameters of a batch may be behind.
        lanes: Number of lanes; ``None``: the best one, of those that divide the devices.
        fused: Whether the first backward stage may run forward and backward at once.
        memory: What stages must fit into.
        give_way: Called after each trial, of which there are thousands, and now and then before the first.

    Raises:
        ValueError: A single call does not fit into the memory: the message says which and why. Or one of the numbers is
            less than 1, or the devices cannot be divided into the lanes.
    """
    check_numbers(devices, microbatches, lanes)
    if memory is not None and (alone := memory.alone())[1] > memory.limit:
        raise ValueError(
            f"Layer call {alone[0]} needs {alone[1]:,} of a device's memory even in a stage of its own, with the next "
            f"stage's parameters on their way; there are {memory.limit:,}."
        )
    options = (
        [lanes] if lanes is not None else [r for r in range(1, min(devices, microbatches) + 1) if devices % r == 0]
    )
    searches = [_Search(costs, microbatches, devices, staleness, r, fused, memory, give_way) for r in options]
    for search in searches:
        search.look_around(BUDGET // 2 // len(options))
    return min(searches, key=lambda search: search.leaders()[0].time).improve(BUDGET // 2)


@dataclass
class _Search:
    costs: Costs
    microbatches: int
    devices: int
    staleness: int
    lanes: int
    fused: bool
    memory: Memory | None
    give_way: Callable[[], None] | None = None
    budget: int = 0
    seen: dict[Partition, Cost | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefixes = Prefixes.of(self.costs, self.lanes, self.devices)
        self.width = self.devices // self.lanes
        self.share = -(-self.microbatches // self.lanes)
        self.again = [a + b for a, b in zip(self.costs.recompute, self.costs.backward, strict=True)]
        self.at_once = [a + b for a, b in zip(self.costs.forward, self.costs.backward, strict=True)]

    def look_around(self, budget: int) -> None:
        """Times one layer per stage, and the most promising of the others."""
        self.budget = budget
        one_each = finest(len(self.costs.forward), self.fused)
        best = Plan(one_each, self.lanes, self._time(one_each))
        if self.memory is not None:
            balanced = self.memory.balance(self.costs.forward, self.again, fused=self.fused, fused_costs=self.at_once)
            best = self._better(best, balanced)
        for partition in self._starts():
            if self.budget <= 0:
                break
            best = self._better(best, partition)

    def leaders(self) -> list[Plan]:
        """The fastest so far, the first one first."""
        timed = [Plan(partition, self.lanes, time) for partition, time in self.seen.items() if time is not None]
        return sorted(timed, key=lambda found: found.time)[:5]

    def improve(self, budget: int) -> Plan:
        """The best that is reached from one of the leaders, step by step."""
        self.budget = budget
        return min((self._improve(leader) for leader in self.leaders()), key=lambda found: found.time)

    def _improve(self, best: Plan) -> Plan:
        while self.budget > 0:
            for partition in _neighbours(best.partition):
                found = self._better(best, partition)
                if found is not best:
                    best = found
                    break
            else:
                break
        return best

    def _better(self, best: Plan, partition: Partition) -> Plan:
        if partition in self.seen or self.budget <= 0:
            return best
        if self.memory is not None and self.memory.needed(partition) > self.memory.limit:
            self.seen[partition] = None
            return best
        time = self._time(partition)
        return Plan(partition, self.lanes, time) if time < best.time else best

    def _time(self, partition: Partition) -> Cost:
        time, batches = steady_state(partition, self.prefixes, self.costs.hop, self.share, self.width, self.staleness)
        self.seen[partition] = time
        self.budget -= partition.stage_count() * (self.share * batches + 100)
        if self.give_way is not None:
            self.give_way()
        return time

    def _starts(self) -> Iterator[Partition]:
        """Partitions by limits on a stage's time, the most promising first."""
        ends = sorted({0, self.width // 2, self.width - 1, self.width, 2 * self.width})
        found: dict[Partition, Cost] = {}
        for limit in self._limits():
            for fine in ends:
                for fronts in product((False, True), repeat=2):
                    partition = self._cut(limit, fine, *fronts)
                    if partition not in found:
                        found[partition] = self._estimate(partition)
            if self.give_way is not None:
                self.give_way()
        return iter(sorted(found, key=lambda partition: found[partition]))

    def _limits(self) -> list[Cost]:
        """Lengths that a stage can have, from that of the longest call on."""
        shortest = max([*self.again, *self.at_once] if self.fused else self.again, default=0)
        total = sum(self.again)
        longest = max(shortest, 2 * total / self.width)
        limits = {shortest}
        for costs in (self.costs.forward, self.again, self.at_once):
            for first in range(0, len(costs), max(len(costs) // 8, 1)):
                length: Cost = 0
                for cost in costs[first:]:
                    length += cost
                    if shortest <= length <= longest:
                        limits.add(length)
        ordered = sorted(limits)
        return ordered[:: -(-len(ordered) // 60)]

    def _estimate(self, partition: Partition) -> Cost:
        """The time if all stages took as long as the longest; for staleness 0 the paper's objective."""
        forward = len(partition.forward)
        longest: Cost = 0
        for number, calls in enumerate(stage_ranges(partition)):
            if number < forward:
                costs = self.costs.forward
            else:
                costs = self.at_once if partition.fused and number == forward else self.again
            longest = max(longest, sum(costs[calls.start : calls.stop]))
        if self.staleness:
            return max(self.share, self.width) * partition.stage_count() * longest
        return (self.share * partition.stage_count() + self.width * (self.width - 1)) * longest

    def _cut(self, limit: Cost, fine: int, front: bool, backward_front: bool) -> Partition:
        """Stages within a limit, but for the first and last ``fine`` of the batch, which have one call.

        Args:
            limit: The longest time of a stage.
            fine: How many stages at either end are not joined.
            front: Whether forward stages are filled up from the first call on. Otherwise the first one is what is left:
                none waits for a longer one before it.
            backward_front: The same for backward stages.
        """
        calls = len(self.costs.forward)
        low = 0
        if self.fused and calls:
            low = calls - 1
            while low > 0 and sum(self.at_once[low - 1 :]) <= limit:
                low -= 1
        below = low if self.fused else calls
        fine = min(fine, below)
        forward = [range(i, i + 1) for i in range(fine)] + _fill(self.costs.forward, fine, below, limit, front)
        backward = _fill(self.again, fine, below, limit, backward_front)[::-1] + [
            range(i, i + 1) for i in reversed(range(fine))
        ]
        if self.fused and calls:
            backward.insert(0, range(low, calls))
        return Partition(tuple(forward), tuple(backward), self.fused)


def _fill(costs: Sequence[Cost], start: int, stop: int, limit: Cost, front: bool) -> list[range]:
    """Joins neighbouring calls as long as they stay within the limit, from the front or from the back."""
    made: list[range] = []
    order = range(start, stop) if front else range(stop - 1, start - 1, -1)
    length: Cost = 0
    for call in order:
        if made and length + costs[call] <= limit:
            length += costs[call]
            made[-1] = range(made[-1].start, call + 1) if front else range(call, made[-1].stop)
        else:
            length = costs[call]
            made.append(range(call, call + 1))
    return made if front else made[::-1]


def _neighbours(partition: Partition) -> Iterator[Partition]:
    """Partitions with one boundary moved, taken out or put in; the ends of the batch first."""
    forward, backward, fused = partition.forward, partition.backward, partition.fused
    upward = backward[:0:-1] if fused else backward[::-1]  # unfused backward stages, from the first call on
    top = backward[:1] if fused else ()
    for changed in _changes(forward):
        yield Partition(changed, backward, fused)
    for changed in _changes(upward):
        yield Partition(forward, top + changed[::-1], fused)
    if fused and backward:
        low, calls = backward[0].start, backward[0].stop
        if low > 0 and forward and upward:  # one call more in the fused stage
            yield Partition(_without_last(forward), (range(low - 1, calls), *_without_last(upward)[::-1]), True)
        if calls - low > 1:  # one call less
            single = range(low, low + 1)
            yield Partition((*forward, single), (range(low + 1, calls), single, *upward[::-1]), True)


def _without_last(stages: tuple[range, ...]) -> tuple[range, ...]:
    last = stages[-1]
    return stages[:-1] if len(last) == 1 else (*stages[:-1], range(last.start, last.stop - 1))


def _changes(stages: tuple[range, ...]) -> Iterator[tuple[range, ...]]:
    for i, stage in enumerate(stages):
        if len(stage) > 1:
            for at in sorted({stage.start + 1, (stage.start + stage.stop) // 2, stage.stop - 1}):
                yield (*stages[:i], range(stage.start, at), range(at, stage.stop), *stages[i + 1 :])
        if i + 1 < len(stages):
            after = stages[i + 1]
            yield (*stages[:i], range(stage.start, after.stop), *stages[i + 2 :])
            for at in (stage.stop - 1, stage.stop + 1):
                if stage.start < at < after.stop:
                    yield (*stages[:i], range(stage.start, at), range(at, after.stop), *stages[i + 2 :])
