"""What is kept for the recompute stays on the device, where that runs there and there is room beside the stages."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, fit, fit_microbatches, one_layer_a_stage, result
from hypothesis import given
from hypothesis import strategies as st
from test_device_memory import Chained, Seen
from test_devices import ACTIVATION, DOUBLE, PARAMETERS, Deep, data, make
from test_habits import InPlaceFirst, ResidualStreamInPlace
from test_habits import data as habits_data
from test_habits import make as make_habit
from torch import Tensor

from lightning_roundpipe.devices import SimulatedDevice
from lightning_roundpipe.schedules import Scheduler
from lightning_roundpipe.schedules.memory import Memory, Staying, finest

# --- which


def memory(limit: int, kept: Sequence[int]) -> Memory:
    calls = len(kept)
    return Memory(limit, [10] * calls, [10] * calls, [5] * calls, kept=kept)


def test_those_that_come_back_and_fit() -> None:
    stages = finest(5)  # F0 F1 F2 F3 FB4 B5 B6 B7 B8
    needed = memory(0, [4] * 5).needed(stages)
    assert memory(needed + 16, [4] * 5).staying(stages, 1).inputs == {0, 1, 2, 3}, (
        "all but the fused one, which keeps nothing"
    )
    assert memory(needed + 15, [4] * 5).staying(stages, 1).inputs == {0, 1, 2}
    assert memory(needed + 9, [3, 8, 1, 2, 7]).staying(stages, 1).inputs == {1, 2}, "the largest first"
    assert (
        memory(needed + 3, [4] * 5).staying(stages, 1).inputs
        == memory(needed - 9, [4] * 5).staying(stages, 1).inputs
        == set()
    )
    assert memory(needed + 99, [4] * 5).staying(stages, 2).inputs == {0, 1, 2, 3}, "F3 and B5, F2 and B6, ..."
    assert memory(needed + 4, [4] * 5).staying(stages, 2).inputs == {0, 1}, "one on each of the devices"
    assert memory(needed + 99, [4] * 5).staying(stages, 4).inputs == {0, 2}, (
        "F3 and B5 are not on one device, F2 and B6 are"
    )
    assert memory(needed + 99, []).staying(stages, 1).inputs == set()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(-20, 60),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
def test_never_more_than_there_is_room_for(kept: list[int], room: int, devices: int, fused: bool) -> None:
    stages = finest(len(kept), fused)
    needed = memory(0, kept).needed(stages)
    staying = memory(needed + room, kept).staying(stages, devices).inputs
    below, last = len(stages.forward), stages.stage_count() - 1
    for device in range(devices):
        here = [call for call in range(below) if call % devices == device]
        assert sum(kept[call] for call in here if call in staying) <= max(room, 0)
        for call in here:
            comes_back = (last - call) % devices == device
            left_out = call not in staying
            assert comes_back or left_out
            if comes_back and left_out:  # it had no room
                assert sum(kept[other] for other in here if other in staying) + kept[call] > room


def test_other_schedules_keep_them_in_host_memory() -> None:
    stages = Scheduler("1f1b", 2).partition([1.0] * 4, [3.0] * 4)
    assert Scheduler("1f1b", 2).staying(stages, 1, memory(999, [4] * 4)) == Staying()
    assert Scheduler("roundpipe", 4, 2).staying(finest(5), 2, memory(999, [4] * 5)).inputs == {0, 1, 2, 3}
    assert Scheduler("roundpipe", 2).staying(finest(5), 1, None) == Staying(), "no limit is known"


# --- what is copied, and held


def train(
    depth: int,
    capacity: int | None,
    microbatches: int = 2,
    devices: int = 1,
    *,
    peer_access: bool = False,
    **options: Any,
) -> tuple[dict[str, Any], Seen]:
    hardware = [SimulatedDevice(index, capacity=capacity, peer_access=peer_access) for index in range(devices)]
    seen = Seen(hardware)
    module = options.pop("module", None) or make(depth)
    strategy = RoundPipeStrategy(microbatches=microbatches, **{"split": "step", "devices": hardware, **options})
    trainer = fit(module, data(microbatches), strategy, callbacks=[seen])
    return result(trainer), seen


def copied(seen: Seen) -> list[tuple[int, int]]:
    """Bytes up and down of each batch, all devices together."""
    return [
        tuple(sum(copies.nbytes for copies in kind) for kind in list(zip(*batch, strict=True))[:2])  # type: ignore[misc]
        for batch in seen.copies
    ]


DEPTH = 8
STAGES = 2 * DEPTH - 1


def without_activations(microbatches: int) -> tuple[int, int]:
    """Parameters for each stage and the batch itself up; gradients and losses down."""
    losses = 3 * microbatches * DOUBLE
    return STAGES * PARAMETERS + microbatches * ACTIVATION, DEPTH * PARAMETERS + losses


@pytest.mark.parametrize("microbatches", [1, 3])
def test_as_many_as_there_is_room_for(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device. The first block's input came up and stays; those between are not copied at all."""
    one_layer_a_stage(monkeypatch)
    plain = result(fit_microbatches(make(DEPTH), data(microbatches), microbatches))
    _, seen = train(DEPTH, 2**30, microbatches)
    (needed,) = seen.needed
    of_all = microbatches * ACTIVATION
    up, down = without_activations(microbatches)
    for staying in (0, 1, 3, DEPTH - 1):
        capacity = needed + staying * of_all + ACTIVATION // 2  # for the loss and what the model notes
        ours, seen = train(DEPTH, capacity, microbatches)
        assert_equal(ours, plain)
        others = DEPTH - 1 - staying  # of those between; the first ones stay first
        first = 0 if staying else of_all  # the batch needs not come down
        between = others if staying else others - 1
        assert copied(seen) == [(up + first + between * of_all, down + between * of_all)] * 2
        assert max(map(max, seen.peaks)) <= capacity


