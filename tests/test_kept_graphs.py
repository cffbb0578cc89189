"""With recompute="none" a call keeps its graph from its forward to its backward: nothing is run again, no number
changes, and nothing outlasts the batch.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from helpers import assert_equal, differs, fit_microbatches, fit_pipeline, one_layer_a_stage, result
from models import CNN, MLP, Notes, batches_of, pictures, vectors
from test_exactness import MODELS, NOISY, data, make
from test_habits import InPlaceFirst, ResidualStreamInPlace
from test_habits import data as habits_data
from test_habits import make as make_habit
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import CpuDevice
from lightning_roundpipe.pipeline.measuring import Measured
from lightning_roundpipe.schedules import NAMES, Action, Schedule, Scheduler
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.partition import balance, bound, cut
from lightning_roundpipe.schedules.planner import plan
from lightning_roundpipe.schedules.recurrence import time_per_batch

# --- the numbers

ACCUMULATED = {"run": {"accumulate_grad_batches": 2}}


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)


def trained(name: str, m: int, devices: int, **options: Any) -> dict[str, Any]:
    model = make(name, torch.float64)
    return result(fit_pipeline(model, data(name, torch.float64, 4), m, devices, recompute="none", **options))


def expected(name: str, m: int, **options: Any) -> dict[str, Any]:
    return result(fit_microbatches(make(name, torch.float64), data(name, torch.float64, 4), m, **options))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("devices", "m"), [(1, 1), (1, 3), (2, 3), (4, 4)])
def test_equal_to_plain_lightning(name: str, devices: int, m: int) -> None:
    assert_equal(trained(name, m, devices), expected(name, m))
    assert_equal(trained(name, m, devices, **ACCUMULATED), expected(name, m, **ACCUMULATED["run"]))


@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kept graph a B computes all gradients, and nothing is left to its W."""
    monkeypatch.undo()  # they have stages of their own
    assert_equal(trained("gpt", 4, 2, schedule=schedule), expected("gpt", 4))


@pytest.mark.parametrize(
    "options",
    [{"split": "model"}, {"split": "whole"}, {"staleness": 1}, {"staleness": 1, **ACCUMULATED}],
    ids=str,
)
def test_equal_to_recomputing(options: dict[str, Any]) -> None:
    batches = data("gpt", torch.float64, 4)
    ours, theirs = (
        result(fit_pipeline(make("gpt", torch.float64), batches, 3, 2, recompute=recompute, **options))
        for recompute in ("none", "layer")
    )
    assert_equal(ours, theirs)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_dropout_and_autocast(precision: Any, m: int) -> None:
    dtype = torch.float64 if precision == "64-true" else torch.float32
    ours, theirs = (
        result(
            fit_pipeline(
                make("gpt", dtype, **NOISY["gpt"]),
                data("gpt", dtype, 3, 6),
                m,
                devices=2,
                recompute=recompute,
                run={"precision": precision},
            )
        )
        for recompute in ("none", "layer")
    )
    assert_equal(ours, theirs)


@pytest.mark.parametrize("m", [1, 3])
def test_batch_norm(m: int) -> None:
    torch.manual_seed(7)
    model = CNN().double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for recompute in ("none", "layer"):
        model.load_state_dict(state)
        batches = batches_of(pictures, 4, 12)
        found.append(result(fit_pipeline(model, batches, m, 2, recompute=recompute)))
    assert_equal(*found)


@pytest.mark.parametrize("kind", [InPlaceFirst, ResidualStreamInPlace], ids=lambda kind: kind.__name__)
def test_changes_in_place(kind: type) -> None:
    """These layers are run again: what they have computed with is no longer there."""
    ours = result(fit_pipeline(make_habit(kind), habits_data(), 3, 2, recompute="none"))
    assert_equal(ours, result(fit_microbatches(make_habit(kind), habits_data(), 3)))


# --- what is run, and what is held


RUNS = Notes()
"""The layer of each run, by the memory of what autograd saves of it."""


def held() -> int:
    """Of how many runs that is there."""
    return sum(not memory.expired() for memory in RUNS)


class Counted(nn.Module):
    """Notes its runs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        RUNS[StorageWeakRef(hidden.untyped_storage())] = self.number
        return x + torch.sin(hidden)


class WritesState(Counted):
    """Its statistics are another microbatch's by the time of the backward."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.5).add_(x.mean(0).tanh())
        return super().forward(x) * self.seen


class Chain(MLP):
    def __init__(self, kind: type[Counted] = Counted) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), *(kind(number) for number in range(4)), nn.Linear(8, 3))
        self.held = Notes()
        self.fails = False

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.held[len(self.held)] = held()
        if self.fails and len(self.held) == 5:  # the second microbatch of the second batch
            raise ZeroDivisionError("in the middle of a step")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if isinstance(strategy := self.trainer.strategy, RoundPipeStrategy):
            strategy._pipeline.wait_backward()
        self.held[len(self.held)] = held()


@pytest.fixture(autouse=True)
def nothing_noted() -> None:
    RUNS.clear()


def chain(kind: type[Counted] = Counted) -> Chain:
    torch.manual_seed(0)
    return Chain(kind).double()


