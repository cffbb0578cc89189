"""The GPipe schedule: all microbatches forward, then all backward."""

from lightning_roundpipe.schedules.schedule import Action, Schedule


def gpipe(devices: int, microbatches: int) -> Schedule:
    """Each device runs its stage forward for all microbatches, then backward for all.

    Backward takes the microbatches in the order of forward, so that gradients are added in that order. (The paper's
    figure has the reverse; both take the same time.)

    Source: GPipe (arXiv 1811.06965), section 2.3 and figure 2c.

    Args:
        devices: Number of devices, and of forward and of backward stages.
        microbatches: Number of microbatches of the batch.
    """
    lines = (
        [Action("F", device, microbatch) for microbatch in range(microbatches)]
        + [Action("B", 2 * devices - 1 - device, microbatch) for microbatch in range(microbatches)]
        for device in range(devices)
    )
    return Schedule(tuple(tuple(line) for line in lines), last_device=0, resident=True)
