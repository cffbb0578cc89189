"""The W actions of a schedule: each device computes weight gradients when their turn has come."""

from collections.abc import Sequence
from functools import partial

import torch

from lightning_roundpipe.devices import Device
from lightning_roundpipe.devices.out_of_memory import remedies
from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.pipeline.measuring import Measured
from lightning_roundpipe.pipeline.threads import Threads
from lightning_roundpipe.pipeline.turns import Lines
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor, Turnstiles
from lightning_roundpipe.schedules import Action


class WeightActions:
    """Runs them. They run no code of the user's, so a thread of the device's own does, without the baton.

    Args:
        devices: The devices.
        monitor: Told of what fails.
        turnstiles: Where the turns are waited for.
        measured: Where the time is noted.
    """

    def __init__(self, devices: Sequence[Device], monitor: Monitor, turnstiles: Turnstiles, measured: Measured) -> None:
        self._devices = devices
        self._monitor = monitor
        self._turnstiles = turnstiles
        self._measured = measured
        self._threads = Threads("roundpipe-weights")

    def start(self, batch: Batch, lines: Lines) -> None:
        """Begins with those among the turns of a batch."""
        for device, line in enumerate(lines):
            turns = [turn for turn in line if turn[1].kind == "W"]
            if turns:
                self._threads.submit(device, partial(self._run, batch, device, turns), lambda: None)

    def close(self) -> None:
        self._threads.close()

    def _run(self, batch: Batch, device: int, turns: Sequence[tuple[int, Action]]) -> None:
        where = ""
        try:
            for number, action in turns:
                self._turnstiles.enter((number, action))
                index = action.microbatch - batch.first
                batch.begin_action(device, Action("W", action.stage, index))
                calls = batch.deferring[action.stage, index]
                for call in calls:
                    where = f"microbatch {index + 1} of {batch.microbatches} in batch {number}; {call.label}; device"
                    with (
                        self._measured.busy(device, batch.noting(device, index, "weight gradients", call.layer.index)),
                        self._devices[device].in_thread(),
                        self._devices[device].running(),
                    ):
                        call.deferred_gradients = call.weight_gradients(self._devices[device])
                calls.clear()
                batch.end_action(device, Action("W", action.stage, index))
                self._turnstiles.leave((number, action))
                batch.weights_done(index)
        except Cancelled:
            pass  # the thread that failed holds the error
        except BaseException as error:
            error.add_note(f"roundpipe: {where} {self._devices[device].name}; phase weight gradients")
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(f"roundpipe: {remedies('gradients', batch.microbatches)}")
            self._monitor.fail(error, batch.number)
