"""For how long a stream of a device waits for others."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_roundpipe.devices.base import Timestamp


class StreamWaits:
    """Measured on the device: a mark before the wait, and one after it. The host waits for neither.

    Args:
        now: Notes when the stream that waits has done what it was given so far; see :meth:`Hardware.timestamp`.

    Attributes:
        seconds: All waits that have been collected.
    """

    def __init__(self, now: Callable[[], Timestamp]) -> None:
        self.seconds = 0.0
        self._now = now
        self._marks: deque[tuple[Timestamp, Timestamp]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what lets the stream wait."""
        before = self._now()
        yield
        self._marks.append((before, self._now()))

    def collect(self) -> None:
        """Adds up the waits that are over. Called while the device's calls are in order, so that marks are not many."""
        while self._marks and self._marks[0][1].query():
            before, after = self._marks.popleft()
            self.seconds += before.elapsed_time(after) / 1000
