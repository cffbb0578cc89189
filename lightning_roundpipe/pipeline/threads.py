"""Threads that run what they are given, in order."""

import contextvars
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

Work: TypeAlias = Callable[[], None]


class WorkThread:
    """A thread that runs what it is given, in order. Work must not raise."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Work, Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._work,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work, then: Work) -> None:
        """Runs ``work``, drops every reference to it, and runs ``then``."""
        self._work.put((work, then))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


class Threads:
    """Numbered threads that are there as soon as they are given something.

    Args:
        name: What their names begin with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[int, WorkThread] = {}

    def submit(self, number: int, work: Work, then: Work) -> None:
        """As :meth:`WorkThread.submit`, in a copy of the present context."""
        if number not in self._threads:
            self._threads[number] = WorkThread(f"{self._name}-{number}")
        self._threads[number].submit(partial(contextvars.copy_context().run, work), then)

    def close(self) -> None:
        for thread in self._threads.values():
            thread.close()
        self._threads = {}


def _work_off(queue_: "queue.SimpleQueue[tuple[Work, Work] | None]") -> None:
    while (item := queue_.get()) is not None:
        work, then = item
        del item
        work()
        del work
        then()
        del then
