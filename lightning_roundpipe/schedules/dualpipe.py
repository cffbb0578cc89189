"""DualPipe: two pipelines in opposite directions over the same devices."""

from collections.abc import Iterator
from itertools import pairwise

from lightning_roundpipe.schedules.schedule import Action, Schedule


def dualpipe(devices: int, microbatches: int) -> Schedule:
    """Half of the microbatches go through the devices upwards, half downwards; each device holds two stages.

    In the middle of the batch each device runs a forward of one direction and a backward of the other in turn. At the
    end of the batch, where nothing else is left to do, weight gradients wait (``W``).

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1 and figure 5, and the code published with it.

    Args:
        devices: Number of devices, and of forward and of backward stages. Even.
        microbatches: Number of microbatches of the batch. Even, and at least twice the devices.

    Raises:
        ValueError: These numbers are not as required.
    """
    if devices < 2 or devices % 2 or microbatches % 2 or microbatches < 2 * devices:
        raise ValueError(
            "DualPipe needs an even number of devices, and an even number of microbatches at least twice as large; "
            f"there are {devices} devices and {microbatches} microbatches."
        )
    lines = (tuple(_line(device, devices, microbatches)) for device in range(devices))
    return Schedule(tuple(lines), last_device=0, resident=True)


def _line(device: int, devices: int, microbatches: int) -> Iterator[Action]:
    half = microbatches // 2
    outer = min(device, devices - 1 - device)  # how far from the nearer end of the pipeline
    inner = devices // 2 - 1 - outer  # how far from its middle
    near = device >= devices // 2  # the direction that starts at the nearer end
    stage = {False: device, True: devices - 1 - device}  # the forward stage in each direction
    forwards = {way: iter(range(half * way, half * way + half)) for way in (False, True)}
    backwards = {way: iter(range(half * way, half * way + half)) for way in (False, True)}
    waiting: list[Action] = []

    def f(way: bool) -> Action:
        return Action("F", stage[way], next(forwards[way]))

    def b(way: bool, *, deferred: bool = False) -> Action:
        action = Action("B", 2 * devices - 1 - stage[way], next(backwards[way]))
        if deferred:
            waiting.append(Action("W", action.stage, action.microbatch))
        return action

    far = not near
    for _ in range(2 * inner):
        yield f(near)
    for _ in range(outer + 1):
        yield from (f(near), f(far))
    for _ in range(inner):
        yield from (b(far, deferred=True), waiting.pop(0), f(far))
    for _ in range(half - devices + outer + 1):
        yield from (f(near), b(far), f(far), b(near))
    for _ in range(inner):
        yield from (b(far), f(far), b(near))
    for number in range(outer + 1):  # of these last two times outer + 1 backwards, the second half defer
        yield b(far, deferred=2 * number > outer)
        yield b(near, deferred=2 * number + 1 > outer)
    for _ in range(inner):
        yield from (waiting.pop(0), b(near, deferred=True))
    yield from waiting


def overlapping(schedule: Schedule) -> dict[Action, Action]:
    """The pairs of forward and backward that DualPipe runs at the same time: each forward, and its backward.

    They are a forward of one direction and the backward of the other that follows it, but for the first on the two
    devices in the middle. DeepSeek has one compute while the other communicates.
    """
    devices = len(schedule.devices)
    half = max(action.microbatch for line in schedule.devices for action in line) // 2 + 1
    pairs: dict[Action, Action] = {}
    for device, line in enumerate(schedule.devices):
        found = [
            (first, second)
            for first, second in pairwise(line)
            if first.kind == "F" and second.kind == "B" and (first.microbatch < half) != (second.microbatch < half)
        ]
        pairs.update(found[1:] if device in (devices // 2 - 1, devices // 2) else found)
    return pairs
