"""A schedule: for each device, the ordered list of the actions that it runs for one batch."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "FB"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work for one microbatch.

    ``F`` runs the stage's layers forward, ``B`` recomputes them and runs their backward, ``FB`` (fused) does both
    at once, keeping the activations in between.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}·mb{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of work of one batch on every device.

    Attributes:
        devices: For each device the actions that it runs, in this order.
        last_device: The device that the last stage was given to. The next batch's round-robin goes on after it.
    """

    devices: tuple[tuple[Action, ...], ...]
    last_device: int

    def device_of(self) -> dict[Action, int]:
        """Where each action runs."""
        return {action: device for device, actions in enumerate(self.devices) for action in actions}
