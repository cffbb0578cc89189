"""Who may go on, and when: interruptible waiting, the turnstile of each device, and the baton of user code.

All of them share one lock (:class:`Monitor`), so that an error anywhere ends every wait at once, and there is no lock
order to get wrong. Critical sections are a few dictionary operations long.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

Ticket: TypeAlias = tuple[int, Hashable]
"""The right to a turn: the number of the batch, and what is to be done."""

handover_hook: Callable[[], None] | None = None
"""Called at every hand-over between threads when set. For tests: random delays here must change no number."""


def _handover() -> None:
    if handover_hook is not None:
        handover_hook()


class Cancelled(BaseException):
    """Ends a thread's work quietly because another thread, which holds the true error, has failed."""


class Monitor:
    """One lock for all waits of a pipeline. After :meth:`fail` waits raise :class:`Cancelled`.

    A failure belongs to a batch. What was begun for earlier batches goes on: their optimizer steps are made, none is
    made by half or dropped because a later batch failed.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._failed_from = math.inf
        self._waiting: list[threading.Condition] = []  # one entry for each thread that waits

    def condition(self) -> threading.Condition:
        return threading.Condition(self.lock)

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool], batch: float = math.inf) -> None:
        """Waits, with the lock held, until the predicate holds.

        Args:
            condition: Notified when the predicate may have changed.
            predicate: What to wait for.
            batch: Number of the batch that the wait is for; by default one later than all.

        Raises:
            Cancelled: When that batch or an earlier one has failed, whether or not the predicate holds.
        """
        self._waiting.append(condition)
        try:
            while not self._has_failed(batch) and not predicate():
                condition.wait()
        finally:
            self._waiting.remove(condition)
        self.raise_if_failed(batch)

    def raise_if_failed(self, batch: float = math.inf) -> None:
        if self._has_failed(batch):
            raise Cancelled

    def _has_failed(self, batch: float) -> bool:
        return self.failure is not None and batch >= self._failed_from

    def fail(self, error: BaseException, batch: float = 0) -> None:
        """Records an error (the first one counts) and wakes what waits for this batch or a later one."""
        with self.lock:
            if self.failure is None:
                self.failure = error
            self._failed_from = min(self._failed_from, batch)
            for condition in self._waiting:
                condition.notify_all()


class Turnstiles:
    """Admits work to each device strictly in the order given by :meth:`extend`.

    A ticket at the head of its device's line may run; :meth:`leave` lets the next one in. A ticket may be left without
    ever having been entered (its work turned out not to exist): the line passes over it.
    """

    def __init__(self, monitor: Monitor, devices: int) -> None:
        self._monitor = monitor
        self._lines: list[deque[Ticket]] = [deque() for _ in range(devices)]
        self._device: dict[Ticket, int] = {}
        self._left: set[Ticket] = set()
        self._conditions: dict[Ticket, threading.Condition] = {}

    def extend(self, lines: Iterable[Iterable[Ticket]]) -> None:
        """Appends tickets to each device's line."""
        with self._monitor.lock:
            for device, tickets in enumerate(lines):
                for ticket in tickets:
                    self._lines[device].append(ticket)
                    self._device[ticket] = device

    def enter(self, ticket: Ticket) -> None:
        """Waits until the ticket heads its device's line."""
        _handover()
        with self._monitor.lock:
            line = self._lines[self._device[ticket]]
            if line[0] == ticket:
                self._monitor.raise_if_failed(ticket[0])
                return
            condition = self._conditions[ticket] = self._monitor.condition()
            try:
                self._monitor.wait_for(condition, lambda: line[0] == ticket, ticket[0])
            finally:
                del self._conditions[ticket]

    def leave(self, ticket: Ticket) -> None:
        """Ends the ticket's turn, or gives it up before its turn came."""
        with self._monitor.lock:
            device = self._device.pop(ticket, None)
            if device is None:
                return
            self._left.add(ticket)
            line = self._lines[device]
            while line and line[0] in self._left:
                self._left.discard(line.popleft())
            if line and (condition := self._conditions.get(line[0])) is not None:
                condition.notify()


class Baton:
    """Held by whoever runs user code between layer calls; handed on first come, first served.

    The place in the queue is taken by :meth:`request`, which a thread calls *before* it leaves a turnstile:
    microbatches that pass a stage in order thus also run the code after it in order.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._queue: deque[Place] = deque()

    def request(self) -> "Place":
        place = Place()
        with self._monitor.lock:
            self._queue.append(place)
        return place

    def take(self, place: "Place", batch: float) -> None:
        _handover()
        with self._monitor.lock:
            try:
                if self._queue[0] is place:
                    self._monitor.raise_if_failed(batch)
                    return
                place.condition = self._monitor.condition()
                self._monitor.wait_for(place.condition, lambda: self._queue[0] is place, batch)
            except BaseException:
                self._remove(place)
                raise

    def release(self, place: "Place") -> None:
        with self._monitor.lock:
            self._remove(place)
        _handover()

    def _remove(self, place: "Place") -> None:
        self._queue.remove(place)
        if self._queue and (condition := self._queue[0].condition) is not None:
            condition.notify()


class Place:
    """In the queue for the baton."""

    __slots__ = ("condition",)

    def __init__(self) -> None:
        self.condition: threading.Condition | None = None
        """Once its owner waits."""
