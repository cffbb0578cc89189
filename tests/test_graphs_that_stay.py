"""With recompute="none" graphs stay on devices with memory of their own, without the parameters: these leave with the
stage and come back for the backward. What has no room is run again.
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, fit, fit_microbatches, one_layer_a_stage, result
from models import batches_of, vectors
from test_device_memory import Seen
from test_devices import ACTIVATION, DOUBLE, PARAMETERS, data, make, wait_for_losses_late
from test_exactness import MODELS, NOISY
from test_exactness import data as exact_data
from test_exactness import make as make_exact
from test_habits import CheckpointAroundLayersAndCode, InPlaceFirst, ResidualStreamInPlace
from test_habits import data as habits_data
from test_habits import make as make_habit
from test_kept_graphs import RUNS, Chain, Counted, WritesState, chain, held
from test_staying_inputs import copied
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_roundpipe.devices import AcceleratorDevice, SimulatedDevice
from lightning_roundpipe.pipeline.lent_parameters import LentParameters
from lightning_roundpipe.pipeline.turns import Turns
from lightning_roundpipe.schedules import scheduler
from lightning_roundpipe.schedules.memory import Memory, Staying, finest


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    one_layer_a_stage(monkeypatch)
    RUNS.clear()


def train(
    module: Any,
    batches: Any,
    m: int,
    devices: int = 1,
    capacity: int | None = None,
    run: dict | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Seen]:
    hardware = [SimulatedDevice(index, capacity=capacity) for index in range(devices)]
    seen = Seen(hardware)
    strategy = RoundPipeStrategy(
        microbatches=m, **{"split": "step", "recompute": "none", "devices": hardware, **options}
    )
    return result(fit(module, batches, strategy, callbacks=[seen], **(run or {}))), seen


# --- the numbers


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("devices", "m"), [(1, 1), (1, 3), (2, 3)])
def test_equal_to_plain_lightning(name: str, devices: int, m: int) -> None:
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        for run in ({}, {"accumulate_grad_batches": 2}):
            batches = exact_data(name, torch.float64, 4)
            ours, _ = train(make_exact(name, torch.float64), batches, m, devices, run=run)
            assert_equal(ours, result(fit_microbatches(make_exact(name, torch.float64), batches, m, **run)))
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)


@pytest.mark.parametrize(
    "options",
    [{"staleness": 1}, {"split": "model"}, {"schedule": "1f1b"}, {"lanes": 2}, {"run": {"precision": "bf16-mixed"}}],
    ids=str,
)
def test_equal_to_recomputing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "schedule" in options:
        monkeypatch.undo()
    dtype = torch.float32 if "run" in options else torch.float64
    ours, theirs = (
        train(
            make_exact("gpt", dtype, **NOISY["gpt"]), exact_data("gpt", dtype, 3, 6), 3, 2,
            recompute=recompute, **options,
        )[0]
        for recompute in ("none", "layer")
    )  # fmt: skip
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "kind", [InPlaceFirst, ResidualStreamInPlace, CheckpointAroundLayersAndCode], ids=lambda kind: kind.__name__
)
def test_changes_in_place_and_checkpoints(kind: type) -> None:
    torch.set_default_dtype(torch.float64)
    ours, _ = train(make_habit(kind), habits_data(), 3)
    assert_equal(ours, result(fit_microbatches(make_habit(kind), habits_data(), 3)))


def test_a_layer_that_writes_its_state_is_run_again() -> None:
    batches = batches_of(vectors, 4, 6)
    ours, _ = train(chain(WritesState), batches, 3)
    assert_equal(ours["weights"], result(fit_microbatches(chain(WritesState), batches, 3))["weights"])


# --- what is run, held and copied


@pytest.mark.parametrize(("devices", "m"), [(1, 1), (1, 3), (2, 3)])
def test_nothing_is_run_again(devices: int, m: int) -> None:
    counts = []
    for batches in (2, 4):
        RUNS.clear()
        train(chain(), batches_of(vectors, batches, 6), m, devices)
        counts.append(Counter(RUNS.values()))
    assert counts[1] - counts[0] == {number: 2 * m for number in range(4)}, "of two batches after the first ones"


@pytest.mark.parametrize("m", [1, 3])
def test_parameters_are_not_held(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block keeps its input, which is what the block before it keeps of its output, and no parameter."""
    wait_for_losses_late(monkeypatch)
    peaks = {}
    for depth in (8, 16):
        _, seen = train(make(depth), data(m), m)
        (peaks[depth],) = set(map(max, seen.peaks))
        losses = 3 * m * DOUBLE
        up, down = (2 * depth - 1) * PARAMETERS + m * ACTIVATION, depth * PARAMETERS + losses
        assert copied(seen) == [(up, down)] * 2, "parameters come up twice, and no activation a second time"
    assert peaks[16] - peaks[8] == 8 * m * ACTIVATION


