"""Schedules are plain data: what must hold for all of them is checked over many shapes."""

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_roundpipe.schedules import (
    Action,
    Partition,
    Schedule,
    balance,
    bound,
    dualpipe,
    gpipe,
    interleaved,
    model_parallel,
    one_f_one_b,
    roundpipe,
    sequential,
    zb1p,
)

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


# --- the other schedules


BOUND = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved 1": lambda devices, microbatches: interleaved(devices, microbatches, 1),
    "interleaved 2": interleaved,
    "interleaved 3": lambda devices, microbatches: interleaved(devices, microbatches, 3),
    "zb1p": zb1p,
    "model parallel": model_parallel,
    "sequential": sequential,
}


@pytest.mark.parametrize("name", BOUND)
@given(devices=st.integers(1, 6), microbatches=st.integers(1, 14))
def test_bound_schedules_are_valid(name: str, devices: int, microbatches: int) -> None:
    schedule = BOUND[name](devices, microbatches)
    chunks = int(name[-1]) if name[-1].isdigit() else 1
    check(schedule, 2 * devices * chunks, microbatches)
    assert schedule.resident and schedule.last_device == 0


@given(devices=st.integers(1, 5), more=st.integers(0, 5))
def test_dualpipe_is_valid(devices: int, more: int) -> None:
    check(dualpipe(2 * devices, 4 * devices + 2 * more), 4 * devices, 4 * devices + 2 * more)


def check(schedule: Schedule, stages: int, microbatches: int) -> None:
    schedule.validate(stages, microbatches)
    assert Schedule.from_text(schedule.to_text()) == schedule
    place = {(action.stage, action.microbatch): device for action, device in schedule.device_of().items()}
    for (stage, microbatch), device in place.items():
        assert device == place[stages - 1 - stage, microbatch]  # backward where the parameters and activations are


@pytest.mark.parametrize(("devices", "microbatches"), [(3, 12), (4, 7), (4, 6), (0, 4)])
def test_dualpipe_says_what_it_needs(devices: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match="even number of devices"):
        dualpipe(devices, microbatches)


@given(
    calls=st.integers(1, 9),
    microbatches=st.integers(1, 9),
    width=st.integers(1, 4),
    lanes=st.integers(1, 4),
    first=st.integers(0, 20),
)
def test_lanes(calls: int, microbatches: int, width: int, lanes: int, first: int) -> None:
    """Each lane is a round-robin of its own over its part of the microbatches."""
    partition = balance([1.0] * calls, [2.0] * calls, fused=True)
    devices = width * lanes
    schedule = roundpipe(partition, microbatches, devices, first % devices, lanes)
    schedule.validate(partition.stage_count(), microbatches)
    assert Schedule.from_text(schedule.to_text()) == schedule
    shares = [0] * lanes
    for action, device in schedule.device_of().items():
        assert device % width == (first + action.stage) % width
        shares[device // width] += action.stage == 0
    assert max(shares) - min(shares) <= 1


def test_devices_that_cannot_be_divided_into_lanes() -> None:
    with pytest.raises(ValueError, match="6 devices cannot be divided into 4 lanes"):
        roundpipe(balance([1.0], [2.0], fused=True), 4, 6, lanes=4)


# --- what is bound to a device


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8), st.data())
def test_bound_stages_are_as_short_as_can_be(costs: list[tuple[int, int]], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    partition = bound([forward for forward, _ in costs], [backward for _, backward in costs], stages)
    assert [call for stage in partition.forward for call in stage] == list(range(len(costs)))
    assert partition.backward == partition.forward[::-1] and not partition.fused
    assert len(partition.forward) == stages and all(partition.forward)
    times = [forward + backward for forward, backward in costs]
    ends = [(0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), stages - 1)]
    shortest = min(max(sum(times[start:stop]) for start, stop in pairwise(end)) for end in ends)
    assert max(sum(times[call] for call in stage) for stage in partition.forward) == shortest


def test_more_stages_than_calls() -> None:
    with pytest.raises(ValueError, match="2 layer calls cannot be cut into 3 stages"):
        bound([1, 1], [2, 2], 3)


