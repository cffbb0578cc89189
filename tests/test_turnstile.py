"""Turns, the baton and waiting, without a pipeline around them."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from lightning_roundpipe.pipeline import turnstile
from lightning_roundpipe.pipeline.turnstile import Baton, Cancelled, Monitor, Turnstiles

SECONDS = 10
"""Longer than anything here takes: who waits longer waits forever."""


class Waiters(list):
    """Tells of each thread that begins to wait. It holds the monitor's lock until it does."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def append(self, condition: threading.Condition) -> None:
        super().append(condition)
        self.begun.release()


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    made = Monitor()
    made._waiting = Waiters()
    yield made
    made.fail(Cancelled())  # so that a failed test leaves no thread waiting


@pytest.fixture
def pool(monitor: Monitor) -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(32)
    yield executor
    monitor.fail(Cancelled())
    executor.shutdown()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(5)
    monkeypatch.setattr(turnstile, "handover_hook", lambda: time.sleep(generator.choice([0, 0, 0.001, 0.002])))


def until_waiting(monitor: Monitor, count: int) -> None:
    """Returns when that many more threads have begun to wait."""
    for _ in range(count):
        assert monitor._waiting.begun.acquire(timeout=SECONDS)


# --- turnstiles


def test_the_head_of_the_line_enters_at_once(monitor: Monitor) -> None:
    turnstiles = Turnstiles(monitor, 2)
    turnstiles.extend([[(0, "a"), (0, "b")], [(0, "c")]])
    turnstiles.enter((0, "a"))
    turnstiles.enter((0, "c"))  # another device
    turnstiles.leave((0, "a"))
    turnstiles.enter((0, "b"))


def test_the_next_waits_until_the_head_leaves(monitor: Monitor, pool: ThreadPoolExecutor) -> None:
    turnstiles = Turnstiles(monitor, 1)
    turnstiles.extend([[(0, "a"), (0, "b")]])
    turnstiles.enter((0, "a"))
    entered = pool.submit(turnstiles.enter, (0, "b"))
    until_waiting(monitor, 1)
    assert not entered.done()
    turnstiles.leave((0, "a"))
    entered.result(SECONDS)


def test_the_line_passes_over_who_left_before_their_turn(monitor: Monitor, pool: ThreadPoolExecutor) -> None:
    turnstiles = Turnstiles(monitor, 1)
    turnstiles.extend([[(0, turn) for turn in "abcd"]])
    entered = pool.submit(turnstiles.enter, (0, "d"))
    until_waiting(monitor, 1)
    for turn in "cb":
        turnstiles.leave((0, turn))
    assert not entered.done()
    turnstiles.leave((0, "a"))
    entered.result(SECONDS)


def test_leaving_twice_is_leaving_once(monitor: Monitor) -> None:
    turnstiles = Turnstiles(monitor, 1)
    turnstiles.extend([[(0, "a"), (0, "b"), (0, "c")]])
    turnstiles.leave((0, "a"))
    turnstiles.leave((0, "a"))
    turnstiles.enter((0, "b"))


def test_lines_go_on_from_batch_to_batch(monitor: Monitor, pool: ThreadPoolExecutor) -> None:
    turnstiles = Turnstiles(monitor, 1)
    turnstiles.extend([[(0, "a")]])
    turnstiles.extend([[(1, "a")]])
    entered = pool.submit(turnstiles.enter, (1, "a"))
    until_waiting(monitor, 1)
    turnstiles.enter((0, "a"))
    turnstiles.leave((0, "a"))
    entered.result(SECONDS)


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_pass_in_order(seed: int, monitor: Monitor, pool: ThreadPoolExecutor, delays: None) -> None:
    """Each thread goes through all stages, but skips some; every stage admits the others in order, one at a time."""
    generator = random.Random(seed)
    threads, stages, devices = 12, 8, 3
    turnstiles = Turnstiles(monitor, devices)
    lines: list[list] = [[] for _ in range(devices)]
    for stage in range(stages):
        lines[stage % devices] += [(0, (stage, thread)) for thread in range(threads)]
    turnstiles.extend(lines)
    skips = {(stage, thread) for stage in range(stages) for thread in range(threads) if generator.random() < 0.3}
    log: list[tuple[int, int]] = []
    inside = [0] * devices

    def run(thread: int) -> None:
        for stage in range(stages):
            if (stage, thread) not in skips:
                turnstiles.enter((0, (stage, thread)))
                inside[stage % devices] += 1
                assert inside[stage % devices] == 1
                log.append((stage, thread))
                inside[stage % devices] -= 1
            turnstiles.leave((0, (stage, thread)))

    for done in [pool.submit(run, thread) for thread in generator.sample(range(threads), threads)]:
        done.result(SECONDS)
    for stage in range(stages):
        passed = [thread for at, thread in log if at == stage]
        assert passed == [thread for thread in range(threads) if (stage, thread) not in skips]


