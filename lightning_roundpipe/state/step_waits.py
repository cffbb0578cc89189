"""How long batches wait for the optimizer's step in the background."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepWaits:
    """For how long threads have waited while the optimizer's step was at work in the background: what they wait before,
    they wait for a backward. What several wait at the same time counts once; who need not wait looks at no clock.

    Whoever calls it holds the monitor's lock.

    Attributes:
        seconds: All together.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting = self._stepping = 0
        self._since = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a thread's wait."""
        self._change(waiting=1)
        try:
            yield
        finally:
            self._change(waiting=-1)

    def begin_step(self) -> None:
        self._change(stepping=1)

    def end_step(self) -> None:
        self._change(stepping=-1)

    def _change(self, waiting: int = 0, stepping: int = 0) -> None:
        before = self._waiting and self._stepping
        self._waiting += waiting
        self._stepping += stepping
        now = self._waiting and self._stepping
        if now and not before:
            self._since = time.perf_counter()
        elif before and not now:
            self.seconds += time.perf_counter() - self._since