# --- validation and text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 | F0.0 F0.0 B1.0", "has F0·mb0 twice"),
        ("0 | F0.0 B1.0 F0.1", "lacks B1·mb1"),
        ("0 | F0.0 B2.0", "lacks F1·mb0"),
        ("0 | B1.0 F0.0", "never run B1·mb0 on device 0: it waits for stage 0 of microbatch 0"),
        ("0 | F0.0 B2.0 W2.0 \n 1 | W1.0", "W1·mb0 but no B"),
        ("0 | F0.0 B1.0 \n 1 | W1.0", "W1·mb0 on device 1 and B1·mb0 on device 0"),
        ("0 | F0.0 W1.0 B1.0", "never run W1·mb0"),
        ("0 | F0.0 FB1.0 W1.0", "both FB1·mb0 and W1·mb0"),
        ("0 | F0.0 B0.0", "both F0·mb0 and B0·mb0"),
        ("0 | F0.0 B1.0 FB2.0", "FB2·mb0 after the backward has begun"),
        ("0 | F0.0 B1.0 F2.0", "F2·mb0 after the backward has begun"),
        ("0 | F0.0 F0.1 FB1.0 B1.1", "has B1·mb1, but stage 1 of microbatch 0 is FB"),
        ("0 | F0.0 F1.1 F0.1 F1.0 B2.0 B2.1", "never run F1·mb1 on device 0"),
        ("0 | F0.0 F1.1 B3.0 B3.1 \n 1 | F1.0 F2.1 F0.1 F2.0", "never run F1·mb1 on device 0"),
    ],
)
def test_validation_names_the_action(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text).validate()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (Action("X", 0, 0), "has X0·mb0, which is no Action of kind F, B, W or FB"),
        (("F", 0, 0), "which is no Action"),
        (Action("FB", 0.0, 0), "stage and microbatch must be whole numbers"),
        (Action("FB", 0, "0"), "stage and microbatch must be whole numbers"),
    ],
)
def test_validation_of_what_is_no_action(action: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(((action,),), 0).validate()


def test_validation_against_the_numbers_of_stages_and_microbatches() -> None:
    schedule = gpipe(2, 3)
    schedule.validate(4, 3)
    with pytest.raises(ValueError, match="has B3·mb0: there are 3 stages and 3 microbatches"):
        schedule.validate(3, 3)
    with pytest.raises(ValueError, match="lacks F0·mb3"):
        schedule.validate(4, 4)


@given(st.data())
def test_a_valid_schedule_with_two_actions_exchanged(data: st.DataObject) -> None:
    """Either the order still works, or the error names an action that is there."""
    lines = [list(line) for line in zb1p(3, 4).devices]
    line = data.draw(st.sampled_from(lines))
    first, second = data.draw(st.integers(0, len(line) - 1)), data.draw(st.integers(0, len(line) - 1))
    line[first], line[second] = line[second], line[first]
    schedule = Schedule(tuple(tuple(line) for line in lines), 0, resident=True)
    try:
        schedule.validate(6, 4)
    except ValueError as error:
        assert any(str(action) in str(error) for line in lines for action in line)
    else:
        assert Schedule.from_text(schedule.to_text()) == schedule
        assert len(list(schedule.in_order())) == 3 * 4 * 3


def test_text() -> None:
    text = (
        "resident\n"
        "0 | F0.0 F0.1 .    .    B3.0 B3.1\n"
        "1 | .    F1.0 F1.1 B2.0 B2.1\n"
    )  # fmt: skip
    assert gpipe(2, 2).to_text() == text
    by_hand = """
        resident      # a comment
        0| F0.0 F0.1 B3.0 B3.1
        1| F1.0 F1.1 . B2.0 B2.1
    """
    assert Schedule.from_text(by_hand) == gpipe(2, 2)


def test_last_device_in_text() -> None:
    schedule = Schedule(((Action("F", 0, 0),), ()), last_device=1)
    assert schedule.to_text() == "last device 1\n0 | F0.0\n1 |\n"
    assert Schedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 | F0.0", "Device 0 should come next"),
        ("0 | F0", "Not an action of a schedule, such as F0.3 or B5.0: F0"),
        ("0 | X0.0", "X0.0"),
        ("device 0: F0.0", "Not a line of a schedule"),
    ],
)
def test_text_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text)
