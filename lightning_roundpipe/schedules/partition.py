"""Which consecutive layer calls make a stage."""

from collections.abc import Sequence
from dataclasses import dataclass


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


def balance(forward_costs: Sequence[float], backward_costs: Sequence[float], *, fused: bool) -> Partition:
    """Cuts the calls into stages no longer than the longest single backward call.

    Calls are joined greedily as long as the stage stays within that limit, so a stage never takes longer than the
    finest partition's longest one, and there are no stages of negligible work.

    Args:
        forward_costs: Time of each call's forward, in call order.
        backward_costs: Time of each call's backward including the recompute, in call order.
        fused: Whether the first backward stage also runs its calls' forward.
    """
    calls = len(forward_costs)
    limit = max([*forward_costs, *backward_costs], default=0.0)
    backward: list[range] = []
    stop = calls
    while stop > 0:
        start = stop - 1
        cost = backward_costs[start]
        while start > 0 and cost + backward_costs[start - 1] <= limit:
            start -= 1
            cost += backward_costs[start]
        backward.append(range(start, stop))
        stop = start
    unfused = backward[0].start if fused and backward else calls
    forward: list[range] = []
    start = 0
    while start < unfused:
        stop = start + 1
        cost = forward_costs[start]
        while stop < unfused and cost + forward_costs[stop] <= limit:
            cost += forward_costs[stop]
            stop += 1
        forward.append(range(start, stop))
        start = stop
    return Partition(tuple(forward), tuple(backward), fused)
