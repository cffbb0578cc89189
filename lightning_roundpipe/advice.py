"""What makes a run slower or larger than it need be, and which argument changes it: from numbers to messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LONG_STAGE = 1.5
"""A stage dominates if it takes so many times the mean."""
LONG_WAIT = 0.1
"""What is waited for is not hidden if the wait takes more than this share of a batch."""
_DIVIDE = "With RoundPipeStrategy(layers=[...]), name the blocks within it, where it has some, to divide it."


@dataclass(frozen=True, slots=True)
class StageTime:
    """How long a stage takes for one microbatch.

    Attributes:
        name: Such as ``F3``.
        layers: The names of its layers.
        seconds: For all of them.
    """

    name: str
    layers: Sequence[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Observed:
    """What the first batches of a run have shown.

    Attributes:
        devices: Number of devices.
        microbatches: The most that a batch was split into.
        split: How batches are split.
        staleness: Of the run.
        layers: Number of parameters of each layer, by name.
        stages: What each stage takes, as far as that is known.
        batch_seconds: Of a batch.
        optimizer_wait_seconds: Of these, the wait for the optimizer's step in the background.
        upload_wait_seconds: Likewise of a device for uploads, where that is measured.
    """

    devices: int
    microbatches: int
    split: str
    staleness: int
    layers: Mapping[str, int]
    stages: Sequence[StageTime]
    batch_seconds: float
    optimizer_wait_seconds: float
    upload_wait_seconds: float | None


def advise(seen: Observed) -> list[str]:
    """A message for each thing that can be better; none in a good run."""
    found = (
        few_microbatches(seen.microbatches, seen.devices, seen.split),
        long_stage(seen.stages),
        step_not_hidden(seen.optimizer_wait_seconds, seen.batch_seconds, seen.staleness),
        uploads_not_hidden(seen.upload_wait_seconds, seen.batch_seconds),
        giant_layer(seen.layers, seen.devices),
    )
    return [message for message in found if message is not None]


def few_microbatches(microbatches: int, devices: int, split: str) -> str | None:
    """Each device should have one microbatch, and one more should be on its way."""
    wanted = devices + 1
    if microbatches >= wanted:
        return None
    if split == "whole":
        remedy = (
            "RoundPipeStrategy(split='auto') splits them where that is right, and a method `split` of the module says"
            " how where the batch does not show it"
        )
    else:
        remedy = (
            f"With batches of at least {wanted} samples and RoundPipeStrategy(microbatches={wanted}), the default, all"
            " devices can work at the same time"
        )
    return (
        f"{_counted(microbatches, 'microbatch', 'es')} for {_counted(devices, 'device', 's')}: a device is idle while a"
        f" microbatch is on its way to it. {remedy}."
    )


def long_stage(stages: Sequence[StageTime]) -> str | None:
    """All stages should take about as long: each device goes on to the next one when its turn is over. One of several
    layers is as long as was found to be best, and can be divided; one of a single layer cannot.
    """
    if len(stages) < 2:
        return None
    longest, mean = max(stages, key=lambda stage: stage.seconds), fmean(stage.seconds for stage in stages)
    if longest.seconds <= LONG_STAGE * mean or len(longest.layers) > 1:
        return None
    return (
        f"stage {longest.name}, the layer {longest.layers[0]!r} alone, takes {longest.seconds / mean:.1f} times as long"
        f" as the mean stage, and the devices wait for it. {_DIVIDE}"
    )


def step_not_hidden(wait: float, batch: float, staleness: int) -> str | None:
    """The optimizer's step in the background should go on beside the computation.

    Args:
        wait: Seconds per batch that the batch waits for it.
        batch: Seconds of a batch.
        staleness: Of the run.
    """
    if wait <= LONG_WAIT * batch:
        return None
    remedy = (
        "Trainer(accumulate_grad_batches=...) or larger batches make steps rarer"
        if staleness
        else "RoundPipeStrategy(staleness=1), strategy='roundpipe_async', hides it behind the next batch"
    )
    return f"a batch waits {_share(wait, batch)} of its time for the optimizer's step. {remedy}."


def uploads_not_hidden(wait: float | None, batch: float) -> str | None:
    """The next stage's parameters should come up while one computes.

    Args:
        wait: Seconds per batch that a device waits for them, or None where that is not known.
        batch: Seconds of a batch.
    """
    if wait is None or wait <= LONG_WAIT * batch:
        return None
    return (
        f"the devices wait {_share(wait, batch)} of their time for parameters and inputs on their way up. A larger"
        " DataLoader(batch_size=...) gives each upload more to compute; Trainer(precision='bf16-mixed') halves what is"
        " brought up."
    )


def giant_layer(layers: Mapping[str, int], devices: int) -> str | None:
    """No layer should have more than a device's share of the parameters."""
    total = sum(layers.values())
    if not total:
        return None
    name = max(layers, key=layers.__getitem__)
    if layers[name] * devices <= total:
        return None
    return (
        f"layer {name!r} has {_share(layers[name], total)} of the parameters, more than the share of each of"
        f" {devices} devices, and goes to one of them as a whole. {_DIVIDE}"
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _counted(number: int, what: str, plural: str) -> str:
    return f"{number} {what}{'' if number == 1 else plural}"