def test_as_many_as_there_is_room_for() -> None:
    depth, m = 8, 2
    plain = result(fit_microbatches(make(depth), data(m), m))
    _, seen = train(make(depth), data(m), m, capacity=2**30)
    assert seen.plans[0].staying.graphs == set(range(depth - 1))
    memory = 0
    for room in (0, 1, 3, 8, 100):
        capacity = seen.needed[0] + room * m * ACTIVATION + ACTIVATION // 2
        ours, found = train(make(depth), data(m), m, capacity=capacity)
        assert_equal(ours, plain)
        assert max(map(max, found.peaks)) <= capacity
        graphs, inputs, _ = found.plans[0].staying
        assert not graphs & inputs and len(graphs) >= memory
        memory = len(graphs)
    assert memory == depth - 1


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_samples_that_get_longer(recompute: str) -> None:
    """What stays grows with them: from some size on nothing does, and training goes on as it did without."""
    depth, m = 8, 2
    _, seen = train(make(depth), data(m), m, capacity=2**30)
    batches = [batch for times in (1, 2, 4, 1) for batch in data(times * m)[:1]]
    capacity = seen.needed[0] + 3 * depth * m * ACTIVATION
    ours, seen = train(make(depth), batches, m, capacity=capacity, recompute=recompute)
    assert_equal(ours, result(fit_microbatches(make(depth), batches, m)))
    plan = seen.plans[0]
    assert plan.staying.graphs if recompute == "none" else plan.staying.inputs
    assert 1 < plan.staying.growth < 4


def test_which_stay() -> None:
    stages = finest(5)

    def staying(room: int, devices: int = 1) -> Staying:
        memory = Memory(0, [10] * 5, [10] * 5, [5] * 5, kept=[4] * 5, graphs=[20, 30, float("inf"), 25, 1])
        return replace(memory, limit=memory.needed(stages) + room).staying(stages, devices)._replace(growth=inf)

    memory = Memory(100, [10] * 5, [10] * 5, [5] * 5, graphs=[20, 30, 40, 25, 1])
    assert memory.staying(stages, 1).growth == 100 / (memory.needed(stages) + 20 + 25)
    assert staying(0) == Staying()
    assert staying(19) == Staying(frozenset(), frozenset({0, 1, 2, 3}))
    assert staying(24) == Staying(frozenset({0}), frozenset({1}))
    assert staying(50) == Staying(frozenset({0, 3}), frozenset({1}))
    assert staying(999) == Staying(frozenset({0, 1, 3}), frozenset({2})), "what must be recomputed keeps its input"
    assert staying(25, 2) == Staying(frozenset({0, 3}), frozenset({2})), "20 and 4 on one device, 25 on the other"


class SavesItsOutput(Counted):
    """An operation's own output leads back to it: saved as it is, it would be held for ever."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.sigmoid(self.linear(x))
        RUNS[StorageWeakRef(out.untyped_storage())] = self.number
        return out


class NotForTheLoss(Chain):
    """Of its layers between the first and the last one no backward is asked for."""

    def loss(self, batch: Any) -> Tensor:
        x = self.net[0](batch["x"])
        for layer in self.net[1:-1]:
            layer(x)
        return (self.net[-1](x) - batch["y"]).square().mean()


class UnderHooks(NotForTheLoss):
    def loss(self, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda saved: saved):
            return super().loss(batch)


def test_graphs_that_nobody_differentiates() -> None:
    torch.manual_seed(0)
    module = NotForTheLoss(SavesItsOutput).double()
    train(module, batches_of(vectors, 4, 6), 3)
    assert RUNS
    assert held() == 0


def test_the_same_under_hooks_of_the_step_on_the_host() -> None:
    torch.manual_seed(0)
    strategy = RoundPipeStrategy(microbatches=3, split="step", recompute="none")
    fit(UnderHooks(SavesItsOutput).double(), batches_of(vectors, 4, 6), strategy)
    assert RUNS
    assert held() == 0


def test_nothing_is_left_where_a_step_fails() -> None:
    module = chain(SavesItsOutput)
    module.fails = True
    with pytest.raises(ZeroDivisionError) as caught:
        train(module, batches_of(vectors, 3, 6), 3)
    assert max(module.held.values()) > 4
    del caught
    gc.collect()
    assert held() == 0


# --- what is changed meanwhile


def test_a_saved_tensor_that_is_changed_in_place() -> None:
    """Where there are hooks for what is saved, autograd does not look itself."""
    device = AcceleratorDevice(SimulatedDevice(0), {})
    with device.in_thread():
        weight = nn.Parameter(torch.ones(3, dtype=torch.double))
        lent = LentParameters(device.torch_device)
        (leaf,) = lent.stand_for(device.upload([weight]))
        x = device.to_device(torch.ones(3, dtype=torch.double))
        with lent.saving():
            out = torch.sigmoid(x * leaf)
            doubled = out * 2.0
        lent.leave()
        assert leaf.numel() == 0
        lent.come_back(device.upload([weight]))
        torch.autograd.grad(doubled.sum(), [leaf], retain_graph=True)
        out.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(doubled.sum(), [leaf])


def test_a_backward_that_comes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where autograd takes calls in another order than the reverse."""
    monkeypatch.setattr(Turns, "comes_back", lambda *_: True)
    monkeypatch.setattr(scheduler, "comes_back", lambda partition, devices: range(len(partition.forward)))
    with pytest.raises(
        RuntimeError, match=r"layer 'net\.4': its graph is on meta:0, .* come to meta:2.*recompute='layer'"
    ):
        train(chain(), batches_of(vectors, 3, 6), 3, 4)