@pytest.mark.parametrize("staleness", [0, 1])
def test_on_several_devices(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the backward comes to the device of the forward, only what has come from another device is copied."""
    one_layer_a_stage(monkeypatch)
    microbatches = 3
    results, kept = [], []
    for roomy in (True, False):
        _, seen = train(DEPTH, 2**30, microbatches, 2, staleness=staleness)
        capacity = seen.needed[0] + (DEPTH * microbatches * ACTIVATION if roomy else 0)
        ours, seen = train(DEPTH, capacity, microbatches, 2, staleness=staleness)
        assert max(map(max, seen.peaks)) <= capacity
        results.append(ours)
        kept.append(copied(seen))
    assert_equal(*results)
    for (up, down), (more_up, more_down) in zip(*kept, strict=True):
        # Forward and backward of block b are stages b and 14 - b: on the same device. Each input has come down to get
        # here; it need not come up a second time.
        assert more_up - up == (DEPTH - 1) * microbatches * ACTIVATION
        assert more_down == down


def test_devices_that_reach_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """No activation goes by host memory: each comes across once, and its gradient once."""
    one_layer_a_stage(monkeypatch)
    ours, seen = train(DEPTH, 2**30, 3, 2, peer_access=True)
    assert_equal(ours, result(fit_microbatches(make(DEPTH), data(3), 3)))
    assert copied(seen) == [without_activations(3)] * 2
    for batch in seen.copies:
        crossed = sum(across.nbytes for _, _, across in batch)
        assert crossed == 2 * (DEPTH - 1) * 3 * ACTIVATION


@pytest.mark.parametrize("options", [{"staleness": 1}, {"lanes": 2}], ids=str)
def test_peaks_stay_within_the_limit(options: dict[str, Any]) -> None:
    devices = 2 if "lanes" in options else 1
    for room in range(0, 12, 3):
        _, seen = train(12, 2**30, 4, devices, **options)
        capacity = seen.needed[0] + room * ACTIVATION
        _, seen = train(12, None, 4, devices, device_memory=capacity, **options)
        losses = 2 * 3 * 4 * DOUBLE  # of two batches, and what the model notes: how many are there depends on threads
        assert max(map(max, seen.peaks)) <= capacity + losses


def test_split_calls_keep_theirs_in_host_memory() -> None:
    """A step may have several of them at a time."""
    module = Chained(6).double()
    _, seen = train(0, 2**30, module=module, split="model")
    assert seen.partitions and not any(plan.staying.inputs for plan in seen.plans)


class Parts(Deep):
    """What its blocks get is half of something larger, which is not to be held for it."""

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(torch.cat([x, x], dim=1).chunk(2, dim=1)[0])
        return x.square().mean()


def test_parts_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)
    peaks = []
    for depth in (8, 16):
        torch.manual_seed(0)
        _, seen = train(0, 2**30, module=Parts(depth).double())
        assert len(seen.plans[0].staying.inputs) == depth - 1
        peaks.append(max(map(max, seen.peaks)))
    assert peaks[0] == peaks[1], "they go to host memory"


@pytest.mark.parametrize("kind", [InPlaceFirst, ResidualStreamInPlace], ids=lambda kind: kind.__name__)
def test_what_is_changed_in_place_is_copied(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)
    torch.set_default_dtype(torch.float64)
    strategy = RoundPipeStrategy(microbatches=3, split="step", devices=[SimulatedDevice(0, capacity=2**30)])
    ours = result(fit(make_habit(kind), habits_data(), strategy))
    assert_equal(ours, result(fit_microbatches(make_habit(kind), habits_data(), 3)))
