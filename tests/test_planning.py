"""Plans are searched in the background, and again when costs or calls have changed."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_roundpipe.devices import CpuDevice
from lightning_roundpipe.pipeline.measuring import Costs, Measured
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.pipeline.planning import Planning
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.schedules import Partition, Scheduler
from lightning_roundpipe.schedules.partition import balance

CALLS, FORWARD, BACKWARD = (0, 1, 2, 3), [1.0, 1.0, 1.0, 2.0], [3.0, 3.0, 3.0, 6.0]


class Noted(Scheduler):
    """Notes what it is asked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.searched: list[tuple[Any, ...]] = []

    def plan(self, *args: Any) -> tuple[Partition, int]:
        self.searched.append(args[:4])
        return super().plan(*args)


def no_failure(error: BaseException) -> None:
    raise error


class Asked:
    """A planning that is told of batches with these costs."""

    def __init__(self, scheduler: Scheduler, staleness: int = 0) -> None:
        self.measured = Measured(4, [CpuDevice(i, 1) for i in range(2)])
        self.planning = Planning(scheduler, self.measured, staleness, no_failure)

    def consider(self, calls: tuple[int, ...], forward: list[float], backward: list[float], microbatches: int) -> None:
        """After a batch that made these calls, at these costs each, as it was planned."""
        self.measured.costs_of = lambda _: (forward, backward)  # type: ignore[method-assign]
        self.planning.plan = Plan.make(calls, balance([1.0] * len(calls), [3.0] * len(calls), fused=True), 1)
        batch: Any = SimpleNamespace(
            plan=self.planning.plan, records=False, deferred=False, number=5, microbatches=microbatches
        )
        self.planning.follow(batch, [calls] * microbatches)

    def take(self, calls: tuple[int, ...]) -> Plan | None:
        """What has been found for the next batch."""
        before = self.planning.plan = Plan.make(calls, balance([1.0] * len(calls), [3.0] * len(calls), fused=True), 1)
        plan = self.planning.next(deferred=False)
        return None if plan is before else plan


