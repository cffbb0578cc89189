"""Sums of gradients: their order, and when a batch's are complete."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor
from lightning_roundpipe.state.gradients import BatchGradients, Gradients
from lightning_roundpipe.state.parameters import ParameterStore

MICROBATCHES = 3
SECONDS = 10


class Sums:
    """The sums of a chain of layers."""

    def __init__(self, *layers: nn.Module) -> None:
        self.root = nn.Sequential(*(layers or (nn.Linear(2, 2), nn.Linear(2, 2))))
        self.monitor = Monitor()
        numbered = [Layer(i, str(i), layer) for i, layer in enumerate(self.root)]
        self.store = ParameterStore(self.root, numbered, self.monitor, staleness=0)
        self.gradients = Gradients(self.store, self.monitor)
        self.first = self.root[0].weight

    def finish(self, batch: BatchGradients, *microbatches: int) -> None:
        for microbatch in microbatches:
            for unit in self.store.units:
                batch.finish(microbatch, unit)


@pytest.fixture
def sums() -> Iterator[Sums]:
    made = Sums()
    yield made
    made.monitor.fail(Cancelled())


def values(count: int) -> list[Tensor]:
    """Numbers of very different sizes: their sum shows the order in which they were added."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 2, generator=generator) * 10.0 ** (3 * (i % 3)) for i in range(count)]


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def test_the_numbers_show_their_order() -> None:
    parts = values(MICROBATCHES)
    assert len({tuple(summed(list(order)).flatten().tolist()) for order in itertools.permutations(parts)}) > 1


@pytest.mark.parametrize("order", list(itertools.permutations(range(MICROBATCHES))))
def test_microbatches_are_added_in_turn(order: tuple[int, ...], sums: Sums) -> None:
    batch, parts = sums.gradients.begin_batch(MICROBATCHES), values(MICROBATCHES)
    for microbatch in order:
        batch.add(microbatch, sums.first, parts[microbatch])
        sums.finish(batch, microbatch)
    assert torch.equal(sums.gradients.get(sums.first), summed(parts))


