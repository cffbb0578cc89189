"""What layer calls cost, and how long the devices are busy: measured while batches run."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

Note = Callable[[float, float], None]
"""Told of each span of time that is counted, when it is over: its start and its end."""

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


class _TimedCall:
    def __init__(self, use: DeviceUse, costs: Costs, besides: float, note: Note | None) -> None:
        self._use, self._costs, self._besides, self._note = use, costs, besides, note

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        end = time.perf_counter()
        seconds = end - self._start
        self._use.busy_seconds += seconds
        self._use.calls += 1
        self._costs.add(seconds + self._besides)
        if self._note is not None:
            self._note(self._start, end)


class Measured:
    """The costs of all layers, and the use of all devices.

    Args:
        layers: Number of layers.
        devices: Number of devices.
    """

    def __init__(self, layers: int, devices: int) -> None:
        self.forward = [Costs() for _ in range(layers)]
        self.backward = [Costs() for _ in range(layers)]
        self.use = [DeviceUse() for _ in range(devices)]

    def forward_call(self, device: int, layer: int, note: Note | None = None) -> AbstractContextManager[None]:
        """Measures a layer's forward on a device."""
        return _TimedCall(self.use[device], self.forward[layer], 0.0, note)

    def backward_call(
        self, device: int, layer: int, note: Note | None = None, *, recomputes: bool
    ) -> AbstractContextManager[None]:
        """Measures a layer's backward, with the recompute. If there is none, one is counted that takes as long as the
        forward, so that costs do not depend on the stages that the layers are in."""
        besides = 0.0 if recomputes else self.forward[layer].mean
        return _TimedCall(self.use[device], self.backward[layer], besides, note)

    @contextmanager
    def busy(self, device: int, note: Note | None = None) -> Iterator[None]:
        """Measures other work of a device."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self.use[device].busy_seconds += end - start
        if note is not None:
            note(start, end)

    def costs_of(self, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of each call's forward, and of its backward including the recompute."""
        forward = [self.forward[i].mean for i in calls]
        return forward, [self.backward[i].mean or 3 * self.forward[i].mean for i in calls]

    def forget_costs(self) -> None:
        """After the first batch: whatever happens for the first time is slow, so only what comes now counts."""
        for costs in (self.forward, self.backward):
            costs[:] = [Costs() for _ in costs]
