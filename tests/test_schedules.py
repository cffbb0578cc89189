"""Schedules are plain data: what must hold for all of them is checked over many shapes."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_roundpipe.schedules import Action, Partition, Schedule, balance, roundpipe

SECONDS = st.floats(0, 10, allow_nan=False)


@st.composite
def costs(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    calls = draw(st.integers(0, 12))
    each = st.lists(SECONDS, min_size=calls, max_size=calls)
    return draw(each), draw(each)


# --- stages


@given(costs(), st.booleans())
def test_stages_cover_all_calls(costs: tuple[list[float], list[float]], fused: bool) -> None:
    forward, backward = costs
    partition = balance(forward, backward, fused=fused)
    calls = len(forward)
    assert [call for stage in reversed(partition.backward) for call in stage] == list(range(calls))
    below = partition.backward[0].start if fused and partition.backward else calls
    assert [call for stage in partition.forward for call in stage] == list(range(below))
    assert all(len(stage) for stage in (*partition.forward, *partition.backward))
    assert partition.fused == fused
    assert partition.stage_count() == len(partition.forward) + len(partition.backward)


@given(costs(), st.booleans())
def test_no_stage_is_longer_than_the_longest_call(costs: tuple[list[float], list[float]], fused: bool) -> None:
    forward, backward = costs
    partition = balance(forward, backward, fused=fused)
    longest = max([*forward, *backward], default=0.0) * (1 + 1e-12)
    assert all(sum(forward[call] for call in stage) <= longest for stage in partition.forward)
    assert all(sum(backward[call] for call in stage) <= longest for stage in partition.backward)


@given(costs(), st.booleans())
@example(([1.0, 1.0], [3.0, 0.0]), False)
def test_no_two_neighbours_would_fit_in_one_stage(costs: tuple[list[float], list[float]], fused: bool) -> None:
    """Greedy: the first call of a stage did not fit into the stage before it."""
    forward, backward = costs
    partition = balance(forward, backward, fused=fused)
    longest = max([*forward, *backward], default=0.0)
    for stage, following in pairwise(partition.forward):
        assert sum(forward[call] for call in (*stage, following[0])) > longest * (1 - 1e-12)
    for stage, following in pairwise(partition.backward):
        assert sum(backward[call] for call in (*stage, following[-1])) > longest * (1 - 1e-12)


def test_backward_is_cut_finer_than_forward() -> None:
    partition = balance([1.0] * 7, [3.0] * 7, fused=True)
    assert partition.backward == tuple(range(call, call + 1) for call in reversed(range(7)))
    assert partition.forward == (range(0, 3), range(3, 6))


def test_calls_without_cost_make_one_stage() -> None:
    assert balance([0.0] * 4, [0.0] * 4, fused=False) == Partition((range(0, 4),), (range(0, 4),), False)
    assert balance([0.0] * 4, [0.0] * 4, fused=True) == Partition((), (range(0, 4),), True)


def test_no_calls() -> None:
    assert balance([], [], fused=True).stage_count() == 0


# --- round-robin


def made(calls: int, microbatches: int, devices: int, first: int = 0, fused: bool = True) -> tuple[Partition, Schedule]:
    partition = balance([1.0] * calls, [2.0] * calls, fused=fused)
    return partition, roundpipe(partition, microbatches, devices, first)


def device_of(schedule: Schedule) -> dict[Action, int]:
    return {action: device for device, line in enumerate(schedule.devices) for action in line}


shapes = given(calls=st.integers(1, 9), microbatches=st.integers(1, 5), devices=st.integers(1, 5), fused=st.booleans())


@shapes
def test_every_action_once(calls: int, microbatches: int, devices: int, fused: bool) -> None:
    partition, schedule = made(calls, microbatches, devices, fused=fused)
    actions = [action for line in schedule.devices for action in line]
    assert len(schedule.devices) == devices
    assert len(actions) == len(set(actions)) == partition.stage_count() * microbatches
    assert {(action.stage, action.microbatch) for action in actions} == {
        (stage, microbatch) for stage in range(partition.stage_count()) for microbatch in range(microbatches)
    }


@shapes
def test_kinds(calls: int, microbatches: int, devices: int, fused: bool) -> None:
    """Forward stages, then backward stages, the first of which is fused."""
    partition, schedule = made(calls, microbatches, devices, fused=fused)
    forward = len(partition.forward)
    for action in device_of(schedule):
        assert action.kind == ("F" if action.stage < forward else "FB" if fused and action.stage == forward else "B")


@shapes
def test_a_stage_runs_on_one_device_and_the_next_on_the_next(
    calls: int, microbatches: int, devices: int, fused: bool
) -> None:
    for first in range(devices):
        _, schedule = made(calls, microbatches, devices, first, fused)
        for action, device in device_of(schedule).items():
            assert device == (first + action.stage) % devices


@shapes
def test_a_device_runs_stages_and_their_microbatches_in_order(
    calls: int, microbatches: int, devices: int, fused: bool
) -> None:
    _, schedule = made(calls, microbatches, devices, fused=fused)
    for line in schedule.devices:
        assert list(line) == sorted(line, key=lambda action: (action.stage, action.microbatch))


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_round_robin_goes_on_over_batches(devices: int) -> None:
    first, dealt = 0, []
    for _ in range(3):
        partition, schedule = made(5, 2, devices, first)
        device_of_stage = {action.stage: device for action, device in device_of(schedule).items()}
        dealt += [device_of_stage[stage] for stage in range(partition.stage_count())]
        first = (schedule.last_device + 1) % devices
    assert dealt == [number % devices for number in range(len(dealt))]


def test_by_hand() -> None:
    """Two forward stages, a fused one and two backward stages on two devices."""
    partition = Partition((range(0, 1), range(1, 2)), (range(2, 3), range(1, 2), range(0, 1)), fused=True)
    schedule = roundpipe(partition, 2, 2, first_device=1)
    assert [[str(action) for action in line] for line in schedule.devices] == [
        ["F1·mb0", "F1·mb1", "B3·mb0", "B3·mb1"],
        ["F0·mb0", "F0·mb1", "FB2·mb0", "FB2·mb1", "B4·mb0", "B4·mb1"],
    ]
    assert schedule.last_device == 1
    assert device_of(schedule)[Action("B", 3, 1)] == 0
