"""What layer calls cost, and how long the devices are busy: measured while batches run."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median

from lightning_roundpipe.devices import Device, Stopwatch

Note = Callable[[float, float], None]
"""Told of each span of time that is counted, when it is over: its start and its end, by the host's clock."""

_CALLS_AVERAGED = 50
_FIRST_CALLS = 5
_AT_MOST = 2.0
"""After the first calls, none counts for more than so many times the average: it was interrupted by other processes."""


@dataclass(slots=True)
class Costs:
    """Measured seconds per layer, the first batch left out: the median of its first calls, then a moving average."""

    mean: float = 0.0
    calls: int = 0
    _first: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.calls += 1
        if self.calls <= _FIRST_CALLS:
            self._first.append(seconds)
            self.mean = median(self._first)
            return
        seconds = min(seconds, _AT_MOST * self.mean)
        self.mean += (seconds - self.mean) / min(self.calls, _CALLS_AVERAGED)


@dataclass(slots=True)
class DeviceUse:
    """How long a device has been busy, and with how many calls."""

    busy_seconds: float = 0.0
    calls: int = 0


class _Timed:
    """Measures what is done within it.

    Args:
        measured: Takes it.
        device: Where it is done.
        costs: Of a call, or None where it is none.
        besides: Seconds that count for the costs, too.
        note: Told of it.
    """

    __slots__ = ("_besides", "_costs", "_measured", "_note", "device", "stopwatch")

    stopwatch: Stopwatch

    def __init__(
        self, measured: "Measured", device: int, costs: Costs | None, besides: float, note: Note | None
    ) -> None:
        self.device = device
        self._measured, self._costs, self._besides, self._note = measured, costs, besides, note

    def __enter__(self) -> None:
        self.stopwatch = self._measured.devices[self.device].stopwatch()

    def __exit__(self, *exc: object) -> None:
        self.stopwatch.stop()
        self._measured.take(self)
        if self._note is not None:
            self._note(self.stopwatch.started, self.stopwatch.stopped)

    def count(self, seconds: float) -> None:
        """The device has done it, and that took so long."""
        use = self._measured.use[self.device]
        use.busy_seconds += seconds
        if self._costs is not None:
            use.calls += 1
            self._costs.add(max(seconds + self._besides, 0.0))


class Measured:
    """The costs of all layers, and the use of all devices.

    Args:
        layers: Number of layers.
        devices: The devices.
        recomputes: Whether a layer, by index, is run again for its backward where that does not follow at once.
    """

    def __init__(
        self, layers: int, devices: Sequence[Device], recomputes: Callable[[int], bool] = lambda layer: True
    ) -> None:
        self.devices = devices
        self.recomputes = recomputes
        self.forward = [Costs() for _ in range(layers)]
        self.backward = [Costs() for _ in range(layers)]
        self.use = [DeviceUse() for _ in devices]
        self._lock = threading.Lock()
        self._pending: list[deque[_Timed]] = [deque() for _ in devices]
        """What devices were given, and may not have done yet, in its order."""

    def forward_call(self, device: int, layer: int, note: Note | None = None) -> AbstractContextManager[None]:
        """Measures a layer's forward on a device."""
        return _Timed(self, device, self.forward[layer], 0.0, note)

    def backward_call(
        self, device: int, layer: int, note: Note | None = None, *, recomputes: bool
    ) -> AbstractContextManager[None]:
        """Measures a layer's backward, with the recompute if it is one that is recomputed. If this time it is not, one
        is counted that takes as long as the forward, and the other way round, so that costs do not depend on the stages
        that the layers are in, nor on the first batch, which recomputes everything."""
        besides = self.forward[layer].mean * (self.recomputes(layer) - recomputes)
        return _Timed(self, device, self.backward[layer], besides, note)

    def busy(self, device: int, note: Note | None = None) -> AbstractContextManager[None]:
        """Measures other work of a device."""
        return _Timed(self, device, None, 0.0, note)

    def take(self, timed: _Timed) -> None:
        """Takes what was measured on a device, which may not have done it yet."""
        with self._lock:
            self._pending[timed.device].append(timed)
            self._count(self._pending[timed.device])

    def settle(self) -> None:
        """Counts all that is known by now."""
        with self._lock:
            for pending in self._pending:
                self._count(pending)

    def _count(self, pending: deque[_Timed]) -> None:
        while pending and (seconds := pending[0].stopwatch.seconds()) is not None:
            pending.popleft().count(seconds)

    def costs_of(self, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call's forward, and of its backward including the recompute, if there is one."""
        self.settle()
        forward = [self.forward[i].mean for i in calls]
        backward = [self.backward[i].mean or (2 + self.recomputes(i)) * self.forward[i].mean for i in calls]
        return forward, backward

    def forget_costs(self) -> None:
        """After the first batch: whatever happens for the first time is slow, so only what comes now counts."""
        for costs in (self.forward, self.backward):
            costs[:] = [Costs() for _ in costs]
