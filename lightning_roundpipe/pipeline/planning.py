"""Which plan the next batch has: by the calls that the last one made, and by the costs that are measured."""

from collections.abc import Callable, Sequence
from time import monotonic, sleep

from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.pipeline.measuring import Measured
from lightning_roundpipe.pipeline.plan import Plan, merged_calls
from lightning_roundpipe.pipeline.threads import WorkThread
from lightning_roundpipe.pipeline.turnstile import Cancelled
from lightning_roundpipe.schedules import Partition, Scheduler
from lightning_roundpipe.schedules.memory import NOTHING_STAYS, Memory

_CHANGE = 0.1
"""By how much the layers' shares of the costs must have changed, all together, for another plan."""
_PAUSE = 1e-4
"""Seconds for which a search gives way after each trial: else it would hold the interpreter for 5 ms at a time."""


class Planning:
    """Makes plans at once where there must be one, and better ones in the background, in a thread of its own.

    No number depends on the plan, so it does not matter which batch is the first to have a new one. A search takes
    processor time from the batches, and measured costs are never quite the same, so it rests after each search twice as
    long as the time before, but for changes of the calls.

    Args:
        scheduler: What searches.
        measured: The layers' costs.
        staleness: For what.
        failed: Told of an error in the background.
        memory: What stages of calls must fit into, if anything.
        graphs_stay: Whether graphs stay on devices with memory of their own, where there is room.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        measured: Measured,
        staleness: int,
        failed: Callable[[BaseException], None],
        memory: Callable[[Sequence[int]], Memory | None] = lambda calls: None,
        *,
        graphs_stay: bool = False,
    ) -> None:
        self.plan: Plan | None = None
        """The plan of the step, as soon as there is one."""
        self._scheduler = scheduler
        self._measured = measured
        self._staleness = staleness
        self._failed = failed
        self._memory = memory
        self._graphs_stay = graphs_stay
        self._thread: WorkThread | None = None
        self._searching = False
        self._closed = False
        self._rest = 0.0
        self._rests_until = 0.0
        self._found: Plan | None = None
        self._planned: tuple[tuple[int, ...], int, list[float]] | None = None

    @property
    def settled(self) -> bool:
        """Whether no better plan is found or being searched."""
        return not self._searching and self._found is None

    def make(self, calls: Sequence[int], *, fused: bool, alone: bool = True) -> Plan:
        """A plan for these calls, by what they cost and need.

        Args:
            calls: The calls.
            fused: Whether the last stage may be fused.
            alone: Whether a step makes no others, of which something would stay on devices at the same time.
        """
        memory = self._memory(calls)

        def balanced(before: Plan | None) -> Plan:
            forward, backward, kept = self._costs(calls, before)
            partition = self._scheduler.partition(forward, backward, fused=fused, memory=memory, kept=kept)
            return self._plan(calls, partition, self._scheduler.lanes, memory, alone=alone)

        plan = balanced(None)
        # What turns out to have no room is recomputed, which takes time.
        return balanced(plan) if self._graphs_stay else plan

    def _costs(self, calls: Sequence[int], plan: Plan | None) -> tuple[list[float], list[float], list[bool]]:
        """Seconds of each call's forward and backward, and whether its graph is kept, so that the latter has no
        recompute: as in a plan for these calls, or else as if there were room for all graphs."""
        forward, backward = self._measured.costs_of(calls)
        kept = [not self._measured.recomputes(call) for call in calls]
        if self._graphs_stay and plan is not None and plan.calls == tuple(calls):
            for i, stage in enumerate(plan.forward_stage):
                if kept[i] and i not in plan.staying.graphs and stage != plan.fused_stage:
                    kept[i] = False
                    backward[i] += forward[i]
        return forward, backward, kept

    def _plan(
        self, calls: Sequence[int], partition: Partition, lanes: int, memory: Memory | None, *, alone: bool = True
    ) -> Plan:
        """With what stays on devices."""
        found = self._scheduler.staying(partition, lanes, memory, graphs=self._graphs_stay) if alone else NOTHING_STAYS
        return Plan.make(calls, partition, lanes, found)

    def next(self, *, deferred: bool) -> Plan | None:
        """The plan for the next batch, if there is one yet."""
        if self.plan is None:
            return None
        if deferred:
            return self.make(self.plan.calls, fused=False)
        found, self._found = self._found, None
        if found is not None and found.calls == self.plan.calls:
            self.plan = found
        return self.plan

    def follow(self, batch: Batch, sequences: Sequence[tuple[int, ...]]) -> None:
        """Plans anew where that is necessary, and searches where it may help.

        Args:
            batch: The batch that was the last.
            sequences: The calls that its microbatches made.
        """
        merged = merged_calls(batch.plan, sequences)
        if batch.records or (batch.plan is not None and (merged != batch.plan.calls or batch.number == 1)):
            self.plan = self.make(merged, fused=True)
        elif batch.plan is not None and not batch.deferred:
            self._consider(merged, batch.microbatches)

    def close(self) -> None:
        """A search that is under way ends here."""
        self._closed = True
        if self._thread is not None:
            self._thread.close()

    def _consider(self, calls: tuple[int, ...], microbatches: int) -> None:
        """Begins a search where calls, microbatches or costs have changed since the last one."""
        forward, backward, kept = self._costs(calls, self.plan)
        total = sum(forward) + sum(backward)
        if self._searching or not self._scheduler.can_be_planned or not total:
            return
        # Where everything takes longer, for there are others on the machine, say, the same stages are best.
        shares = [cost / total for cost in (*forward, *backward)]
        if self._planned is not None and self._planned[:2] == (calls, microbatches):
            change = sum(abs(a - b) for a, b in zip(shares, self._planned[2], strict=True))
            if change < _CHANGE or monotonic() < self._rests_until:
                return
        self._planned = calls, microbatches, shares
        self._searching = True
        self._thread = self._thread or WorkThread("roundpipe-planner")
        memory = self._memory(calls)
        self._thread.submit(lambda: self._search(calls, forward, backward, microbatches, memory, kept), lambda: None)

    def _give_way(self) -> None:
        if self._closed:
            raise Cancelled
        sleep(_PAUSE)

    def _search(
        self,
        calls: tuple[int, ...],
        forward: list[float],
        backward: list[float],
        microbatches: int,
        memory: Memory | None,
        kept: list[bool],
    ) -> None:
        start = monotonic()
        try:
            partition, lanes = self._scheduler.plan(
                forward, backward, microbatches, self._staleness, memory, kept, self._give_way
            )
            self._found = self._plan(calls, partition, lanes, memory)
        except Cancelled:
            return
        except BaseException as error:
            error.add_note("roundpipe: while planning stages")
            self._failed(error)
        finally:
            now = monotonic()
            self._rest = max(2 * self._rest, now - start)
            self._rests_until = now + self._rest
            self._searching = False
