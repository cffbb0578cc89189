"""The planner finds plans at least as good as the known ones, with limited work, and tells what they take."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_roundpipe.schedules import Partition, balance, planner
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.memory import Memory, finest
from lightning_roundpipe.schedules.planner import Plan, plan
from lightning_roundpipe.schedules.recurrence import Prefixes, steady_state, time_per_batch
from lightning_roundpipe.schedules.simulate import batches_of, simulate

UNIFORM = Costs([1] * 32, [2] * 32)
QWEN = Costs([7.43] * 28 + [22.07], [15.83] * 28 + [43.71], hop=1.6)
LLAMA = Costs([18.5] * 32 + [37.23], [41.21] * 32 + [74.5], hop=3.2)


def cut(forward: list[int], backward: list[int]) -> Partition:
    starts = [sum(forward[:i]) for i in range(len(forward))]
    stops = [sum(backward) - sum(backward[:i]) for i in range(len(backward))]
    return Partition(
        tuple(range(start, start + size) for start, size in zip(starts, forward, strict=True)),
        tuple(range(stop - size, stop) for stop, size in zip(stops, backward, strict=True)),
        True,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Costs, Partition, int, int]:
    layers = draw(st.integers(1, 6))
    each = st.lists(st.integers(0, 6), min_size=layers, max_size=layers)
    some = st.lists(st.integers(1, 6), min_size=layers, max_size=layers)
    costs = Costs(
        draw(some), draw(some), draw(each), upload=draw(each), download=draw(each), optimizer=draw(each),
        hop=draw(st.integers(0, 2)),
    )  # fmt: skip
    fused = draw(st.booleans())
    top = draw(st.integers(1, layers)) if fused else 0

    def sizes(left: int) -> list[int]:
        made = []
        while left:
            made.append(draw(st.integers(1, left)))
            left -= made[-1]
        return made

    split = cut(sizes(layers - top), ([top] if fused else []) + sizes(layers - top))
    return costs, Partition(split.forward, split.backward, fused), draw(st.integers(1, 6)), draw(st.integers(1, 4))


@given(cases(), st.sampled_from([0, 1]))
@settings(deadline=None)
def test_recurrence_gives_what_the_simulator_gives(case: tuple[Costs, Partition, int, int], staleness: int) -> None:
    costs, partition, microbatches, devices = case
    found = simulate(batches_of(partition, microbatches, devices, 30), partition, costs, staleness=staleness)
    assert time_per_batch(partition, costs, microbatches, devices, staleness=staleness) == found.period


@pytest.mark.parametrize(("lanes", "microbatches"), [(1, 8), (2, 8), (4, 8)])
def test_recurrence_with_lanes(lanes: int, microbatches: int) -> None:
    costs = Costs([1] * 9, [2] * 9, upload=[1] * 9, download=[2] * 9, optimizer=[1] * 9, add=[2] * 9, hop=1)
    partition = balance(costs.forward, costs.backward_with_recompute(), fused=True)
    for staleness in (0, 1):
        found = simulate(batches_of(partition, microbatches, 4, 24, lanes), partition, costs, staleness=staleness)
        assert time_per_batch(partition, costs, microbatches, 4, staleness=staleness, lanes=lanes) == found.period


@pytest.mark.parametrize(
    ("layers", "forward", "backward"),
    [
        (QWEN, [10, 9, 9], [1] + [4] * 7),
        (QWEN, [7] * 4, [1] + [3] * 8 + [2] * 2),
        (LLAMA, [6] * 5 + [2], [1] + [2] * 16),
    ],
)
@pytest.mark.parametrize(("devices", "microbatches"), [(8, 16), (8, 9), (4, 5)])
def test_recurrence_where_batches_take_turns(
    layers: Costs, forward: list[int], backward: list[int], devices: int, microbatches: int
) -> None:
    """After how many batches the steady state repeats itself has nothing to do with the number of devices."""
    partition = cut(forward, backward)
    found = simulate(batches_of(partition, microbatches, devices, 60), partition, layers, staleness=1)
    assert found.cycle
    time_found = time_per_batch(partition, layers, microbatches, devices, staleness=1)
    assert time_found == pytest.approx(found.period, rel=1e-9)


NAMED = [finest(32), cut([1] + [3] * 10, [1] * 32), cut([6] * 5, [2] * 16)]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("devices", "microbatches"), [(4, 5), (8, 9), (8, 16), (8, 32)])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, None])
def test_at_least_as_good_as_the_named_plans(
    devices: int, microbatches: int, staleness: int, lanes: int | None
) -> None:
    if lanes is not None and devices % lanes:
        return
    found = plan(UNIFORM, microbatches, devices, staleness=staleness, lanes=lanes)
    each = [lanes] if lanes is not None else [number for number in (1, 2, 4, 8) if devices % number == 0]
    assert found.time <= min(
        time_per_batch(named, UNIFORM, microbatches, devices, staleness=staleness, lanes=number)
        for named in NAMED
        for number in each
    )
    assert found.time == time_per_batch(
        found.partition, UNIFORM, microbatches, devices, staleness=staleness, lanes=found.lanes
    )


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("costs", "named"),
    [
        (QWEN, cut([7] * 4, [1] + [3] * 8 + [2] * 2)),
        (QWEN, cut([7] * 4, [1] + [2] * 2 + [3] * 8)),
        (QWEN, finest(29)),
        (LLAMA, cut([6, 6, 5, 5, 5, 5], [1] + [2] * 16)),
        (LLAMA, cut([5, 5, 5, 5, 6, 6], [1] + [2] * 16)),
        (LLAMA, finest(33)),
    ],
)
@pytest.mark.parametrize("lanes", [1, None])
def test_at_least_as_good_as_the_paper_s_stages_of_real_models(
    costs: Costs, named: Partition, lanes: int | None, staleness: int
) -> None:
    for microbatches in (9, 16):
        found = plan(costs, microbatches, 8, staleness=staleness, lanes=lanes)
        assert found.time <= time_per_batch(named, costs, microbatches, 8, staleness=staleness) * (1 + 1e-12)


@given(cases(), st.sampled_from([0, 1]))
@settings(deadline=None, max_examples=30)
def test_never_worse_than_one_layer_per_stage(case: tuple[Costs, Partition, int, int], staleness: int) -> None:
    costs, _, microbatches, devices = case
    found = plan(costs, microbatches, devices, staleness=staleness)
    one_each = finest(len(costs.forward))
    assert found.time <= time_per_batch(one_each, costs, microbatches, devices, staleness=staleness)
    _check(found.partition, len(costs.forward))


def _check(partition: Partition, calls: int) -> None:
    low = partition.backward[0].start if partition.fused else calls
    assert [call for stage in partition.forward for call in stage] == list(range(low))
    assert [call for stage in reversed(partition.backward) for call in stage] == list(range(calls))
    assert all(partition.forward) and all(partition.backward)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_heavy_head(staleness: int) -> None:
    """What a language model's head costs decides how the other layers are joined."""
    found = plan(LLAMA, 16, 8, staleness=staleness)
    one_each = time_per_batch(finest(33), LLAMA, 16, 8, staleness=staleness)
    as_ever = balance(LLAMA.forward, LLAMA.backward_with_recompute(), fused=True)
    assert found.time < 0.9 * one_each
    assert found.time < time_per_batch(as_ever, LLAMA, 16, 8, staleness=staleness)
    if staleness:
        work = 16 * (sum(LLAMA.forward) + sum(LLAMA.backward))
        assert found.time < 1.35 * work / 8  # recompute is a quarter


