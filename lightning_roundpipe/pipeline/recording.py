"""What happened when in chosen batches, for a timeline.

While a batch is recorded, whoever does something appends one entry when it is through. Nothing is worked out before all
of it is over; other batches cost the question whether they are recorded.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_roundpipe.devices.base import Mark
from lightning_roundpipe.schedules import Action
from lightning_roundpipe.schedules.simulate import Span

_FIRST, _COUNT = 3, 3
"""Where no batches were chosen: the first that may be recorded, and how many are. Before it, the pipeline learns what
the model is like, and what it costs."""


FOR_STEP = "waits for the optimizer's step"
"""The name of such a wait."""
_NOTABLE = 1e-5
"""Seconds. What is shorter was no wait."""


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A layer's call on a device: its time on the host, which on a device with streams is that of handing it out.

    Attributes:
        device: Number of the device.
        batch: Number of the batch.
        microbatch: Number of the microbatch.
        action: What it was part of; None where it had no turn: calls that the plan did not foresee, or of code that
            sees the whole batch.
        phase: ``"forward"``, ``"backward"`` (with the recompute) or ``"weight gradients"``.
        layer: Number of the layer.
        start: In seconds of :func:`time.perf_counter`.
        end: Likewise.
    """

    device: int
    batch: int
    microbatch: int
    action: Action | None
    phase: str
    layer: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WaitSpan:
    """A part of an action in which the device computes nothing.

    Attributes:
        device: Number of the device.
        name: What it waits for, or does meanwhile.
        batch: Number of the batch.
        microbatch: Number of the microbatch.
        start: In seconds of :func:`time.perf_counter`.
        end: Likewise.
    """

    device: int
    name: str
    batch: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WorkSpan:
    """What the main thread or the optimizer worker was at.

    Attributes:
        name: What.
        batch: Number of the batch.
        start: In seconds of :func:`time.perf_counter`.
        end: Likewise.
    """

    name: str
    batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class StreamSpan:
    """What a stream of a device with memory of its own was at.

    Attributes:
        device: Number of the device.
        stream: Name of the stream.
        name: The layer for which.
        batch: Number of the batch.
        microbatch: Number of the microbatch.
        start: Tells when it began.
        end: Tells when it ended.
    """

    device: int
    stream: str
    name: str
    batch: int
    microbatch: int
    start: Mark
    end: Mark


class Recording:
    """Spans of time of the chosen batches. Each list is in the order of the ends.

    Args:
        batches: Numbers of the batches, or None for some in a row, from the first on that begins while no better plan
            is being searched.

    Attributes:
        actions: The devices' actions. Those of one device do not overlap.
        calls: The layers' calls. Those that are part of an action lie within it.
        waits: What actions waited for, but for their turn to run the code between layers.
        steps: Optimizer steps, by the batch before them.
        units: What a step consists of, named by the parameters.
        steps_in_line: Optimizer steps that the main thread has made.
        main: What else the main thread did.
        streams: What streams of devices did, in the order in which it was handed out to them.
    """

    def __init__(self, batches: Collection[int] | None = None) -> None:
        self._chosen = batches
        self._present: int | None = None
        self._unfinished: list[Callable[[], bool]] = []
        self._open: dict[int, tuple[int, Action, float]] = {}
        """For each device the batch and the action that it is at, and since when."""
        self.actions: list[Span] = []
        self.calls: list[CallSpan] = []
        self.waits: list[WaitSpan] = []
        self.steps: list[WorkSpan] = []
        self.units: list[WorkSpan] = []
        self.steps_in_line: list[WorkSpan] = []
        self.main: list[WorkSpan] = []
        self.streams: list[StreamSpan] = []

    # -- which batches ---------------------------------------------------------------------------------------------

    def begin_batch(self, number: int, is_done: Callable[[], bool], *, settled: bool) -> "Recording | None":
        """On the main thread, when a batch begins.

        Args:
            number: Of the batch.
            is_done: Tells whether the batch is through.
            settled: Whether its plan is not about to be replaced.

        Returns:
            What records it; None: it is none of the chosen ones.
        """
        if self._chosen is None and settled and number >= _FIRST:
            self._chosen = range(number, number + _COUNT)
        self._present = number if self._chosen is not None and number in self._chosen else None
        self.is_complete()  # lets go of batches that are through
        if self._present is None:
            return None
        self._unfinished.append(is_done)
        return self

    def is_over(self, number: int) -> bool:
        """Whether no batch from this one on is recorded."""
        return self._chosen is not None and number > max(self._chosen)

    def is_complete(self) -> bool:
        """Whether every batch that is recorded is through. The optimizer's step after it may be to come."""
        self._unfinished = [is_done for is_done in self._unfinished if not is_done()]
        return not self._unfinished

    def close(self) -> None:
        """Nothing more is to come: what has begun and not ended, for there was an error, ends here."""
        now = time.perf_counter()
        for device, (batch, action, start) in self._open.items():
            self.actions.append(Span(device, batch, action, start, now))
        self._open = {}

    # -- what happens ----------------------------------------------------------------------------------------------

    def begin(self, device: int, batch: int, action: Action) -> None:
        """A device begins an action."""
        self._open[device] = batch, action, time.perf_counter()

    def end(self, device: int) -> None:
        """It ends it."""
        batch, action, start = self._open.pop(device)
        self.actions.append(Span(device, batch, action, start, time.perf_counter()))

    def add_call(
        self, device: int, batch: int, microbatch: int, phase: str, layer: int, start: float, end: float
    ) -> None:
        """A layer's call is through."""
        action = self._action(device, batch, microbatch)
        self.calls.append(CallSpan(device, batch, microbatch, action, phase, layer, start, end))

    @contextmanager
    def waiting(self, device: int, name: str, batch: int, microbatch: int) -> Iterator[None]:
        """Around what an action may have to wait for."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        if end - start > _NOTABLE and self._action(device, batch, microbatch) is not None:
            self.waits.append(WaitSpan(device, name, batch, microbatch, start, end))

    def _action(self, device: int, batch: int, microbatch: int) -> Action | None:
        """What the device is at for the microbatch, if it is."""
        at = self._open.get(device)
        return at[1] if at is not None and (at[0], at[1].microbatch) == (batch, microbatch) else None

    def add_stream(
        self, device: int, stream: str, name: str, batch: int, microbatch: int, start: Mark, end: Mark
    ) -> None:
        """A stream has been given work."""
        self.streams.append(StreamSpan(device, stream, name, batch, microbatch, start, end))

    @contextmanager
    def adding(self, spans: list[WorkSpan], name: str, batch: int) -> Iterator[None]:
        """Adds what happens within to a list, whatever it ends with."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spans.append(WorkSpan(name, batch, start, time.perf_counter()))

    def add_main(self, name: str, start: float, *, of_step: bool = False) -> None:
        """The main thread has done something since then, in the present batch or after it."""
        if self._present is not None:
            spans = self.steps_in_line if of_step else self.main
            spans.append(WorkSpan(name, self._present, start, time.perf_counter()))
