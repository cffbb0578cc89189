"""Schedules by name, with the partition that goes with each."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from lightning_roundpipe.schedules.dualpipe import dualpipe
from lightning_roundpipe.schedules.gpipe import gpipe
from lightning_roundpipe.schedules.model_parallel import model_parallel
from lightning_roundpipe.schedules.one_f_one_b import interleaved, one_f_one_b
from lightning_roundpipe.schedules.partition import Cost, Partition, bound
from lightning_roundpipe.schedules.schedule import Schedule
from lightning_roundpipe.schedules.sequential import sequential
from lightning_roundpipe.schedules.zero_bubble import zb1p

CHUNKS = 2  # stages per device and direction in the interleaved schedule

BOUND: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType(
    {
        "model_parallel": model_parallel,
        "sequential": sequential,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": lambda devices, microbatches: interleaved(devices, microbatches, CHUNKS),
        "zb1p": zb1p,
        "dualpipe": dualpipe,
    }
)
"""The schedules that bind stages to devices: made from the numbers of devices and microbatches."""


def bound_schedule(
    name: str, forward_costs: Sequence[Cost], backward_costs: Sequence[Cost], microbatches: int, devices: int
) -> tuple[Partition, Schedule]:
    """A schedule that binds stages to devices, and its stages.

    Args:
        name: One of ``BOUND``.
        forward_costs: Time of each call's forward, in call order.
        backward_costs: Time of each call's backward including the recompute, if there is one, in call order.
        microbatches: Number of microbatches of the batch.
        devices: Number of devices.

    Raises:
        ValueError: There is no such schedule, there are fewer calls than stages, or the schedule needs other numbers of
            devices and microbatches.
    """
    if name not in BOUND:
        raise ValueError(f"There is no schedule {name!r}. There are 'roundpipe', {', '.join(map(repr, BOUND))}.")
    stages = devices * (CHUNKS if name == "interleaved" else 1)
    return bound(forward_costs, backward_costs, stages), BOUND[name](devices, microbatches)
