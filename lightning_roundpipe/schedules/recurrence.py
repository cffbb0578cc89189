"""RoundPipe's time per batch by recurrence: what the simulator gives, hundreds of times faster, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from lightning_roundpipe.schedules.costs import Costs, stage_ranges
from lightning_roundpipe.schedules.partition import Cost, Partition
from lightning_roundpipe.schedules.simulate import ratio


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
    partition: Partition,
    costs: Costs,
    microbatches: int,
    devices: int,
    *,
    staleness: int = 0,
    lanes: int = 1,
    prefixes: Prefixes | None = None,
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
        prefixes: ``Prefixes.of(costs, lanes, devices)``, where it is there already.
    """
    sums = prefixes or Prefixes.of(costs, lanes, devices)
    width, share = devices // lanes, -(-microbatches // lanes)
    forward = len(partition.forward)
    stages = []  # time of a microbatch, upload, download or None, when its parameters are stepped
    for number, calls in enumerate(stage_ranges(partition)):
        a, b = calls.start, calls.stop
        takes: Cost = 0
        if number >= forward:
            takes += sums.backward[b] - sums.backward[a]
        first = sums.recompute if number > forward or (number == forward and not partition.fused) else sums.forward
        takes += first[b] - first[a]
        down = sums.download[b] - sums.download[a] if number >= forward else None
        stages.append((takes, sums.upload[b] - sums.upload[a], down, sums.optimizer[b]))
    if not stages:
        return 0
    hop, loss_stage = costs.hop, forward - (not partition.fused)
    cycle = width // gcd(width, len(stages)) * (1 + staleness)
    batches = cycle + 2 + 2 * staleness
    free: list[Cost] = [0] * width
    before: list[Cost] = [0] * width  # when the visit before the last ended
    linked: list[Cost] = [0] * width
    down_free: list[Cost] = [0] * width
    steps: list[Cost] = []  # when each step began
    stepped: Cost = 0
    ends: list[Cost] = []
    release: Cost = 0
    device = 0
    for batch in range(batches):
        step = batch - 1 - staleness
        gradients: Cost = 0
        times: list[Cost] = [release] * share
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
            device = device + 1 if device + 1 < width else 0
        ends.append(now)
        steps.append(max(gradients, now, stepped))
        stepped = steps[-1] + sums.optimizer[-1]
    return ratio(ends[-1] - ends[-1 - cycle], cycle)
