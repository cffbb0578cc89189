"""Devices with memory of their own: what they hold at a time and what is copied, counted to the byte."""

import gc
from typing import Any

import lightning as L
import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, fit, fit_microbatches, result
from models import Lit
from torch import Tensor, nn

from lightning_roundpipe.devices import SimulatedDevice, simulating
from lightning_roundpipe.devices.simulated import Copies
from lightning_roundpipe.schedules import Scheduler
from lightning_roundpipe.schedules.partition import Partition

WIDTH, ROWS, DOUBLE = 16, 6, 8
PARAMETERS = (WIDTH * WIDTH + WIDTH) * DOUBLE  # of a block
ACTIVATION = ROWS * WIDTH * DOUBLE  # of a microbatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Deep(Lit):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Counts(L.Callback):
    """What each batch but the first has held at most, and copied."""

    def __init__(self, devices: list[SimulatedDevice]) -> None:
        self.devices = devices
        self.peaks: list[list[int]] = []
        self.copies: list[list[tuple[Copies, Copies, Copies]]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy._pipeline.wait_backward()
        gc.collect()
        if trainer.global_step > 1:
            self.peaks.append([device.memory.peak for device in self.devices])
            self.copies.append([(device.up, device.down, device.across) for device in self.devices])
        for device in self.devices:
            device.memory.reset_peak()
            device.up, device.down, device.across = Copies(), Copies(), Copies()


@pytest.fixture(autouse=True)
def one_block_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the blocks' time. The last one is fused: it runs forward and backward at once."""

    def partition(self: Scheduler, forward: Any, backward: Any, *, fused: bool = True) -> Partition:
        ranges = [range(i, i + 1) for i in range(len(forward))]
        return Partition(tuple(ranges[:-1]), tuple(reversed(ranges)), fused=True)

    monkeypatch.setattr(Scheduler, "partition", partition)
    monkeypatch.setattr(Scheduler, "can_be_planned", False)


def data(microbatches: int, count: int = 3) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(microbatches * ROWS, WIDTH).double()} for _ in range(count)]


def make(depth: int) -> Deep:
    torch.manual_seed(0)
    return Deep(depth).double()


def train(depth: int, microbatches: int, devices: int, capacity: int | None = None) -> tuple[L.Trainer, Counts]:
    hardware = [SimulatedDevice(index, capacity=capacity) for index in range(devices)]
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", devices=hardware)
    counts = Counts(hardware)
    return fit(make(depth), data(microbatches), strategy, callbacks=[counts]), counts


def test_memory_to_the_byte() -> None:
    """A single microbatch: nothing depends on the threads' timing. The most is held at the end of a block's
    backward."""
    activations = 5 * ACTIVATION  # input, output, tanh's output kept for its backward, and two gradients
    for depth in (24, 96):
        _, counts = train(depth, 1, 1)
        for (peak,) in counts.peaks:
            besides = peak - 2 * PARAMETERS - activations  # those are a stage's parameters and gradients
            # The loss and what its backward began with; the main thread may not have let go of the last batch's yet.
            assert besides % DOUBLE == 0 and 2 * DOUBLE <= besides <= 5 * DOUBLE


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_memory_of_several_microbatches_does_not_grow_with_depth(devices: int) -> None:
    microbatches = devices + 1
    for depth in (12, 48):
        _, counts = train(depth, microbatches, devices)
        # A stage's parameters, and those that calls which have just left it may still hold. Gradients: the stage's
        # sum, a microbatch's, the new sum, and those on their way down.
        bound = (2 + 4) * PARAMETERS + 6 * microbatches * ACTIVATION
        assert max(map(max, counts.peaks)) <= bound


def test_numbers_and_capacity() -> None:
    """A model of ten times the devices' memory trains; on one device as a whole it does not fit."""
    depth = 60
    capacity = depth * PARAMETERS // 10
    trainer, _ = train(depth, 1, 2, capacity)
    assert_equal(result(trainer), result(fit_microbatches(make(depth), data(1), 1)))
    device = SimulatedDevice(0, capacity=capacity)
    with simulating(), pytest.raises(torch.OutOfMemoryError, match="meta:0 out of memory"):
        make(depth).to(device.torch_device)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_bytes_of_a_batch(devices: int) -> None:
    """Parameters go up for each stage, gradients come down once, whatever the number of microbatches."""
    depth, microbatches = 12, devices + 1
    _, counts = train(depth, microbatches, devices)
    stages = (depth - 1) + depth  # forward and backward; the last block's are one
    for of_batch in counts.copies:
        up, down, across = (sum(copies.nbytes for copies in kind) for kind in zip(*of_batch, strict=True))
        # The batch itself, and the inputs of the blocks that are recomputed.
        assert up == stages * PARAMETERS + microbatches * depth * ACTIVATION
        # What those keep, but for the batch, which was there. And each loss: noted, returned, logged, and merged.
        losses = 4 * microbatches * DOUBLE
        assert down == depth * PARAMETERS + microbatches * (depth - 2) * ACTIVATION + losses
        # From each stage to the next, there and back, where that is on another device.
        if devices == 1:
            assert across == 0
        else:
            assert across % (microbatches * ACTIVATION) == 0 and 0 < across <= 2 * stages * microbatches * ACTIVATION