@pytest.mark.parametrize("split", ["step", "model"])
@pytest.mark.parametrize(("devices", "m"), [(1, 1), (2, 3)])
def test_no_layer_runs_twice(split: str, devices: int, m: int) -> None:
    counts = []
    for batches in (2, 4):
        RUNS.clear()
        fit_pipeline(chain(), batches_of(vectors, batches, 6), m, devices, recompute="none", split=split)
        counts.append(Counter(RUNS.values()))
    assert counts[1] - counts[0] == {number: 2 * m for number in range(4)}, "of two batches after the first ones"


def test_graphs_are_held_to_the_end_of_the_batch_and_no_longer() -> None:
    found = {}
    for recompute in ("layer", "none"):
        model = chain()
        RUNS.clear()
        fit_pipeline(model, batches_of(vectors, 4, 6), 3, 1, recompute=recompute)
        found[recompute] = [[model.held[i + j] for j in range(4)] for i in range(4, 16, 4)]
    assert found["none"] == [[12, 12, 12, 0]] * 3, "at the loss of each microbatch those of all, and at the end none"
    assert found["layer"] == [[0, 0, 0, 0]] * 3


def test_nothing_is_left_where_a_step_fails() -> None:
    model = chain()
    model.fails = True
    with pytest.raises(ZeroDivisionError) as caught:
        fit_pipeline(model, batches_of(vectors, 3, 6), 3, 2, recompute="none")
    assert max(model.held.values()) > 4
    del caught
    gc.collect()
    assert held() == 0
    fresh = chain()
    model.load_state_dict(fresh.state_dict())
    model.fails = False
    ours = result(fit_pipeline(model, batches_of(vectors, 3, 6), 3, 2, recompute="none"))
    assert_equal(ours["weights"], result(fit_microbatches(fresh, batches_of(vectors, 3, 6), 3))["weights"])


@pytest.mark.parametrize("m", [1, 3])
def test_a_layer_that_writes_its_state_is_run_again(m: int) -> None:
    model, batches = chain(WritesState), batches_of(vectors, 4, 6)
    ours = result(fit_pipeline(model, batches, m, recompute="none"))
    assert differs(ours["weights"], chain(WritesState).state_dict())
    assert_equal(ours["weights"], result(fit_microbatches(chain(WritesState), batches, m))["weights"])


# --- the times


def test_costs_are_those_of_what_runs() -> None:
    """Measured with a recompute or without one, what is counted is what a stage of its own takes."""
    again = {0: True, 1: False}
    measured = Measured(2, [CpuDevice(0, 1)], again.__getitem__)
    for layer in again:
        measured.forward[layer].add(1.0)
        assert measured.costs_of([layer]) == ([1.0], [3.0 if again[layer] else 2.0]), "before it is known"
        for recomputes in (True, False):
            watch: Any = measured.backward_call(0, layer, recomputes=recomputes)
            watch.stopwatch = Given(3.0 if recomputes else 2.0)
            watch.__exit__()
        assert measured.backward[layer].mean == (3.0 if again[layer] else 2.0)


class Given:
    """A stopwatch that was so long."""

    started = stopped = 0.0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def stop(self) -> None: ...

    def seconds(self) -> float:
        return self._seconds


def test_stages_without_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward 1, backward 2: the fused stage takes 3 for each layer, and other backward stages 2."""
    monkeypatch.undo()
    forward, backward, kept = [1.0] * 12, [2.0] * 12, [True] * 12
    made = Scheduler("roundpipe", 2).partition(forward, backward, kept=kept)
    assert made == balance(forward, backward, fused=True, fused_costs=[3.0] * 12)
    assert [len(calls) for calls in made.backward] == [1] * 12
    assert [len(calls) for calls in made.forward] == [3, 3, 3, 2]
    given = Scheduler(Schedule(((Action("F", 0, 0), Action("FB", 1, 0), Action("B", 2, 0)),), 0), 1)
    assert given.partition(forward[:10], backward[:10], kept=kept[:10]).backward == (range(6, 10), range(6))
    assert given.partition(forward[:10], [3.0] * 10).backward == (range(5, 10), range(5))
    assert cut(forward, backward, 0, 3, fused=True, fused_costs=[3.0] * 12).backward[0] == range(9, 12)
    assert Scheduler("gpipe", 4).partition(forward, backward, kept=kept) == bound(forward, backward, 4)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_search_goes_by_these_times(staleness: int) -> None:
    """A recompute takes no time where there is none."""
    forward, backward = [1.0] * 8 + [3.0], [2.0] * 8 + [6.0]
    scheduler = Scheduler("roundpipe", 4)
    found, lanes = scheduler.plan(forward, backward, 6, staleness, kept=[True] * 9)
    best = plan(Costs(forward, backward, [0.0] * 9), 6, 4, staleness=staleness)
    assert (found, lanes) == (best.partition, best.lanes)
    recomputed = scheduler.plan(forward, [3.0] * 8 + [9.0], 6, staleness)[0]
    assert time_per_batch(found, Costs(forward, backward, [0.0] * 9), 6, 4, staleness=staleness) < time_per_batch(
        recomputed, Costs(forward, backward), 6, 4, staleness=staleness
    )


# --- what is refused


def test_other_values() -> None:
    with pytest.raises(ValueError, match="`recompute` must be 'layer' or 'none', got 'all'"):
        RoundPipeStrategy(recompute="all")  # type: ignore[arg-type]
