"""ZB1P: weight gradients wait, and fill the gaps of 1F1B."""

from lightning_roundpipe.schedules.schedule import Action, Schedule


def zb1p(devices: int, microbatches: int) -> Schedule:
    """1F1B with ``W`` apart from ``B``: device ``i`` is ``i`` weight gradients behind its input gradients.

    So no device holds more than ``devices`` microbatches, as the first one does in 1F1B; a microbatch is let go after
    its ``W``. The last devices, which would wait first and last, have the most ``W`` to fill the end with.

    Source: Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.1, the schedule ZB-H1.

    Args:
        devices: Number of devices, and of forward and of backward stages.
        microbatches: Number of microbatches of the batch.
    """
    lines = []
    for device in range(devices):
        stage, behind = 2 * devices - 1 - device, device
        forward = [Action("F", device, microbatch) for microbatch in range(microbatches)]
        line = forward[: devices - device]
        for microbatch in range(microbatches):
            line.append(Action("B", stage, microbatch))
            if microbatch >= behind:
                line.append(Action("W", stage, microbatch - behind))
            line += forward[devices - device + microbatch : devices - device + microbatch + 1]
        line += [Action("W", stage, microbatch) for microbatch in range(max(microbatches - behind, 0), microbatches)]
        lines.append(tuple(line))
    return Schedule(tuple(lines), last_device=0, resident=True)
