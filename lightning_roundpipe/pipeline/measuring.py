"""What layer calls cost, and how long the devices are busy: measured while batches run."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lightning_roundpipe.devices import Device, Stopwatch

Note = Callable[[float, float], None]
"""Told of each span of time that is counted, when it is over: its start and its end, by the host's clock."""

_CALLS_AVERAGED = 50
_CALLS_TRUSTED = 5
_AT_MOST = 2.0
"""After the first calls, none counts for more than so many times the average: it was interrupted by other processes."""


@dataclass(slots=True)
class Costs:
    """Measured seconds per layer: a moving average over its calls, the first batch left out."""

    mean: float = 0.0
    calls: int = 0

    def add(self, seconds: float) -> None:
        self.calls += 1
        if self.calls > _CALLS_TRUSTED:
            seconds = min(seconds, _AT_MOST * self.mean)
        self.mean += (seconds - self.mean) / min(self.calls, _CALLS_AVERAGED)


@dataclass(slots=True)
class DeviceUse:
    """How long a device has been busy, and with how many calls."""

    busy_seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class _Measurement:
    """How long something took on a device, which is known when the device has done it.

    Attributes:
        stopwatch: It has been stopped.
        use: Of the device.
        costs: Of a call, or None where it was none.
        besides: Seconds that count for the costs, too.
    """

    stopwatch: Stopwatch
    use: DeviceUse
    costs: Costs | None
    besides: float

    def count(self, seconds: float) -> None:
        self.use.busy_seconds += seconds
        if self.costs is not None:
            self.use.calls += 1
            self.costs.add(max(seconds + self.besides, 0.0))


class _Timed:
    def __init__(
        self, measured: "Measured", device: int, costs: Costs | None, besides: float, note: Note | None
    ) -> None:
        self._measured, self._device, self._costs, self._besides = measured, device, costs, besides
        self._note = note

    def __enter__(self) -> None:
        self._stopwatch = self._measured.devices[self._device].stopwatch()

    def __exit__(self, *exc: object) -> None:
        self._stopwatch.stop()
        self._measured.take(self._device, self._stopwatch, self._costs, self._besides)
        if self._note is not None:
            self._note(self._stopwatch.started, self._stopwatch.stopped)


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
        self._pending: list[deque[_Measurement]] = [deque() for _ in devices]
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

    def take(self, device: int, stopwatch: Stopwatch, costs: Costs | None, besides: float) -> None:
        """Takes what was measured on a device."""
        with self._lock:
            self._pending[device].append(_Measurement(stopwatch, self.use[device], costs, besides))
            self._count(self._pending[device])

    def settle(self) -> None:
        """Counts all that is known by now."""
        with self._lock:
            for pending in self._pending:
                self._count(pending)

    def _count(self, pending: deque[_Measurement]) -> None:
        while pending and (seconds := pending[0].stopwatch.seconds()) is not None:
            pending.popleft().count(seconds)

    def costs_of(self, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call's forward, and of its backward including the recompute, if there is one."""
        self.settle()
        forward = [self.forward[i].mean for i in calls]
        return forward, [self.backward[i].mean or (2 + self.recomputes(i)) * self.forward[i].mean for i in calls]

    def forget_costs(self) -> None:
        """After the first batch: whatever happens for the first time is slow, so only what comes now counts."""
        for costs in (self.forward, self.backward):
            costs[:] = [Costs() for _ in costs]