def searched_at_once(monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler, staleness: int = 0) -> Asked:
    """With searches that are over when they have begun."""

    class Inline:
        def __init__(self, name: str) -> None:
            pass

        def submit(self, work: Any, then: Any) -> None:
            work()
            then()

    monkeypatch.setattr("lightning_roundpipe.pipeline.planning.WorkThread", Inline)
    monkeypatch.setattr("lightning_roundpipe.pipeline.planning.monotonic", lambda: 0.0)  # and take no time
    return Asked(scheduler, staleness)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_search(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Noted("roundpipe", 2)
    planning = searched_at_once(monkeypatch, scheduler, staleness)
    assert planning.take(CALLS) is None
    planning.consider(CALLS, FORWARD, BACKWARD, 5)
    assert scheduler.searched == [(FORWARD, BACKWARD, 5, staleness)]
    found = planning.take(CALLS)
    assert found is not None and found.calls == CALLS
    assert (found.partition, found.lanes) == Scheduler("roundpipe", 2).plan(FORWARD, BACKWARD, 5, staleness)
    assert planning.take(CALLS) is None, "a plan is given once"


def test_searched_again_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Noted("roundpipe", 2)
    planning = searched_at_once(monkeypatch, scheduler)
    known: tuple[Any, ...] = CALLS, FORWARD, BACKWARD, 5
    for changed, again in (
        (known, True),
        (known, False),
        ((CALLS, [1.05 * cost for cost in FORWARD], BACKWARD, 5), False),  # nearly the same costs
        ((CALLS, [2 * cost for cost in FORWARD], BACKWARD, 5), True),
        (known, True),
        ((CALLS, FORWARD, [3.0, 3.0, 9.0, 6.0], 5), True),
        (known, True),
        ((CALLS, FORWARD, BACKWARD, 4), True),  # the number of microbatches
        (((0, 1, 2, 2), FORWARD, BACKWARD, 4), True),  # the order of calls
        (((0, 1, 2), FORWARD[:3], BACKWARD[:3], 4), True),
        (((0, 1, 2), FORWARD[:3], BACKWARD[:3], 4), False),
    ):
        before = len(scheduler.searched)
        planning.consider(*changed)
        assert len(scheduler.searched) - before == again, changed


def test_costs_in_the_same_proportions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with others on it is slower, and the same stages are best."""
    scheduler = Noted("roundpipe", 2)
    planning = searched_at_once(monkeypatch, scheduler)
    planning.consider(CALLS, FORWARD, BACKWARD, 5)
    planning.consider(CALLS, [3 * cost for cost in FORWARD], [3 * cost for cost in BACKWARD], 5)
    assert len(scheduler.searched) == 1


def test_rests_between_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs that are never the same are not searched for all the time; other calls are, at once."""
    scheduler = Noted("roundpipe", 2)
    planning = searched_at_once(monkeypatch, scheduler)
    now = [0.0]

    def reads_a_clock() -> float:  # a search reads it twice, and so takes a second
        now[0] += 1
        return now[0]

    monkeypatch.setattr("lightning_roundpipe.pipeline.planning.monotonic", reads_a_clock)
    searched_at = []
    for batch in range(60):
        before = len(scheduler.searched)
        planning.consider(CALLS, [cost * (1 + batch % 2) for cost in FORWARD], BACKWARD, 5)
        if len(scheduler.searched) > before:
            searched_at.append(batch)
    rests = [later - earlier for earlier, later in pairwise(searched_at)]
    assert len(rests) > 2 and all(later >= 1.5 * earlier for earlier, later in pairwise(rests)), rests
    planning.consider(CALLS, FORWARD, BACKWARD, 4)
    assert len(scheduler.searched) == len(searched_at) + 1


def test_slow_drift_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are compared with those of the last search, not with those of the batch before."""
    scheduler = Noted("roundpipe", 2)
    planning = searched_at_once(monkeypatch, scheduler)
    for percent in range(30):
        planning.consider(CALLS, [cost * (1 + percent / 25) for cost in FORWARD], BACKWARD, 5)
    assert 1 < len(scheduler.searched) < 5


def test_a_plan_for_calls_that_are_no_longer_made(monkeypatch: pytest.MonkeyPatch) -> None:
    planning = searched_at_once(monkeypatch, Noted("roundpipe", 2))
    planning.consider(CALLS, FORWARD, BACKWARD, 5)
    assert planning.take((0, 1, 3, 2)) is None


def test_nothing_to_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheduler, costs in ((Noted("gpipe", 2), FORWARD), (Noted("roundpipe", 2), [0.0] * 4)):
        searched_at_once(monkeypatch, scheduler).consider(CALLS, costs, [3 * cost for cost in costs], 5)
        assert not scheduler.searched


def test_batches_do_not_wait_for_a_search() -> None:
    class Slow(Noted):
        def plan(self, *args: Any) -> tuple[Partition, int]:
            begun.set()
            assert go_on.wait(30)
            return super().plan(*args)

    begun, go_on = threading.Event(), threading.Event()
    scheduler = Slow("roundpipe", 2)
    planning = Asked(scheduler)
    planning.consider(CALLS, FORWARD, BACKWARD, 5)
    assert begun.wait(30)
    assert planning.take(CALLS) is None
    planning.consider(CALLS, [9.0] * 4, BACKWARD, 5)  # not before the one under way is over
    go_on.set()
    planning.planning.close()
    assert len(scheduler.searched) == 1


@pytest.mark.timeout(30)
def test_a_search_ends_when_the_pipeline_does() -> None:
    class Endless(Scheduler):
        def plan(self, *args: Any) -> tuple[Partition, int]:
            *_, give_way = args
            begun.set()
            while True:
                give_way()

    begun = threading.Event()
    planning = Asked(Endless("roundpipe", 2))
    planning.consider(CALLS, FORWARD, BACKWARD, 5)
    assert begun.wait(10)
    planning.planning.close()
    assert planning.take(CALLS) is None


# --- the costs that it is given


def test_costs_are_a_moving_average() -> None:
    costs = Costs()
    for seconds in (1.0, 6.0, 2.0):
        costs.add(seconds)
    assert costs.mean == pytest.approx(2.0), "the median of the first ones"
    for _ in range(2):
        costs.add(2.0)
    costs.add(4.0)
    assert costs.mean == pytest.approx(2.0 + (4.0 - 2.0) / 6)
    for _ in range(1000):
        costs.add(10.0)
    assert costs.mean == pytest.approx(10.0, rel=1e-6), "what was long ago is forgotten"


def test_a_call_that_was_interrupted_hardly_counts() -> None:
    costs = Costs()
    for seconds in [1.0, 1.0, 100.0] + [1.0] * 7 + [100.0]:
        costs.add(seconds)
    assert costs.mean <= 1.1


def test_the_first_batch_is_not_measured() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    pipeline = Pipeline(model, [CpuDevice(i, 1) for i in range(2)])
    steps = [partial(lambda x: model(x).mean(), torch.ones(1, 3)) for _ in range(3)]
    for batch in range(3):
        pipeline.start_batch(steps, [1 / 3] * 3, lambda: 1.0)
        pipeline.wait_backward()
        costs = (*pipeline.measured.forward, *pipeline.measured.backward)
        assert sum(each.calls for each in costs) == batch * 3 * (4 + 4)
    pipeline.close()
