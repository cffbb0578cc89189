"""How long a device works: by the host's clock, or by events in its stream."""

import threading
import time
from collections.abc import Callable

from lightning_roundpipe.devices.base import Timestamp


class HostStopwatch:
    """For devices whose work is done as soon as the host has handed it out."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._is_stopped = False

    def leave_out(self, wait: Callable[[], None]) -> None:
        wait()

    def stop(self) -> None:
        self.stopped = time.perf_counter()
        self._is_stopped = True

    def seconds(self) -> float | None:
        return self.stopped - self.started if self._is_stopped else None


class EventStopwatch:
    """For a stream, which works while the host goes on: by events that note the time. They are read when the stream has
    come to the last of them.

    Args:
        now: Notes when the stream has done what it was given so far; see :meth:`Hardware.timestamp`.
    """

    def __init__(self, now: Callable[[], Timestamp]) -> None:
        self.started = time.perf_counter()
        self._now = now
        self._lock = threading.Lock()
        self._starts, self._ends = [now()], list[Timestamp]()
        self._is_stopped = False

    def leave_out(self, wait: Callable[[], None]) -> None:
        with self._lock:  # another device's thread may bring something to this one
            if self._is_stopped:
                wait()
                return
            self._ends.append(self._now())
            wait()
            self._starts.append(self._now())

    def stop(self) -> None:
        with self._lock:
            self._ends.append(self._now())
            self._is_stopped = True
        self.stopped = time.perf_counter()

    def seconds(self) -> float | None:
        if not (self._is_stopped and self._ends[-1].query()):
            return None
        return sum(start.elapsed_time(end) for start, end in zip(self._starts, self._ends, strict=True)) / 1000
