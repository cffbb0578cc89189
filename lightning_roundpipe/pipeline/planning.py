"""Looks for better stages in the background, by the costs that the runtime measures."""

from collections.abc import Callable, Sequence

from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.pipeline.threads import WorkThread
from lightning_roundpipe.schedules import Scheduler

_CHANGE = 0.1
"""By what share of the whole the costs must have changed for another plan."""


class Planning:
    """A search at a time, in a thread of its own; batches go on with the plan that they have.

    No number depends on the plan, so it does not matter which batch is the first to have a new one.

    Args:
        scheduler: What searches.
        staleness: For what.
        failed: Told of an error.
    """

    def __init__(self, scheduler: Scheduler, staleness: int, failed: Callable[[BaseException], None]) -> None:
        self._scheduler = scheduler
        self._staleness = staleness
        self._failed = failed
        self._thread: WorkThread | None = None
        self._searching = False
        self._found: Plan | None = None
        self._planned: tuple[tuple[int, ...], int, list[float]] | None = None

    def consider(
        self, calls: tuple[int, ...], forward: Sequence[float], backward: Sequence[float], microbatches: int
    ) -> None:
        """Begins a search where calls, microbatches or costs have changed since the last one."""
        costs = [*forward, *backward]
        if self._searching or not self._scheduler.can_be_planned or not sum(costs):
            return
        if self._planned is not None:
            change = sum(abs(a - b) for a, b in zip(costs, self._planned[2], strict=False))
            if self._planned[:2] == (calls, microbatches) and change < _CHANGE * sum(costs):
                return
        self._planned = calls, microbatches, costs
        self._searching = True
        self._thread = self._thread or WorkThread("roundpipe-planner")
        self._thread.submit(lambda: self._search(calls, list(forward), list(backward), microbatches), lambda: None)

    def take(self, calls: tuple[int, ...]) -> Plan | None:
        """The plan that was found for these calls, if there is a new one."""
        found, self._found = self._found, None
        return found if found is not None and found.calls == calls else None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def _search(self, calls: tuple[int, ...], forward: list[float], backward: list[float], microbatches: int) -> None:
        try:
            partition, lanes = self._scheduler.plan(forward, backward, microbatches, self._staleness)
            self._found = Plan.make(calls, partition, lanes)
        except BaseException as error:
            error.add_note("roundpipe: while planning stages")
            self._failed(error)
        finally:
            self._searching = False
