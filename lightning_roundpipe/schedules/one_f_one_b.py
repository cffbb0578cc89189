"""1F1B: backward as early as possible, so that fewer activations are alive; plain and interleaved."""

from lightning_roundpipe.schedules.schedule import Action, Schedule


def one_f_one_b(devices: int, microbatches: int) -> Schedule:
    """Device ``i`` runs ``devices - 1 - i`` forwards to fill the pipeline, then one forward and one backward in turn.

    Source: PipeDream (arXiv 1806.03377), section 3.2, with a flush after each batch as in PipeDream-2BW
    (arXiv 2006.09503), section 2.2.

    Args:
        devices: Number of devices, and of forward and of backward stages.
        microbatches: Number of microbatches of the batch.
    """
    return interleaved(devices, microbatches, chunks=1)


def interleaved(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B where each device holds several shorter stages: device ``i`` those with numbers ``i`` modulo ``devices``.

    Microbatches are taken in groups of as many as there are devices; a group goes through one of the device's stages
    after the other. The pipeline fills in ``1 / chunks`` of the time, at the price of as many times the copies between
    devices and more activations.

    Source: Megatron-LM (arXiv 2104.04473), section 2.2 and figure 4. Where the microbatches are no multiple of the
    devices, which it does not allow, those that the last group lacks are left out of its order.

    Args:
        devices: Number of devices.
        microbatches: Number of microbatches of the batch.
        chunks: Number of forward and of backward stages per device.
    """
    stages = devices * chunks
    groups = [range(start, start + devices) for start in range(0, microbatches, devices)]
    lines = []
    for device in range(devices):
        held = range(device, stages, devices)
        forward = [Action("F", stage, mb) for group in groups for stage in held for mb in group]
        backward = [Action("B", 2 * stages - 1 - stage, mb) for group in groups for stage in held[::-1] for mb in group]
        ahead = devices - 1 - device if chunks == 1 else 2 * (devices - 1 - device) + (chunks - 1) * devices
        line = forward[:ahead]
        for number, action in enumerate(backward):
            line += [*forward[ahead + number : ahead + number + 1], action]
        lines.append(tuple(action for action in line if action.microbatch < microbatches))
    return Schedule(tuple(lines), last_device=0, resident=True)
