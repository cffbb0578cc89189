"""Streams and events of simulated devices: what must have happened before what.

Work is done at once, so nothing is ever too late. What is checked is whether a real device, which does it later, would
have been told to wait: each stream knows how far the others were when it last waited for them, and so does the host.
"""

import threading
from typing import Any

from lightning_roundpipe.devices.simulated_links import Link, Time

Moment = tuple["SimulatedStream", int]
"""A piece of work: the stream that it was given to, and its number there."""

_current = threading.local()


class StreamOrderError(RuntimeError):
    """Memory is used while a stream may still be at work with it."""


class SimulatedStream:
    """Work of one device that is done in its order. As a context, it is the thread's current stream.

    Args:
        device: The device's name.
        name: Names the stream in errors.

    Attributes:
        issued: Number of the last piece of work that it was given.
        time: When its work so far is done, by the modelled durations of copies.
    """

    def __init__(self, device: str, name: str) -> None:
        self.device = device
        self.name = f"{name} of {device}"
        self.issued = 0
        self.time = Time()
        self._completed = 0
        self._known: dict[SimulatedStream, int] = {}
        self._issuing = threading.Lock()

    def issue(self) -> int:
        """Gives it a piece of work. Returns that one's number."""
        with self._issuing:
            self.issued += 1
            return self.issued

    @property
    def seconds(self) -> float:
        """When its work so far is done, by the modelled durations of copies."""
        return self.time.seconds()

    def copy_on(self, link: Link, seconds: float) -> None:
        """Its present work is a copy that takes so long on a link."""
        if seconds:
            self.time = self.time.and_copy(link, self, seconds)

    def follows(self, moment: Moment) -> bool:
        """Whether what it is given from now on comes after some work."""
        stream, number = moment
        return stream is self or number <= stream._completed or number <= self._known.get(stream, 0)

    def has_done(self, number: int) -> bool:
        """Whether the host knows that it has done a piece of work."""
        return number <= self._completed

    def record_event(self) -> "SimulatedEvent":
        event = SimulatedEvent()
        event.record(self)
        return event

    def wait_event(self, event: "SimulatedEvent") -> None:
        """What comes from now on waits for what the event was recorded after. The host does not."""
        for stream, number in event.known.items():
            self._known[stream] = max(number, self._known.get(stream, 0))
        self.time = self.time.and_also(event.time)

    def wait_stream(self, other: "SimulatedStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits for all its work."""
        self.record_event().synchronize()

    def __enter__(self) -> "SimulatedStream":
        _chosen(self.device).append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _chosen(self.device).pop()

    def __repr__(self) -> str:
        return f"<{self.name}>"


class SimulatedEvent:
    """A mark in a stream. As on real devices, one that was never recorded makes nobody wait."""

    def __init__(self) -> None:
        self.known: dict[SimulatedStream, int] = {}
        self.time = Time()

    def record(self, stream: SimulatedStream) -> None:
        """From now on it stands for all work that the stream has been given, and what that has waited for."""
        self.known = {**stream._known, stream: stream.issued}
        self.time = stream.time

    def wait(self, stream: SimulatedStream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        """The host waits for it."""
        for stream, number in self.known.items():
            stream._completed = max(stream._completed, number)
        self.time.seconds()  # what is handed out from now on comes later

    def query(self) -> bool:
        """Whether the host knows that it has come."""
        return all(stream.has_done(number) for stream, number in self.known.items())

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        """Milliseconds to another event, by the modelled durations.

        Raises:
            StreamOrderError: When the host does not know that both have come.
        """
        if not (self.query() and end.query()):
            raise StreamOrderError("The time between two events is not known before both have come.")
        return 1000 * (end.time.seconds() - self.time.seconds())


def current_stream(device: str) -> SimulatedStream | None:
    """The stream that this thread has chosen for a device, if any."""
    chosen = _chosen(device)
    return chosen[-1] if chosen else None


def _chosen(device: str) -> list[SimulatedStream]:
    """Those of a device that this thread has entered and not left."""
    found: dict[str, list[SimulatedStream]] | None = getattr(_current, "streams", None)
    if found is None:
        found = _current.streams = {}
    return found.setdefault(device, [])


class Uses:
    """Who has written a piece of memory, and who has read it since."""

    __slots__ = ("reads", "written")

    def __init__(self, written: Moment | None = None) -> None:
        self.written = written
        self.reads: dict[SimulatedStream, int] = {}

    def read(self, stream: SimulatedStream | None, what: Any) -> None:
        """Notes that it is read, by a stream's present work or, without one, by the host.

        Raises:
            StreamOrderError: When what was written there may not be there yet.
        """
        if self.written is not None and not _comes_after(stream, self.written):
            raise StreamOrderError(
                f"{what} reads, on {_name(stream)}, what {self.written[0].name} may not have written yet. Record an"
                f" event there after the writing, and let {_name(stream)} wait for it before."
            )
        if stream is not None:
            self.reads[stream] = stream.issued

    def write(self, stream: SimulatedStream | None, what: Any) -> None:
        """Notes that it is overwritten.

        Raises:
            StreamOrderError: When a stream may still read or write it.
        """
        if self.written is not None and not _comes_after(stream, self.written):
            raise StreamOrderError(
                f"{what} writes, on {_name(stream)}, to memory that {self.written[0].name} may not have written yet."
                f" Record an event there after the writing, and let {_name(stream)} wait for it before."
            )
        for reader, number in list(self.reads.items()):
            if not _comes_after(stream, (reader, number)):
                raise StreamOrderError(
                    f"{what} overwrites, on {_name(stream)}, what {reader.name} may still read. Record an event there"
                    f" after the reading, and let {_name(stream)} wait for it before."
                )
        self.written = None if stream is None else (stream, stream.issued)
        self.reads.clear()

    def moments(self) -> list[Moment]:
        """The work that must be done before the memory can be used for something else."""
        last = [] if self.written is None else [self.written]
        return [*last, *self.reads.items()]


def _comes_after(stream: SimulatedStream | None, moment: Moment) -> bool:
    return moment[0].has_done(moment[1]) if stream is None else stream.follows(moment)


def _name(stream: SimulatedStream | None) -> str:
    return "the host" if stream is None else stream.name