def test_all_lanes_for_exact_training_where_copies_are_free() -> None:
    found = plan(UNIFORM, 16, 8, lanes=None)
    assert found.lanes == 8
    assert found.time * 8 <= 16 * 32 * 4


def test_one_lane_where_host_memory_is_slow() -> None:
    costs = Costs([1] * 32, [2] * 32, upload=[10] * 32, download=[10] * 32, add=[10] * 32, host_links=1.0)
    assert plan(costs, 16, 8, lanes=None).lanes == 1


def test_memory_limit() -> None:
    memory = Memory(limit=13, parameters=[2] * 32, gradients=[2] * 32, activations=[1] * 32)
    found = plan(UNIFORM, 16, 8, staleness=1, memory=memory)
    assert memory.needed(found.partition) <= 13
    assert max(len(stage) for stage in found.partition.forward) <= 3
    free = plan(UNIFORM, 16, 8, staleness=1)
    assert memory.needed(free.partition) > 13
    assert free.time <= found.time


@given(st.data(), cases(), st.sampled_from([0, 1]), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_plan_never_exceeds_the_memory(
    data: st.DataObject, case: tuple[Costs, Partition, int, int], staleness: int, fused: bool
) -> None:
    costs, _, microbatches, devices = case
    calls = len(costs.forward)
    sizes = st.lists(st.integers(0, 9), min_size=calls, max_size=calls)
    parameters, gradients, activations = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    each = [sum(of) for of in zip(parameters, gradients, activations, strict=True)]
    least = max(each) + max(parameters)
    limit = least + data.draw(st.integers(-1, 30))
    memory = Memory(limit, parameters, gradients, activations)

    def search() -> Plan:
        return plan(costs, microbatches, devices, staleness=staleness, lanes=None, fused=fused, memory=memory)

    if limit < least:
        with pytest.raises(ValueError, match=f"Layer call {each.index(max(each))} needs {least} .* there are {limit}"):
            search()
    else:
        assert memory.needed(search().partition) <= limit


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("lanes", [1, None])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 3), (4, 16), (8, 9), (8, 32)])
def test_the_search_is_bounded(
    devices: int, microbatches: int, lanes: int | None, staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the work, so that the same costs give the same plan: how long that takes, `benchmarks/growth.py` measures."""
    costs = Costs(
        [1 + 0.01 * (layer % 7) for layer in range(199)] + [6.0], [2.0] * 199 + [12.0],
        upload=[3.0] * 200, download=[3.0] * 200, optimizer=[1.0] * 200, hop=0.1,
    )  # fmt: skip
    timed: list[int] = []
    made: list[int] = []

    def time(partition: Partition, sums: Prefixes, hop: float, share: int, width: int, behind: int) -> Any:
        found = steady_state(partition, sums, hop, share, width, behind)
        timed.append(partition.stage_count() * share * found[1])
        return found

    def cut(search: Any, *args: Any) -> Partition:
        made.append(1)
        return cut_as_ever(search, *args)

    cut_as_ever = planner._Search._cut
    monkeypatch.setattr(planner, "steady_state", time)
    monkeypatch.setattr(planner._Search, "_cut", cut)
    plan(costs, microbatches, devices, staleness=staleness, lanes=lanes)
    searches = 1 if lanes else len([r for r in range(1, devices + 1) if devices % r == 0])
    assert sum(timed) + 100 * len(timed) <= planner.BUDGET + (searches + 1) * (max(timed) + 100)
    assert len(made) <= searches * 60 * 5 * 4


def test_the_same_costs_give_the_same_plan() -> None:
    assert plan(LLAMA, 9, 8, staleness=1) == plan(LLAMA, 9, 8, staleness=1)


def test_without_a_fused_stage_and_without_layers() -> None:
    found = plan(UNIFORM, 9, 8, fused=False)
    assert not found.partition.fused
    _check(found.partition, 32)
    assert plan(Costs([], []), 9, 8).time == 0
