"""RoundPipe's time per batch by recurrence: what the simulator gives, hundreds of times faster, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import isclose

from lightning_roundpipe.schedules.costs import Costs, stage_ranges
from lightning_roundpipe.schedules.partition import Cost, Partition
from lightning_roundpipe.schedules.simulate import ratio

BATCHES = 100  # by when the steady state has nearly always been reached


@dataclass(frozen=True)
class Prefixes:
    """Sums over the first calls, from which those over any stage follow in no time."""

    forward: Sequence[Cost]
    backward: Sequence[Cost]
    recompute: Sequence[Cost]
    upload: Sequence[Cost]
    download: Sequence[Cost]
    optimizer: Sequence[Cost]

    @staticmethod
    def of(costs: Costs, lanes: int, devices: int) -> "Prefixes":
        """With ``lanes`` sets of gradients to add, and host memory shared evenly by all devices."""
        steps = [takes + adding * (lanes - 1) for takes, adding in zip(costs.optimizer, costs.add, strict=True)]
        crowd: Cost = 1 if costs.host_links is None else max(1, ratio(devices, costs.host_links))
        uploads = costs.upload if crowd == 1 else [takes * crowd for takes in costs.upload]
        return Prefixes(*map(_sums, (costs.forward, costs.backward, costs.recompute, uploads, costs.download, steps)))


def _sums(values: Sequence[Cost]) -> list[Cost]:
    sums: list[Cost] = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def time_per_batch(
    partition: Partition, costs: Costs, microbatches: int, devices: int, *, staleness: int = 0, lanes: int = 1
) -> Cost:
    """The period of RoundPipe's steady state, one stage copied ahead.

    Equal to that of ``simulate`` where host memory is no limit and lanes have equal shares; with other shares, the
    lane with the largest counts.

    Args:
        partition: The stages.
        costs: The times of the layers.
        microbatches: Number of microbatches of the batch.
        devices: Number of devices.
        staleness: How many steps the parameters of a batch may be behind.
        lanes: Number of lanes.
    """
    sums = Prefixes.of(costs, lanes, devices)
    return steady_state(partition, sums, costs.hop, -(-microbatches // lanes), devices // lanes, staleness)[0]


def steady_state(
    partition: Partition, sums: Prefixes, hop: Cost, microbatches: int, devices: int, staleness: int
) -> tuple[Cost, int]:
    """The same for a single lane with its microbatches and devices, and how many batches it took to find it."""
    stages = _stages(partition, sums)
    if not stages:
        return 0, 0
    loss_stage = len(partition.forward) - (not partition.fused)
    free: list[Cost] = [0] * devices
    before: list[Cost] = [0] * devices  # when the visit before the last ended
    linked: list[Cost] = [0] * devices
    down_free: list[Cost] = [0] * devices
    steps: list[Cost] = []  # when each step began
    stepped: Cost = 0
    ends: list[Cost] = []
    states: list[list[Cost]] = []
    release: Cost = 0
    device = 0
    for batch in range(BATCHES):
        step = batch - 1 - staleness
        gradients: Cost = 0
        times: list[Cost] = [release] * microbatches
        for number, (takes, up, down, offset) in enumerate(stages):
            start = max(before[device], linked[device])
            if step >= 0 and steps[step] + offset > start:
                start = steps[step] + offset
            linked[device] = start + up
            before[device] = free[device]
            now = max(free[device], start + up)
            latency = hop if number else 0
            for microbatch, arrival in enumerate(times):
                if arrival + latency > now:
                    now = arrival + latency
                now += takes
                times[microbatch] = now
            free[device] = now
            if number == loss_stage:
                release = now
            if down is not None:
                down_free[device] = max(now, down_free[device]) + down
                gradients = max(gradients, down_free[device])
            device = device + 1 if device + 1 < devices else 0
        ends.append(now)
        steps.append(max(gradients, now, stepped))
        stepped = steps[-1] + sums.optimizer[-1]
        if batch < staleness:
            continue
        # All that later batches depend on, seen from the next one's first device: if that recurs, so does the rest.
        room = [max(pair) for pair in zip(before, linked, strict=True)]
        down_room = [max(pair) for pair in zip(free, down_free, strict=True)]
        turned = (row[device:] + row[:device] for row in (free, room, down_room))
        states.append([time - now for time in chain(*turned, steps[-1 - staleness :], (stepped, release))])
        for ago in range(1, len(states)):
            if _alike(states[-1], states[-1 - ago], now):
                return ratio(ends[-1] - ends[-1 - ago], ago), batch + 1
    return ratio(ends[-1] - ends[BATCHES // 2 - 1], BATCHES // 2), BATCHES


def _stages(partition: Partition, sums: Prefixes) -> list[tuple[Cost, Cost, Cost | None, Cost]]:
    """Of each stage: time of a microbatch, upload, download or None, and how long into a step it is stepped."""
    forward = len(partition.forward)
    stages: list[tuple[Cost, Cost, Cost | None, Cost]] = []
    for number, calls in enumerate(stage_ranges(partition)):
        a, b = calls.start, calls.stop
        takes: Cost = 0
        if number >= forward:
            takes += sums.backward[b] - sums.backward[a]
        first = sums.recompute if number > forward or (number == forward and not partition.fused) else sums.forward
        takes += first[b] - first[a]
        down = sums.download[b] - sums.download[a] if number >= forward else None
        stages.append((takes, sums.upload[b] - sums.upload[a], down, sums.optimizer[b]))
    return stages


def _alike(state: Sequence[Cost], earlier: Sequence[Cost], scale: Cost) -> bool:
    """Equal but for rounding."""
    return all(a == b or isclose(a - b, 0, abs_tol=1e-9 * scale) for a, b in zip(state, earlier, strict=True))
