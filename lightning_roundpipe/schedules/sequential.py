"""One microbatch at a time, one stage after the other."""

from lightning_roundpipe.schedules.schedule import Action, Schedule


def sequential(devices: int, microbatches: int) -> Schedule:
    """Each microbatch goes forward and backward through all devices before the next one begins.

    The order of one device with gradient accumulation, spread over several: nothing overlaps, and one microbatch's
    activations are alive at a time.

    Args:
        devices: Number of devices, and of forward and of backward stages.
        microbatches: Number of microbatches of the batch.
    """
    lines = (
        tuple(
            action
            for microbatch in range(microbatches)
            for action in (Action("F", device, microbatch), Action("B", 2 * devices - 1 - device, microbatch))
        )
        for device in range(devices)
    )
    return Schedule(tuple(lines), last_device=0, resident=True)
