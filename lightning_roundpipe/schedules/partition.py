"""Which consecutive layer calls make a stage."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from lightning_roundpipe.schedules.schedule import Kind

Cost = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Partition:
    """Stages as half-open ranges of call positions ``0..calls``.

    Forward and backward are cut independently (asymmetric stages): a backward with its recompute takes about three
    times as long as the forward, so a forward stage holds about three times as many layers.

    Attributes:
        forward: Ranges in forward order, covering the calls below the fused stage.
        backward: Ranges in backward order (last calls first), covering all calls.
        fused: Whether the first backward stage is fused: it runs forward and backward at once, without recompute,
            and its calls are not part of any forward stage.
    """

    forward: tuple[range, ...]
    backward: tuple[range, ...]
    fused: bool

    def stage_count(self) -> int:
        return len(self.forward) + len(self.backward)


def balance(
    forward_costs: Sequence[Cost],
    backward_costs: Sequence[Cost],
    *,
    fused: bool,
    fits: Callable[[range, Kind], bool] = lambda calls, kind: True,
    fused_costs: Sequence[Cost] = (),
) -> Partition:
    """Cuts the calls into stages no longer than the longest single call.

    Calls are joined greedily as long as the stage stays within that limit, so a stage never takes longer than the
    finest partition's longest one, and there are no stages of negligible work.

    Args:
        forward_costs: Time of each call's forward, in call order.
        backward_costs: Time of each call's backward including the recompute, if there is one, in call order.
        fused: Whether the first backward stage also runs its calls' forward.
        fits: Whether several calls may be a stage. If they may, so may any of them that follow on one another.
        fused_costs: Time of each call's forward and backward, in call order; left out: that of a backward, whose
            recompute takes as long as the forward.
    """
    calls = len(forward_costs)
    fused_costs = fused_costs or backward_costs
    limit = max([*forward_costs, *backward_costs, *(fused_costs[-1:] if fused else ())], default=0.0)
    backward: list[range] = []
    stop = calls
    while stop > 0:
        start = stop - 1
        kind: Kind = "FB" if fused and not backward else "B"
        costs = fused_costs if kind == "FB" else backward_costs
        cost = costs[start]
        while start > 0 and cost + costs[start - 1] <= limit and fits(range(start - 1, stop), kind):
            start -= 1
            cost += costs[start]
        backward.append(range(start, stop))
        stop = start
    unfused = backward[0].start if fused and backward else calls
    forward: list[range] = []
    start = 0
    while start < unfused:
        stop = start + 1
        cost = forward_costs[start]
        while stop < unfused and cost + forward_costs[stop] <= limit and fits(range(start, stop + 1), "F"):
            cost += forward_costs[stop]
            stop += 1
        forward.append(range(start, stop))
        start = stop
    return Partition(tuple(forward), tuple(backward), fused)


def bound(forward_costs: Sequence[Cost], backward_costs: Sequence[Cost], stages: int) -> Partition:
    """Cuts the calls into stages for schedules that bind them to devices: the longest as short as it can be.

    Each stage runs forward and backward on the same device, so backward is the mirror of forward, nothing is fused,
    and what counts is the sum of both.

    Args:
        forward_costs: Time of each call's forward, in call order.
        backward_costs: Time of each call's backward including the recompute, if there is one, in call order.
        stages: Number of forward stages, and of backward stages.

    Raises:
        ValueError: There are fewer calls than stages.
    """
    costs = [forward + backward for forward, backward in zip(forward_costs, backward_costs, strict=True)]
    if not 0 < stages <= len(costs):
        raise ValueError(f"{len(costs)} layer calls cannot be cut into {stages} stages that each have one.")
    # shortest[i]: of the first i calls in the present number of stages, the longest stage; cuts: where the last begins
    total = [*accumulate(costs, initial=0)]
    shortest: list[Cost] = total
    cuts: list[list[int]] = []
    for stage in range(1, stages):
        row: list[Cost] = [0] * len(total)
        cut = [0] * len(total)
        for stop in range(stage + 1, len(total)):
            # The later the last stage begins, the shorter it is, and the longer the stages before it.
            start = bisect_left(range(stop), True, lo=stage, key=lambda i: shortest[i] >= total[stop] - total[i])
            candidates = (i for i in (start - 1, start) if stage <= i < stop)
            cut[stop] = min(candidates, key=lambda i: max(shortest[i], total[stop] - total[i]))
            row[stop] = max(shortest[cut[stop]], total[stop] - total[cut[stop]])
        shortest = row
        cuts.append(cut)
    forward: list[range] = []
    stop = len(costs)
    for cut in reversed(cuts):
        forward.insert(0, range(cut[stop], stop))
        stop = cut[stop]
    forward.insert(0, range(0, stop))
    return Partition(tuple(forward), tuple(reversed(forward)), fused=False)


def cut(
    forward_costs: Sequence[Cost],
    backward_costs: Sequence[Cost],
    forward: int,
    backward: int,
    *,
    fused: bool,
    fused_costs: Sequence[Cost] = (),
) -> Partition:
    """Cuts the calls into given numbers of stages, each about as long as the others. Stages may be empty.

    Args:
        forward_costs: Time of each call's forward, in call order.
        backward_costs: Time of each call's backward including the recompute, if there is one, in call order.
        forward: Number of forward stages below the fused one.
        backward: Number of backward stages, the fused one included.
        fused: Whether the first backward stage also runs its calls' forward.
        fused_costs: As for :func:`balance`.
    """
    calls = len(forward_costs)
    downwards = list(backward_costs[::-1])
    if fused and fused_costs:
        at_once = [*accumulate(fused_costs[::-1], initial=0)]
        rest = [*accumulate(backward_costs, initial=0)][::-1]
        shares = [abs(float((backward - 1) * first - others)) for first, others in zip(at_once, rest, strict=True)]
        first = shares.index(min(shares))
        downwards[:first] = fused_costs[::-1][:first]
    ends = _even(downwards, backward)
    backward_ranges = tuple(range(calls - stop, calls - start) for start, stop in ends)
    unfused = backward_ranges[0].start if fused and backward_ranges else calls
    forward_ranges = tuple(range(start, stop) for start, stop in _even(forward_costs[:unfused], forward))
    return Partition(forward_ranges, backward_ranges, fused)


def _even(costs: Sequence[Cost], parts: int) -> list[tuple[int, int]]:
    """Consecutive parts, each ended where the sum comes closest to its share."""
    if not parts:
        return []
    total = [*accumulate(costs, initial=0)]
    ends = [0]
    for part in range(1, parts):
        distances = [abs(float(before * parts - total[-1] * part)) for before in total]
        ends.append(distances.index(min(distances)))
    return list(pairwise([*ends, len(costs)]))
