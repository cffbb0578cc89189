"""Layer-wise model parallelism: the whole batch is on one device at a time."""

from lightning_roundpipe.schedules.schedule import Action, Kind, Schedule


def model_parallel(devices: int, microbatches: int) -> Schedule:
    """Each device runs its stage for the whole batch before the next device begins: no pipeline.

    Every other stage takes the microbatches in reverse. So its first one is the last that the stage before it
    finished, and no two devices ever work at the same time.

    Source: GPipe (arXiv 1811.06965), figure 2b.

    Args:
        devices: Number of devices, and of forward and of backward stages.
        microbatches: Number of microbatches of the batch.
    """

    def run(kind: Kind, stage: int) -> list[Action]:
        order = range(microbatches) if stage % 2 == 0 else reversed(range(microbatches))
        return [Action(kind, stage, microbatch) for microbatch in order]

    lines = (run("F", device) + run("B", 2 * devices - 1 - device) for device in range(devices))
    return Schedule(tuple(tuple(line) for line in lines), last_device=0, resident=True)