# --- failure


class Broken(Exception):
    pass


def test_failure_wakes_every_kind_of_wait(monitor: Monitor, pool: ThreadPoolExecutor) -> None:
    turnstiles, baton = Turnstiles(monitor, 1), Baton(monitor)
    turnstiles.extend([[(0, turn) for turn in "abc"]])
    held = baton.request()
    baton.take(held, 0)
    condition = monitor.condition()

    def wait() -> None:
        with monitor.lock:
            monitor.wait_for(condition, lambda: False, 0)

    waits: list[Future] = [
        *(pool.submit(turnstiles.enter, (0, turn)) for turn in "bc"),
        *(pool.submit(baton.take, baton.request(), 0) for _ in range(2)),
        *(pool.submit(wait) for _ in range(3)),  # several threads on one condition
    ]
    until_waiting(monitor, len(waits))
    error = Broken()
    monitor.fail(error)
    for each in waits:
        with pytest.raises(Cancelled):
            each.result(SECONDS)
    assert monitor.failure is error
    assert not monitor._waiting


def test_the_first_failure_counts(monitor: Monitor) -> None:
    first = Broken()
    monitor.fail(first)
    monitor.fail(Broken())
    assert monitor.failure is first


def test_failure_ends_its_batch_and_later_ones_only(monitor: Monitor, pool: ThreadPoolExecutor) -> None:
    turnstiles = Turnstiles(monitor, 1)
    turnstiles.extend([[(batch, turn) for batch in range(3) for turn in "ab"]])
    turnstiles.enter((0, "a"))
    waits = {batch: pool.submit(turnstiles.enter, (batch, "b")) for batch in range(3)}
    until_waiting(monitor, 3)
    monitor.fail(Broken(), batch=1)
    for batch in (1, 2):
        with pytest.raises(Cancelled):
            waits[batch].result(SECONDS)
    assert not waits[0].done()
    turnstiles.leave((0, "a"))
    waits[0].result(SECONDS)


def test_who_comes_after_a_failure_is_cancelled_even_if_nothing_is_in_the_way(monitor: Monitor) -> None:
    turnstiles, baton = Turnstiles(monitor, 1), Baton(monitor)
    turnstiles.extend([[(1, "a")]])
    monitor.fail(Broken(), batch=1)
    with pytest.raises(Cancelled):
        turnstiles.enter((1, "a"))
    with pytest.raises(Cancelled):
        baton.take(baton.request(), 1)
    with pytest.raises(Cancelled):
        monitor.raise_if_failed()
    monitor.raise_if_failed(0)


def test_a_failure_of_an_earlier_batch_widens_the_failure(monitor: Monitor) -> None:
    monitor.fail(Broken(), batch=4)
    monitor.raise_if_failed(2)
    monitor.fail(Broken(), batch=2)
    with pytest.raises(Cancelled):
        monitor.raise_if_failed(2)


# --- the baton


def test_the_baton_goes_by_the_order_of_requests(monitor: Monitor, pool: ThreadPoolExecutor, delays: None) -> None:
    baton = Baton(monitor)
    places = [baton.request() for _ in range(20)]
    order = []

    def run(number: int) -> None:
        baton.take(places[number], 0)
        order.append(number)
        baton.release(places[number])

    for done in [pool.submit(run, number) for number in random.Random(1).sample(range(20), 20)]:
        done.result(SECONDS)
    assert order == list(range(20))


def test_one_holds_the_baton_at_a_time(monitor: Monitor, pool: ThreadPoolExecutor, delays: None) -> None:
    baton = Baton(monitor)
    holders: list[threading.Thread] = []

    def run() -> None:
        for _ in range(10):
            place = baton.request()
            baton.take(place, 0)
            holders.append(threading.current_thread())
            assert holders == [threading.current_thread()]
            holders.clear()
            baton.release(place)

    for done in [pool.submit(run) for _ in range(8)]:
        done.result(SECONDS)


def test_who_is_cancelled_gives_up_their_place(monitor: Monitor, pool: ThreadPoolExecutor) -> None:
    """What goes on of an earlier batch is not held up by those who have left the queue."""
    baton = Baton(monitor)
    held = baton.request()
    baton.take(held, 0)
    cancelled = pool.submit(baton.take, baton.request(), 1)
    goes_on = pool.submit(baton.take, baton.request(), 0)
    until_waiting(monitor, 2)
    monitor.fail(Broken(), batch=1)
    with pytest.raises(Cancelled):
        cancelled.result(SECONDS)
    baton.release(held)
    goes_on.result(SECONDS)


def test_a_predicate_that_raises_leaves_no_trace(monitor: Monitor) -> None:
    def predicate() -> bool:
        raise Broken

    raises: Callable[[], bool] = predicate
    with monitor.lock, pytest.raises(Broken):
        monitor.wait_for(monitor.condition(), raises, 0)
    assert not monitor._waiting