def test_uses_within_a_microbatch_are_added_first(sums: Sums) -> None:
    batch, parts = sums.gradients.begin_batch(2), values(4)
    for number, part in enumerate(parts):
        batch.add(number // 2, sums.first, part)
    sums.finish(batch, 0, 1)
    assert torch.equal(sums.gradients.get(sums.first), (parts[0] + parts[1]) + (parts[2] + parts[3]))


def test_batches_are_added_in_turn(sums: Sums) -> None:
    parts = values(4)
    batches = [sums.gradients.begin_batch(2) for _ in range(2)]
    for number, part in enumerate(parts):
        batches[number // 2].add(number % 2, sums.first, part)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(sums.finish, batches[1], 0, 1)
        sums.finish(batches[0], 1, 0)
        later.result(SECONDS)
    assert torch.equal(sums.gradients.get(sums.first), summed(parts))


@pytest.mark.parametrize("seed", range(3))
def test_threads_in_any_order_make_one_sum(seed: int) -> None:
    sums, parts = Sums(), values(MICROBATCHES * 2 * 2)
    batches = [sums.gradients.begin_batch(MICROBATCHES) for _ in range(2)]
    generator = random.Random(seed)
    start = threading.Barrier(2 * MICROBATCHES)

    def run(number: int) -> None:
        batch, microbatch = batches[number // MICROBATCHES], number % MICROBATCHES
        start.wait()
        for parameter, offset in ((sums.first, 0), (sums.root[1].weight, len(parts) // 2)):
            batch.add(microbatch, parameter, parts[offset + number])
        sums.finish(batch, microbatch)

    with ThreadPoolExecutor(2 * MICROBATCHES) as pool:
        for done in [pool.submit(run, number) for number in generator.sample(range(6), 6)]:
            done.result(SECONDS)
    assert torch.equal(sums.gradients.get(sums.first), summed(parts[:6]))
    assert torch.equal(sums.gradients.get(sums.root[1].weight), summed(parts[6:]))


def test_complete_when_every_unit_of_every_microbatch_is(sums: Sums) -> None:
    batch = sums.gradients.begin_batch(2)
    units = sums.store.units
    assert len(units) == 2
    for microbatch, unit in [(0, units[0]), (1, units[0]), (1, units[1])]:
        batch.finish(microbatch, unit)
        assert not batch.complete
    batch.finish(0, units[1])
    assert batch.complete
    batch.wait_complete()


def test_without_any_use_there_is_no_gradient(sums: Sums) -> None:
    batch = sums.gradients.begin_batch(2)
    sums.finish(batch, 0, 1)
    assert sums.gradients.get(sums.first) is None


def test_a_failure_ends_the_wait(sums: Sums) -> None:
    batch = sums.gradients.begin_batch(1)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(batch.wait_complete)
        sums.monitor.fail(ValueError())
        with pytest.raises(Cancelled):
            waits.result(SECONDS)


def test_clear_begins_anew_in_the_same_memory(sums: Sums) -> None:
    parts = values(2)
    addresses = []
    for part in parts:
        batch = sums.gradients.begin_batch(1)
        batch.add(0, sums.first, part)
        sums.finish(batch, 0)
        gradient = sums.gradients.get(sums.first)
        assert torch.equal(gradient, part)
        addresses.append(gradient.data_ptr())
        for unit in sums.store.units:
            sums.gradients.clear(unit)
        assert sums.gradients.get(sums.first) is None
    assert addresses[0] == addresses[1]


def test_handed_over_memory_is_left_alone(sums: Sums) -> None:
    parts = values(2)
    batch = sums.gradients.begin_batch(1)
    batch.add(0, sums.first, parts[0])
    sums.finish(batch, 0)
    kept = sums.gradients.get(sums.first)
    for unit in sums.store.units:
        sums.gradients.hand_over(unit)
    batch = sums.gradients.begin_batch(1)
    batch.add(0, sums.first, parts[1])
    sums.finish(batch, 0)
    assert torch.equal(kept, parts[0])
    assert torch.equal(sums.gradients.get(sums.first), parts[1])


def test_adopted_gradients_are_added_to(sums: Sums) -> None:
    parts = values(2)
    sums.gradients.adopt(sums.first, parts[0].clone())
    batch = sums.gradients.begin_batch(1)
    batch.add(0, sums.first, parts[1])
    sums.finish(batch, 0)
    assert torch.equal(sums.gradients.get(sums.first), parts[0] + parts[1])


def test_the_added_tensor_is_not_written(sums: Sums) -> None:
    parts = values(2)
    kept = parts[0].clone()
    batch = sums.gradients.begin_batch(2)
    for microbatch, part in enumerate(parts):
        batch.add(microbatch, sums.first, part)
    sums.finish(batch, 0, 1)
    assert torch.equal(parts[0], kept)


def test_half_precision_is_summed_in_full(sums: Sums) -> None:
    one, small = torch.ones(2, 2, dtype=torch.bfloat16), torch.full((2, 2), 2.0**-12, dtype=torch.bfloat16)
    batch = sums.gradients.begin_batch(2)
    for microbatch in range(2):
        batch.add(microbatch, sums.first, one)
        batch.add(microbatch, sums.first, small)
    sums.finish(batch, 0, 1)
    gradient = sums.gradients.get(sums.first)
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((2, 2), 2 * (1 + 2.0**-12)))


def test_sparse_gradients() -> None:
    sums = Sums(nn.Embedding(5, 2, sparse=True))
    batch = sums.gradients.begin_batch(2)
    for microbatch, row in enumerate((1, 3)):
        gradient = torch.sparse_coo_tensor([[row]], torch.ones(1, 2), (5, 2), check_invariants=True)
        batch.add(microbatch, sums.first, gradient)
    sums.finish(batch, 0, 1)
    gradient = sums.gradients.get(sums.first)
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("order", list(itertools.product((True, False), repeat=3)))
def test_sparse_and_dense_gradients_in_any_order(order: tuple[bool, ...]) -> None:
    """Within a microbatch, and of two."""
    sums = Sums(nn.Embedding(5, 2, sparse=True))
    batch = sums.gradients.begin_batch(2)
    dense = torch.arange(10.0).reshape(5, 2)
    for microbatch, sparse in zip((0, 0, 1), order, strict=True):
        batch.add(microbatch, sums.first, dense.to_sparse(1) if sparse else dense)
    sums.finish(batch, 0, 1)
    gradient = sums.gradients.get(sums.first)
    assert gradient.is_sparse == all(order)
    assert torch.equal(gradient.to_dense(), 3 * dense)


def test_hooks_of_parameters_see_each_microbatch_once(sums: Sums) -> None:
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    sums.first.register_hook(hook)
    parts = values(4)
    batch = sums.gradients.begin_batch(2)
    for number, part in enumerate(parts):
        batch.add(number // 2, sums.first, part)
    sums.finish(batch, 0, 1)
    assert [torch.equal(a, b) for a, b in zip(seen, (parts[0] + parts[1], parts[2] + parts[3]), strict=True)]
    assert torch.equal(sums.gradients.get(sums.first), seen[0] * 2 + seen[1] * 2)


def test_a_shared_parameter_has_one_sum() -> None:
    shared = nn.Linear(2, 2, bias=False)
    tied = nn.Linear(2, 2, bias=False)
    tied.weight = shared.weight
    sums = Sums(shared, tied)
    assert len(sums.store.units) == 1
    parts = values(2)
    batch = sums.gradients.begin_batch(1)
    batch.add(0, tied.weight, parts[0])
    batch.add(0, shared.weight, parts[1])
    sums.finish(batch, 0)
    assert torch.equal(sums.gradients.get(shared.weight), parts[0] + parts[1])


def windows(sums: Sums, parts: list[Tensor]) -> Iterator[BatchGradients]:
    """Batches of one microbatch, after each of which a step is handed in."""
    for part in parts:
        batch = sums.gradients.begin_batch(1)
        batch.add(0, sums.first, part)
        sums.store.enqueued += 1
        yield batch


def step(sums: Sums) -> None:
    """What the optimizer's worker does when it has read the sums."""
    for unit in sums.store.units:
        sums.gradients.clear(unit)
        sums.store.publish(unit)


@pytest.mark.parametrize("rounds", [False, True])
def test_what_a_step_is_to_read_is_set_aside(sums: Sums, rounds: bool) -> None:
    """The next batch need not wait for the step, which starts when the whole batch before it has gone through."""
    if rounds:
        sums.store.travel_in_half({sums.first: torch.bfloat16})
    parts = [part.bfloat16().float() for part in values(2)]
    for part in parts:
        batch = sums.gradients.begin_batch(1, rounds=rounds)
        batch.add(0, sums.first, part)
        sums.finish(batch, 0)
        sums.store.enqueued += 1
    for part in parts:
        assert sums.gradients.is_rounded(sums.first) == rounds
        assert torch.equal(sums.gradients.get(sums.first), part)
        average = torch.ones(2, 2)
        sums.gradients.replace(sums.first, average)
        assert sums.gradients.get(sums.first) is average
        step(sums)
    assert sums.gradients.get(sums.first) is None


def test_only_one_window_is_set_aside(sums: Sums) -> None:
    parts = values(3)
    first, second, third = windows(sums, parts)
    sums.finish(first, 0)
    sums.finish(second, 0)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(sums.finish, third, 0)
        assert torch.equal(sums.gradients.get(sums.first), parts[0])
        assert not third.complete
        step(sums)
        done.result(SECONDS)
    for part in parts[1:]:
        assert torch.equal(sums.gradients.get(sums.first), part)
        step(sums)


def test_a_window_of_several_batches_begins_once(sums: Sums) -> None:
    parts = values(3)
    (before,) = windows(sums, parts[:1])
    sums.finish(before, 0)
    for part in parts[1:]:
        batch = sums.gradients.begin_batch(1)
        batch.add(0, sums.first, part)
        sums.finish(batch, 0)
    for expected in (parts[0], summed(parts[1:])):
        assert torch.equal(sums.gradients.get(sums.first), expected)
        step(sums)


def test_a_step_that_needs_all_gradients_takes_those_set_aside(sums: Sums) -> None:
    parts = values(2)
    for batch in windows(sums, parts):
        sums.finish(batch, 0)
    read = sums.gradients.get(sums.first)
    taken = sums.gradients.take(sums.store.units)
    assert [each.data_ptr() for each in taken] == [read.data_ptr()]
    assert torch.equal(read, parts[0])
    assert torch.equal(sums.gradients.get(sums.first), parts[1])


def test_dropping_a_window_leaves_what_a_step_is_to_read(sums: Sums) -> None:
    parts = values(2)
    for batch in windows(sums, parts):
        sums.finish(batch, 0)
    for unit in sums.store.units:
        sums.gradients.hand_over(unit)
    assert torch.equal(sums.gradients.get(sums.first), parts[0])
    step(sums)
    assert sums.gradients.get(sums.first) is None


@pytest.mark.parametrize("seed", range(10))
def test_steps_beside_the_next_batch_read_their_own_sums(seed: int) -> None:
    """A step of every batch, each at most one behind, with random delays everywhere."""
    chance, batches = random.Random(seed), 20
    delays = [[chance.choice((0, 0, 1e-4, 1e-3)) for _ in range(2 * MICROBATCHES + 4)] for _ in range(batches)]
    sums, parts = Sums(), values(batches * MICROBATCHES)
    read: list[list[Tensor]] = []

    def step_each(batch: BatchGradients, delay: list[float]) -> None:
        batch.wait_complete()
        found = []
        for unit in reversed(sums.store.units):
            time.sleep(delay[0])
            found.append(sums.gradients.get(unit.parameters[0]).clone())
            time.sleep(delay[1])
            found.append(sums.gradients.get(unit.parameters[0]).clone())
            sums.gradients.clear(unit)
            time.sleep(delay[2])
            sums.store.publish(unit)
        read.append(found)

    def run(batch: BatchGradients, number: int, microbatch: int, delay: float) -> None:
        for unit in reversed(sums.store.units):
            time.sleep(delay)
            batch.add(microbatch, unit.parameters[0], parts[number * MICROBATCHES + microbatch])
            batch.finish(microbatch, unit)

    with ThreadPoolExecutor(2 * MICROBATCHES) as threads, ThreadPoolExecutor(1) as worker:
        steps: list[Future[None]] = []
        for number, delay in enumerate(delays):
            if number >= 2:
                steps[number - 2].result(SECONDS)  # staleness 1
            batch = sums.gradients.begin_batch(MICROBATCHES)
            running = [threads.submit(run, batch, number, i, delay[4 + i]) for i in range(MICROBATCHES)]
            sums.store.enqueued += 1
            steps.append(worker.submit(step_each, batch, delay))
        for future in (*running, *steps):
            future.result(SECONDS)
    for number, found in enumerate(read):
        expected = summed(parts[number * MICROBATCHES : (number + 1) * MICROBATCHES])
        assert len(found) == 4 and all(torch.equal(each, expected) for each in found), number


def test_a_batch_is_added_up_in_full_precision_and_rounded_once(sums: Sums) -> None:
    sums.store.travel_in_half({sums.first: torch.bfloat16})
    parts = [torch.full((2, 2), value, dtype=torch.bfloat16) for value in (1.0, 2.0**-8, 2.0**-8)]
    exact = summed([part.float() for part in parts])
    assert not torch.equal(exact.bfloat16(), summed(parts)), "the numbers must show where they are rounded"
    batch = sums.gradients.begin_batch(MICROBATCHES, rounds=True)
    for microbatch, part in enumerate(parts):
        batch.add(microbatch, sums.first, part)
        assert sums.gradients.is_rounded(sums.first) == (microbatch == 1), "one alone is as it came"
        sums.finish(batch, microbatch)
    assert sums.gradients.is_rounded(sums.first)
    assert torch.equal(sums.gradients.get(sums.first), exact.bfloat16().float())
    assert not sums.gradients.is_rounded(sums.first)


def test_what_comes_after_a_rounded_sum_is_added_in_full_precision(sums: Sums) -> None:
    sums.store.travel_in_half({sums.first: torch.bfloat16})
    first, second = (torch.full((2, 2), value) for value in (1.0, 2.0**-12))
    for gradient, rounds in ((first, True), (second, False)):
        batch = sums.gradients.begin_batch(1, rounds=rounds)
        batch.add(0, sums.first, gradient)
        sums.finish(batch, 0)
    assert torch.equal(sums.gradients.get(sums.first), first + second)


def test_memory_of_a_parameter_with_gaps_is_used_again() -> None:
    layer = nn.Linear(2, 3, bias=False)
    layer.weight = nn.Parameter(torch.randn(3, 4)[:, ::2])
    sums = Sums(layer)
    for _ in range(3):
        batch = sums.gradients.begin_batch(1)
        batch.add(0, sums.first, torch.ones(3, 2))
        sums.finish(batch, 0)
        assert torch.equal(sums.gradients.get(sums.first), torch.ones(3, 2))
        sums.gradients.clear(sums.store.units[0])
    assert sums.gradients.memory.made == 1


def test_memory_is_used_again_after_the_first_batches(sums: Sums) -> None:
    sums.store.travel_in_half({parameter: torch.bfloat16 for parameter in sums.root.parameters()})
    made = []
    for rounds in (True, True, True, False, True, True):
        batch = sums.gradients.begin_batch(1, rounds=rounds)
        for parameter in sums.root.parameters():
            batch.add(0, parameter, torch.ones_like(parameter))
        sums.finish(batch, 0)
        for unit in sums.store.units:
            sums.gradients.clear(unit)
        made.append(sums.gradients.memory.made)
    # Each parameter one in half precision, a weight and a bias in full; the fourth batch needs them all in full.
    assert made == [6, 6, 6, 8, 8, 8]
    sums.gradients.memory.let_go()
    assert sums.gradients.memory.made == 0
