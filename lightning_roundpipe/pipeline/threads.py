"""Threads that run what they are given, in order."""

import queue
import threading
from collections.abc import Callable


class WorkThread:
    """A thread that runs what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._work,), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


def _work_off(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (item := work.get()) is not None:
        item()
        del item
