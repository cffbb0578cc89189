"""What layers cost: the times from which a simulation is made, in any unit and of any kind of number."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from lightning_roundpipe.schedules.partition import Cost, Partition
from lightning_roundpipe.schedules.schedule import Action


@dataclass(frozen=True)
class Costs:
    """The times of each layer call, in call order, all in the same unit.

    Integers and fractions stay exact. What is left out is free, but for ``recompute``.

    Attributes:
        forward: Of the forward, for one microbatch.
        backward: Of the backward, for one microbatch, without the recompute.
        recompute: Of computing the forward again before the backward; left out: as long as the forward.
        weight_gradient: The part of ``backward`` that can wait for a ``W``.
        upload: Of copying the parameters to a device that has its link to itself.
        download: Of copying the parameters' gradients to the host.
        optimizer: Of the optimizer's step, on the CPU.
        add: Of adding one more device's gradients to those that are there, on the CPU.
        parameters: Size of the parameters, in bytes or any other unit.
        hop: Of one microbatch's way from a stage to the next over the host: a latency, which occupies nobody.
        host_links: How many devices' links at full rate the host's memory keeps up with; ``None``: all.

    Raises:
        ValueError: There are not as many times of each kind, or one of them cannot be.
    """

    forward: Sequence[Cost]
    backward: Sequence[Cost]
    recompute: Sequence[Cost] = field(default=())
    weight_gradient: Sequence[Cost] = field(default=())
    upload: Sequence[Cost] = field(default=())
    download: Sequence[Cost] = field(default=())
    optimizer: Sequence[Cost] = field(default=())
    add: Sequence[Cost] = field(default=())
    parameters: Sequence[Cost] = field(default=())
    hop: Cost = 0
    host_links: Cost | None = None

    def __post_init__(self) -> None:
        if not self.recompute:
            object.__setattr__(self, "recompute", tuple(self.forward))
        for name in ("weight_gradient", "upload", "download", "optimizer", "add", "parameters"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0,) * len(self.forward))
        for name in (
            "forward",
            "backward",
            "recompute",
            "weight_gradient",
            "upload",
            "download",
            "optimizer",
            "add",
            "parameters",
        ):
            values = getattr(self, name)
            if len(values) != len(self.forward):
                raise ValueError(f"There are {len(self.forward)} forward times, but {len(values)} of {name}.")
            self._check(name, values)
        self._check("hop", [self.hop])
        for whole, part in zip(self.backward, self.weight_gradient, strict=True):
            if part > whole:
                raise ValueError(f"The weight gradients' part of a backward that takes {whole} cannot take {part}.")
        if self.host_links is not None and not self.host_links > 0:
            raise ValueError(f"`host_links` must be more than 0, got {self.host_links}.")

    @staticmethod
    def _check(name: str, values: Sequence[Cost]) -> None:
        for value in values:
            if not 0 <= value < inf:
                raise ValueError(f"`{name}` must be finite and at least 0, got {value}.")

    def backward_with_recompute(self) -> list[Cost]:
        return [again + back for again, back in zip(self.recompute, self.backward, strict=True)]


def stage_ranges(partition: Partition) -> tuple[range, ...]:
    """The calls of each stage, counted on from forward to backward."""
    return (*partition.forward, *partition.backward)


def duration(costs: Costs, calls: range, action: Action, *, deferred: bool) -> Cost:
    """How long an action keeps its device busy; ``deferred``: its stage's weight gradients have a ``W``."""
    part = slice(calls.start, calls.stop)
    weights = sum(costs.weight_gradient[part]) if deferred else 0
    if action.kind == "F":
        return sum(costs.forward[part])
    if action.kind == "W":
        return weights
    again = costs.forward if action.kind == "FB" else costs.recompute
    return sum(again[part]) + sum(costs.backward[part]) - weights
