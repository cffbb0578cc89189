"""A schedule: for each device, the ordered list of the actions that it runs for one batch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast, get_args

Kind = Literal["F", "B", "W", "FB"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work for one microbatch.

    ``F`` runs the stage's layers forward, ``B`` recomputes them and runs their backward, ``FB`` (fused) does both
    at once, keeping the activations in between. Where a schedule has a ``W`` of a backward stage and microbatch, the
    gradients of the stage's weights are computed there, and its ``B`` computes those of its inputs only.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}·mb{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of work of one batch on every device.

    Stages are counted on from forward to backward: forward stages ``0..Sf-1``, then backward stages ``Sf..Sf+Sb-1``
    in the order in which backward runs them, the first of which may be fused. So whatever the schedule, stage ``s`` of
    a microbatch follows stage ``s-1`` of it, and a ``W`` follows its ``B``. The same stage may run on different
    devices for different microbatches.

    Attributes:
        devices: For each device the actions that it runs, in this order.
        last_device: The device that the last stage was given to. The next batch's round-robin goes on after it.
        resident: Whether a stage's parameters stay on its device between the actions of a batch. Otherwise the device
            holds those of the running stage only.
    """

    devices: tuple[tuple[Action, ...], ...]
    last_device: int
    resident: bool = False

    def device_of(self) -> dict[Action, int]:
        """Where each action runs."""
        return {action: device for device, actions in enumerate(self.devices) for action in actions}

    def validate(self, stages: int | None = None, microbatches: int | None = None) -> None:
        """Checks that the schedule is complete and can be executed.

        Args:
            stages: Number of stages that the schedule must have; ``None``: as many as it names.
            microbatches: Number of microbatches that it must have; ``None``: as many as it names.

        Raises:
            ValueError: An action is missing, there twice, of the wrong kind or at a place where it can never run. The
                message names it.
        """
        kinds = self._kinds()
        stages = max((stage for stage, _ in kinds), default=-1) + 1 if stages is None else stages
        microbatches = max((mb for _, mb in kinds), default=-1) + 1 if microbatches is None else microbatches
        for stage, microbatch in kinds:
            if not (0 <= stage < stages and 0 <= microbatch < microbatches):
                raise ValueError(
                    f"The schedule has {kinds[stage, microbatch][0]}: there are {stages} stages and {microbatches} "
                    "microbatches."
                )
        for stage in range(stages):
            for microbatch in range(microbatches):
                if (stage, microbatch) not in kinds:
                    same = (actions[0].kind for (other, _), actions in kinds.items() if other == stage)
                    missing = Action(next(same, "F"), stage, microbatch)
                    raise ValueError(f"The schedule lacks {missing}.")
        self._check_kinds(kinds, stages, microbatches)
        for _ in self.in_order():
            pass

    def _kinds(self) -> dict[tuple[int, int], list[Action]]:
        """The actions of each stage and microbatch."""
        found: dict[tuple[int, int], list[Action]] = {}
        for action in (action for line in self.devices for action in line):
            if not isinstance(action, Action) or action.kind not in get_args(Kind):
                raise ValueError(f"The schedule has {action}, which is no Action of kind F, B, W or FB.")
            if not (isinstance(action.stage, int) and isinstance(action.microbatch, int)):
                raise ValueError(f"The schedule has {action}, whose stage and microbatch must be whole numbers.")
            others = found.setdefault((action.stage, action.microbatch), [])
            if action in others:
                raise ValueError(f"The schedule has {action} twice.")
            others.append(action)
        return found

    def _check_kinds(self, kinds: dict[tuple[int, int], list[Action]], stages: int, microbatches: int) -> None:
        """Forward stages, then backward stages, of which only the first may be fused; each stage of one kind."""
        devices = self.device_of()
        first: list[Kind] = []  # of each stage, its kind for microbatch 0
        for stage in range(stages):
            for microbatch in range(microbatches):
                actions = kinds[stage, microbatch]
                action = next((action for action in actions if action.kind != "W"), None)
                if action is None:
                    raise ValueError(f"The schedule has {actions[0]} but no B of that stage and microbatch.")
                for other in actions:
                    if other is not action and (other.kind != "W" or action.kind != "B"):
                        raise ValueError(f"The schedule has both {action} and {other}.")
                    if devices[other] != devices[action]:
                        raise ValueError(
                            f"The schedule has {other} on device {devices[other]} and {action} on device "
                            f"{devices[action]}: what is left to do lies where B ran."
                        )
                if microbatch == 0:
                    first.append(action.kind)
                elif action.kind != first[stage]:
                    raise ValueError(f"The schedule has {action}, but stage {stage} of microbatch 0 is {first[stage]}.")
            if stage and first[stage] != "B" and first[stage - 1] != "F":
                raise ValueError(f"The schedule has {Action(first[stage], stage, 0)} after the backward has begun.")
        if first and first[-1] == "F":
            raise ValueError(f"The schedule ends with {Action('F', stages - 1, 0)}: it has no backward.")
        if stages > 1 and first[0] == "FB":
            raise ValueError(f"The schedule has {Action('B', 1, 0)}, but the forward of its layers is in no stage.")

    def in_order(self) -> Iterator[tuple[Action, int, int]]:
        """The actions in an order in which they can run, each with its device and the slot in which it can.

        Slots are counted as if every action took one.

        Raises:
            ValueError: None of the remaining actions can run. The message names one, and what it waits for.
        """
        done: dict[tuple[int, int, bool], int] = {}  # stage, microbatch, whether W: the slot after it
        position = [0] * len(self.devices)
        free = [0] * len(self.devices)
        moving = True
        while moving:
            moving = False
            for device, actions in enumerate(self.devices):
                while position[device] < len(actions):
                    action = actions[position[device]]
                    needs = _needs(action)
                    if needs is not None and needs not in done:
                        break
                    slot = max(free[device], done[needs] if needs is not None else 0)
                    yield action, device, slot
                    done[action.stage, action.microbatch, action.kind == "W"] = free[device] = slot + 1
                    position[device] += 1
                    moving = True
        for device, actions in enumerate(self.devices):
            if position[device] < len(actions):
                action = actions[position[device]]
                needs = cast(tuple[int, int, bool], _needs(action))
                raise ValueError(
                    f"The schedule can never run {action} on device {device}: it waits for stage {needs[0]} of "
                    f"microbatch {needs[1]}, which is missing or, on its device, behind something that waits for "
                    f"{action}."
                )

    def to_text(self) -> str:
        """The schedule as a grid: a line per device, a column per slot in which each action would take one.

        ``F3.0`` is the forward of stage 3 for microbatch 0, ``.`` an idle slot. A first line ``resident`` says that
        parameters stay on their devices; ``last device 2`` is there where the last stage of microbatch 0 runs
        elsewhere. ``from_text`` reads it; columns need not be aligned, and dots may be left out.
        """
        grid: list[list[str]] = [[] for _ in self.devices]
        for action, device, slot in self.in_order():
            row = grid[device]
            row += ["."] * (slot - len(row))
            row.append(f"{action.kind}{action.stage}.{action.microbatch}")
        width = max((len(cell) for row in grid for cell in row), default=0)
        lines = ["resident"] if self.resident else []
        if self.last_device != _last_device(self.devices):
            lines.append(f"last device {self.last_device}")
        digits = len(str(max(len(grid) - 1, 0)))
        lines += [
            f"{i:{digits}} | {' '.join(f'{cell:{width}}' for cell in row)}".rstrip() for i, row in enumerate(grid)
        ]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> "Schedule":
        """Reads what ``to_text`` writes, or what a person wrote that way.

        Empty lines, and what follows a ``#``, are skipped.

        Raises:
            ValueError: A line or cell cannot be read, or the devices are not numbered on from 0.
        """
        devices: list[tuple[Action, ...]] = []
        resident, last_device = False, None
        for line in (line.split("#")[0].strip() for line in text.splitlines()):
            if not line:
                continue
            if line == "resident":
                resident = True
            elif found := re.fullmatch(r"last device (\d+)", line):
                last_device = int(found[1])
            elif found := re.fullmatch(r"(\d+)\s*\|(.*)", line):
                if int(found[1]) != len(devices):
                    raise ValueError(f"Device {len(devices)} should come next in the schedule, not: {line}")
                devices.append(tuple(_read(cell) for cell in found[2].split() if cell != "."))
            else:
                raise ValueError(f"Not a line of a schedule, such as '0 | F0.0 F0.1': {line}")
        made = tuple(devices)
        return Schedule(made, _last_device(made) if last_device is None else last_device, resident)


def _needs(action: Action) -> tuple[int, int, bool] | None:
    """The stage and microbatch that an action waits for, and whether for its W; ``None``: nothing."""
    if action.kind == "W":
        return action.stage, action.microbatch, False
    return (action.stage - 1, action.microbatch, False) if action.stage else None


def _read(cell: str) -> Action:
    found = re.fullmatch(r"(FB|F|B|W)(\d+)\.(\d+)", cell)
    if found is None:
        raise ValueError(f"Not an action of a schedule, such as F0.3 or B5.0: {cell}")
    return Action(cast(Kind, found[1]), int(found[2]), int(found[3]))


def _last_device(devices: tuple[tuple[Action, ...], ...]) -> int:
    """Where the last stage of the first microbatch runs."""
    runs = [
        (action.stage, -action.microbatch, device)
        for device, line in enumerate(devices)
        for action in line
        if action.kind != "W"
    ]
    return max(runs)[2] if runs else 0
