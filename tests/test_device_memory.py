"""`device_memory`: stages are cut so that a device has room for them; what a single layer needs must be there."""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Batches, RoundPipeStrategy, assert_equal, fit, fit_microbatches, one_layer_a_stage, result
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Lit
from test_devices import (
    ACTIVATION,
    PARAMETERS,
    WIDTH,
    Block,
    Counts,
    Deep,
    WideBlock,
    data,
    make,
    most,
    wait_for_losses_late,
)  # fmt: skip
from torch import Tensor, nn

from lightning_roundpipe.devices import AcceleratorDevice, CpuDevice, SimulatedDevice
from lightning_roundpipe.devices.memory_limit import memory_limit
from lightning_roundpipe.pipeline.measuring import Measured
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.schedules import Partition, Scheduler, balance
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.memory import Memory
from lightning_roundpipe.schedules.planner import plan
from lightning_roundpipe.schedules.recurrence import time_per_batch

# --- the fewest stages that fit


@st.composite
def cases(draw: st.DrawFn, layers: int) -> tuple[list[int], list[int], Memory, bool]:
    """Costs of forward and backward, memory in which every call has room in a stage of its own, and whether to fuse."""
    calls = draw(st.integers(1, layers))

    def numbers(least: int, most: int) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=calls, max_size=calls))

    sizes: dict[str, Any] = {
        "parameters": numbers(0, 9),
        "gradients": numbers(0, 9),
        "activations": numbers(0, 9),
        "fresh": draw(st.sampled_from([(), numbers(0, 3)])),
        "besides": draw(st.integers(0, 5)),
    }
    least = Memory(0, **sizes).alone()[1]
    memory = Memory(least + draw(st.integers(0, 40)), **sizes)
    return numbers(1, 6), numbers(1, 9), memory, draw(st.booleans())


@given(cases(layers=40))
@settings(deadline=None)
def test_stages_never_need_more_than_there_is(case: tuple[list[int], list[int], Memory, bool]) -> None:
    forward, backward, memory, fused = case
    made = memory.balance(forward, backward, fused=fused)
    assert memory.needed(made) <= memory.limit
    low = made.backward[0].start if fused else len(forward)
    assert [call for stage in made.forward for call in stage] == list(range(low))
    assert [call for stage in reversed(made.backward) for call in stage] == list(range(len(forward)))
    loose = balance(forward, backward, fused=fused)
    if memory.needed(loose) <= memory.limit:
        assert made == loose, "where there is room for it, the time alone decides"


def cuts(calls: int) -> Iterator[list[range]]:
    """All ways to cut so many calls."""
    for count in range(max(calls, 1)):
        for at in combinations(range(1, calls), count):
            ends = [0, *at, calls]
            yield [range(start, stop) for start, stop in pairwise(ends) if stop > start]


def partitions(calls: int, fused: bool) -> Iterator[Partition]:
    for backward in cuts(calls):
        for forward in cuts(backward[-1].start if fused else calls):
            yield Partition(tuple(forward), tuple(reversed(backward)), fused)


@given(cases(layers=5))
@settings(deadline=None, max_examples=200)
def test_there_are_no_fewer_stages_that_fit(case: tuple[list[int], list[int], Memory, bool]) -> None:
    """Of all partitions that keep to the memory, and to the time of the longest call."""
    forward, backward, memory, fused = case
    longest = max(*forward, *backward)

    def is_allowed(partition: Partition) -> bool:
        short = all(sum(forward[i] for i in stage) <= longest for stage in partition.forward)
        short = short and all(sum(backward[i] for i in stage) <= longest for stage in partition.backward)
        return short and memory.needed(partition) <= memory.limit

    fewest = min(each.stage_count() for each in partitions(len(forward), fused) if is_allowed(each))
    made = memory.balance(forward, backward, fused=fused)
    assert is_allowed(made) and made.stage_count() == fewest


def test_no_room_at_all() -> None:
    """The finest stages: none need less."""
    memory = Memory(5, [3] * 4, [3] * 4, [1] * 4)
    made = memory.balance([1] * 4, [3] * 4, fused=True)
    assert made.stage_count() == 7 and memory.needed(made) == memory.alone()[1] == 10


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_search_begins_with_what_fits(staleness: int) -> None:
    """So it finds nothing worse, however few partitions fit."""
    costs = Costs([1.0] * 40 + [5.0], [2.0] * 40 + [9.0])
    memory = Memory(40, [4] * 41, [4] * 41, [1] * 41)
    few = memory.balance(costs.forward, costs.backward_with_recompute(), fused=True)
    found = plan(costs, 5, 4, staleness=staleness, memory=memory)
    assert memory.needed(found.partition) <= 40
    assert found.time <= time_per_batch(few, costs, 5, 4, staleness=staleness)


