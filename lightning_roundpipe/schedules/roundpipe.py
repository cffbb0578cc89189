"""The RoundPipe schedule: stages are dealt to the devices round-robin, bound to none of them."""

from lightning_roundpipe.schedules.partition import Partition
from lightning_roundpipe.schedules.schedule import Action, Kind, Schedule


def roundpipe(partition: Partition, microbatches: int, devices: int, first_device: int = 0, lanes: int = 1) -> Schedule:
    """Deals the stages, forward then backward, to the devices in turn; each device runs a stage for all microbatches.

    Stage ``k`` (forward stages first, then backward stages) runs on device ``(first_device + k) % devices``. A
    stage's parameters are therefore uploaded once, to one device. Going on after the last device of the previous
    batch is what keeps the pipeline free of bubbles from batch to batch.

    With lanes, each lane of ``devices / lanes`` neighbouring devices does so by itself for its share of the
    microbatches: a stage is uploaded once per lane, and the pipelines are shorter, so that they fill sooner.

    Source: RoundPipe, "computation dispatch paradigm" and asymmetric stage splitting. Lanes are our own.

    Args:
        partition: The stages.
        microbatches: Number of microbatches of the batch.
        devices: Number of devices.
        first_device: The device that gets the first stage: of each lane, the one at this place modulo its devices.
        lanes: Number of lanes.

    Raises:
        ValueError: The devices cannot be divided into that many lanes.
    """
    if lanes < 1 or devices % lanes:
        raise ValueError(f"{devices} devices cannot be divided into {lanes} lanes of equal size.")
    width = devices // lanes
    actions: list[list[Action]] = [[] for _ in range(devices)]
    for stage in range(partition.stage_count()):
        kind: Kind
        if stage < len(partition.forward):
            kind = "F"
        elif stage == len(partition.forward) and partition.fused:
            kind = "FB"
        else:
            kind = "B"
        for lane in range(lanes):
            share = range(lane * microbatches // lanes, (lane + 1) * microbatches // lanes)
            device = lane * width + (first_device + stage) % width
            actions[device].extend(Action(kind, stage, microbatch) for microbatch in share)
    last = (first_device + partition.stage_count() - 1) % width
    return Schedule(tuple(tuple(list_) for list_ in actions), last)
