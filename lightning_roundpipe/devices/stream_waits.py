"""For how long a stream of a device waits for others."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_roundpipe.devices.base import Hardware, Timestamp


class StreamWaits:
    """Measured on the device: a mark before the wait, and one after it. The host waits for neither.

    Args:
        hardware: The device.
        stream: The stream that waits.

    Attributes:
        seconds: All waits that have been collected.
    """

    def __init__(self, hardware: Hardware, stream: Any) -> None:
        self.seconds = 0.0
        self._hardware = hardware
        self._stream = stream
        self._marks: deque[tuple[Timestamp, Timestamp]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what lets the stream wait."""
        before = self._hardware.timestamp(self._stream)
        yield
        self._marks.append((before, self._hardware.timestamp(self._stream)))

    def collect(self) -> None:
        """Adds up the waits that are over. Called while the device's calls are in order, so that marks are not many."""
        while self._marks and self._marks[0][1].query():
            before, after = self._marks.popleft()
            self.seconds += before.elapsed_time(after) / 1000
