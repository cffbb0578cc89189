"""How long devices work: by the host's clock, or by events, which are read when the device has come to them."""

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_roundpipe.devices import CpuDevice
from lightning_roundpipe.devices.stopwatch import EventStopwatch, HostStopwatch
from lightning_roundpipe.pipeline.measuring import Measured


@dataclass
class Event:
    """Knows when it comes, in milliseconds."""

    stream: Any = None
    time: float = 0.0

    def query(self) -> bool:
        return self.stream.now >= self.time

    def elapsed_time(self, other: "Event") -> float:
        assert self.query() and other.query()
        return other.time - self.time


@dataclass
class Stream:
    """A stream that was given work up to some time, and is at another one."""

    given: float = 0.0
    now: float = 0.0

    def timestamp(self) -> Event:
        return Event(self, self.given)

    def work(self, milliseconds: float) -> None:
        self.given += milliseconds


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_by_events(stream: Stream) -> None:
    """Without what the device has waited for, and when it is done."""
    stream.work(7)
    stopwatch = EventStopwatch(stream.timestamp)
    stream.work(20)
    stopwatch.leave_out(lambda: stream.work(1000))
    stream.work(30)
    assert stopwatch.seconds() is None
    stopwatch.stop()
    stopwatch.leave_out(lambda: stream.work(500))  # of whatever comes next
    stream.work(100)
    assert stopwatch.seconds() is None
    stream.now = 1056.0
    assert stopwatch.seconds() is None
    stream.now = 1057.0
    assert stopwatch.seconds() == pytest.approx(0.050)


def test_by_the_clock() -> None:
    stopwatch = HostStopwatch()
    assert stopwatch.seconds() is None
    waits: list[int] = []
    stopwatch.leave_out(lambda: waits.append(1))
    stopwatch.stop()
    seconds = stopwatch.seconds()
    assert waits == [1] and seconds is not None and 0 < seconds == stopwatch.seconds()


class Asynchronous(CpuDevice):
    def __init__(self, stream: Stream) -> None:
        super().__init__(0, 1)
        self.stream = stream

    def stopwatch(self) -> Any:
        return EventStopwatch(self.stream.timestamp)


def test_costs_are_the_devices_time(stream: Stream) -> None:
    """They count as soon as they are known, and in the order of the work."""
    measured = Measured(2, [Asynchronous(stream)])
    with measured.forward_call(0, 0):
        stream.work(10)
    with measured.forward_call(0, 1):
        stream.work(40)
    with measured.busy(0):
        stream.work(5)
    assert measured.costs_of([0, 1])[0] == [0.0, 0.0] and measured.use[0].calls == 0
    stream.now = 50.0
    assert measured.costs_of([0, 1])[0] == pytest.approx([0.010, 0.040])
    assert measured.use[0].calls == 2 and measured.use[0].busy_seconds == pytest.approx(0.050)
    with measured.backward_call(0, 0, recomputes=False):
        stream.work(20)
    stream.now = 75.0
    measured.settle()
    assert measured.backward[0].mean == pytest.approx(0.030), "and a recompute as long as the forward"
    assert measured.use[0].busy_seconds == pytest.approx(0.075)