# --- how much there is


@pytest.mark.parametrize("wanted", [0, -1, 0.0, 1.5, -0.5, True, "all", None, float("nan")])
def test_what_is_no_amount(wanted: Any) -> None:
    with pytest.raises(ValueError, match="`device_memory` must be a whole number of bytes, a share of the device's"):
        RoundPipeStrategy(device_memory=wanted)


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        (1, r"1\.0, all of the device's memory"),
        (24, r"24 \* 10\*\*9, 24 GB"),
        (24_000, r"24000 \* 10\*\*6, 24000 MB"),
    ],
)
def test_another_unit_was_meant(wanted: int, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"`device_memory` is {wanted}, .* You probably meant {meant}\."):
        RoundPipeStrategy(device_memory=wanted)
    assert RoundPipeStrategy(device_memory=wanted, devices=[SimulatedDevice(0)]).device_memory == wanted
    assert RoundPipeStrategy(device_memory=10**6).device_memory == 10**6


def test_more_than_there_is() -> None:
    """Of the smallest device; then it is what is free."""
    said: list[str] = []
    peers: dict[torch.device, AcceleratorDevice] = {}
    devices = [AcceleratorDevice(SimulatedDevice(i, capacity=capacity), peers) for i, capacity in enumerate((900, 500))]
    assert memory_limit(500, devices, said.append) == 500 and not said
    with devices[0].in_thread():
        held = torch.zeros(25).to(devices[1].torch_device)
        assert memory_limit(501, devices, said.append) == 400
    assert said == [
        "roundpipe: device_memory=501 is 501 bytes, and meta:1 has 500 bytes: stages may take what is free of it,"
        " 400 bytes, as with device_memory='auto'."
    ]
    del held
    for unlimited in (AcceleratorDevice(SimulatedDevice(2), {}), CpuDevice(0, 1)):
        assert memory_limit(2**50, [unlimited], pytest.fail) == 2**50


def test_the_limit_is_that_of_the_smallest_device() -> None:
    peers: dict[torch.device, AcceleratorDevice] = {}
    devices = [AcceleratorDevice(SimulatedDevice(i, capacity=capacity), peers) for i, capacity in enumerate((900, 500))]
    assert memory_limit("auto", devices, pytest.fail) == 500
    assert memory_limit(0.5, devices, pytest.fail) == 250
    assert memory_limit(1.0, devices, pytest.fail) == 500
    assert memory_limit(1, devices, pytest.fail) == 1
    without = AcceleratorDevice(SimulatedDevice(2), peers)
    assert memory_limit("auto", [*devices, without], pytest.fail) == 500
    for device in (without, CpuDevice(0, 1)):
        assert memory_limit("auto", [device], pytest.fail) is None
        with pytest.raises(ValueError, match=rf"`device_memory` is 0.5, .* but {device.name} has no limit to it"):
            memory_limit(0.5, [*devices, device], pytest.fail)


def test_schedules_whose_stages_are_given() -> None:
    with pytest.raises(ValueError, match="`device_memory` is for schedule='roundpipe' only"):
        RoundPipeStrategy(schedule="gpipe", device_memory=10**6)


# --- training


class Seen(Counts):
    """Notes, besides what devices hold, the stages and what they were thought to need."""

    plans: list[Plan]
    partitions: list[Partition]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        pipeline = trainer.strategy._pipeline
        self.plans = pipeline.plans()
        self.partitions = [each.partition for each in pipeline.plans()]
        needs = [(pipeline._planning._memory(each.calls), each.partition) for each in pipeline.plans()]
        self.needed = [memory.needed(partition) for memory, partition in needs if memory is not None]
        self.limits = [memory.limit for memory, _ in needs if memory is not None]


@pytest.fixture
def one_slow_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as is measured. So all the others together take no longer, and by time alone are one stage. No better
    stages are searched."""

    def costs_of(self: Measured, calls: Sequence[int]) -> tuple[list[float], list[float]]:
        forward = [1.0] * (len(calls) - 1) + [100.0]
        return forward, [3 * cost for cost in forward]

    monkeypatch.setattr(Measured, "costs_of", costs_of)
    monkeypatch.setattr(Scheduler, "can_be_planned", False)


def train(
    depth: int,
    capacity: int | None,
    microbatches: int = 2,
    devices: int = 2,
    module: Lit | None = None,
    count: int = 4,
    **options: Any,
) -> tuple[L.Trainer, Seen]:
    hardware = [SimulatedDevice(index, capacity=capacity) for index in range(devices)]
    seen = Seen(hardware)
    strategy = RoundPipeStrategy(microbatches=microbatches, **{"split": "step", "devices": hardware, **options})
    trainer = fit(module or make(depth), data(microbatches, count), strategy, callbacks=[seen])
    return trainer, seen


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_what_stages_are_thought_to_need_is_what_they_need(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For equal blocks on one device, but for what the loss takes and what the model notes: less than an activation."""
    one_layer_a_stage(monkeypatch)
    wait_for_losses_late(monkeypatch)
    _, seen = train(8, most(microbatches) + ACTIVATION // 2, microbatches, devices=1)  # no more, for inputs to stay
    assert set(map(max, seen.peaks)) == {most(microbatches)}
    assert seen.needed == [pytest.approx(most(microbatches), abs=ACTIVATION // 2)]


CAPACITY = 14 * PARAMETERS


@pytest.mark.usefixtures("one_slow_layer")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1])
def test_stages_that_would_not_fit_are_cut(devices: int, staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    depth = 20
    with monkeypatch.context() as unlimited, pytest.raises(torch.OutOfMemoryError):
        # By time alone, 19 blocks are one stage, and the last another.
        unlimited.setattr("lightning_roundpipe.strategy.memory_limit", lambda *_: 2**40)
        train(depth, CAPACITY, devices=devices, staleness=staleness)
    trainer, seen = train(depth, CAPACITY, devices=devices, staleness=staleness)
    (partition,) = seen.partitions
    assert 4 < partition.stage_count() < 2 * depth - 1
    assert seen.limits == [CAPACITY] and seen.needed[0] <= CAPACITY
    if not staleness:
        assert_equal(result(trainer), result(fit_microbatches(make(depth), data(2, 4), 2)))


@pytest.mark.usefixtures("one_slow_layer")
@pytest.mark.parametrize("staleness", [0, 1])
def test_the_search_keeps_to_it(staleness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "can_be_planned", True)
    _, seen = train(20, CAPACITY, staleness=staleness, count=12)
    assert seen.needed[0] <= CAPACITY and max(map(max, seen.peaks)) <= CAPACITY


@pytest.mark.usefixtures("one_slow_layer")
def test_a_share_of_the_memory() -> None:
    depth, capacity = 20, 64 * PARAMETERS
    stages = {}
    for share in (1.0, 0.5, 0.25):
        trainer, seen = train(depth, capacity, devices=1, device_memory=share)
        assert seen.limits == [int(share * capacity)]
        assert max(map(max, seen.peaks)) <= share * capacity
        stages[share] = seen.partitions[0].stage_count()
        assert_equal(result(trainer), result(fit_microbatches(make(depth), data(2, 4), 2)))
    assert stages[1.0] < stages[0.5] < stages[0.25]


@pytest.mark.parametrize("split", ["step", "model"])
def test_a_layer_that_does_not_fit(split: str) -> None:
    with pytest.raises(ValueError) as raised:
        train(6, None, device_memory=3 * PARAMETERS, split=split)
    text = str(raised.value)
    assert re.match(r"layer 'blocks\.\d' does not fit .* even in a stage of its own: it needs", text)
    assert "it needs 2.18 kB for parameters, 4.35 kB for gradients, " in text
    assert re.search(r"\d kB for activations; .* [\d.]+ kB in all\. .*\(device_memory=\.\.\.\) leaves 6\.53 kB\.", text)
    assert re.findall(r"\(\d\) .*?(microbatches|layers|precision)=", text) == ["layers", "precision", "microbatches"]


def test_auto_refuses_nothing_that_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is estimated is more than what is needed here: microbatches that wait are on the other device."""
    one_layer_a_stage(monkeypatch)
    needed = train(6, 2**30, microbatches=3)[1].needed[0]
    _, seen = train(6, 2**30, microbatches=3, device_memory=needed)  # no more, for inputs to stay
    assert max(map(max, seen.peaks)) < seen.needed[0] == needed
    monkeypatch.undo()
    with pytest.raises(ValueError, match="does not fit"):
        train(6, 2**30, microbatches=3, device_memory=seen.needed[0] - 1)


@pytest.mark.usefixtures("one_slow_layer")
def test_steps_with_the_whole_batch_and_own_backward() -> None:
    """Each split call has stages of its own; a backward that waits for the user's has none that are fused."""

    class Own(type(make(1))):  # type: ignore[misc]
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    depth, capacity = 20, CAPACITY + 4 * ACTIVATION
    for module, split in ((Chained(depth), "model"), (Own(depth), "step")):
        trainer, seen = train(depth, capacity, module=module.double(), split=split)
        assert trainer.global_step == 4
        assert all(each.stage_count() > 4 for each in seen.partitions) and seen.partitions
        assert not any(each.fused for each in seen.partitions) or split == "step"


class Chained(Lit):
    """Its blocks are called as one module."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def loss(self, batch: Any) -> Tensor:
        return self.blocks(batch["x"]).square().mean()


class Uneven(Lit):
    """Blocks of very different size, with a wide output and a loss that takes much memory itself."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [WIDTH, *widths]
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return nn.functional.log_softmax(x, dim=1).square().mean()


@pytest.mark.usefixtures("one_slow_layer")
@pytest.mark.parametrize("widths", [[8, 64, 8, 8, 32, 8, 128], [64, 8, 8, 8, 8, 8], [8, 8, 96, 96, 8, 8], [4] * 12])
@pytest.mark.parametrize("devices", [1, 3])
def test_unequal_layers_keep_to_the_limit(widths: list[int], devices: int) -> None:
    """With as much as the largest layer needs, and a little more."""
    with pytest.raises(ValueError) as raised:
        train(0, None, 3, devices, Uneven(widths).double(), device_memory=1)
    (least,) = re.findall(r"([\d.]+) kB in all", str(raised.value))
    plain = result(fit_microbatches(Uneven(widths).double(), data(3, 4), 3))
    for factor in (1.05, 2):
        limit = int(factor * 1000 * float(least))
        trainer, seen = train(0, None, 3, devices, Uneven(widths).double(), device_memory=limit)
        assert seen.needed[0] <= limit and max(map(max, seen.peaks)) <= limit
        assert_equal(result(trainer), plain)


class Twice(Deep):
    """Its first blocks are called once more, so that their gradients are not summed on a device."""

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in [*self.blocks, *self.blocks[:4]]:
            x = block(x)
        return x.square().mean()


def test_gradients_that_come_down_by_themselves() -> None:
    """They may still be there when the next call runs."""

    def module() -> Twice:
        return Twice(8, WideBlock).double()

    with pytest.raises(ValueError) as raised:
        train(0, None, 4, 2, module(), device_memory=1)
    (least,) = re.findall(r"([\d.]+) kB in all", str(raised.value))
    for factor in (1.01, 2):
        limit = int(factor * 1000 * float(least))
        _, seen = train(0, None, 4, 2, module(), device_memory=limit)
        assert seen.needed[0] <= limit and max(map(max, seen.peaks)) <= limit


def test_virtual_devices() -> None:
    """The host's memory has no limit; a number of bytes is kept to, as far as inputs tell what activations take."""
    depth = 20
    for wanted, most_blocks in (("auto", depth), (9 * PARAMETERS, 3)):
        seen = Seen([])
        strategy = RoundPipeStrategy(microbatches=2, split="step")
        strategy.device_memory = wanted  # a number that is too small for any but such blocks
        trainer = fit(make(depth), data(2, 4), strategy, devices=2, callbacks=[seen])
        (partition,) = seen.partitions
        assert max(len(stage) for stage in partition.backward) <= most_blocks
        assert_equal(result(trainer), result(fit_microbatches(make(depth), data(2, 4), 2)))
    trainer = L.Trainer(accelerator="cpu", strategy=RoundPipeStrategy(device_memory=0.5), logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with pytest.raises(ValueError, match="but cpu:0 has no limit to it that is known"):
        trainer.fit(make(2), Batches(data(2)))
