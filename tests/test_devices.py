"""Devices with memory of their own: what they hold at a time and what is copied, counted to the byte."""

import gc
import re
from typing import Any

import lightning as L
import pytest
import torch
from helpers import RoundPipeStrategy, assert_equal, break_for, fit, fit_microbatches, one_layer_a_stage, result
from models import Lit
from torch import Tensor, nn

from lightning_roundpipe.devices import (
    AcceleratorDevice,
    SimulatedDevice,
    SimulatedEvent,
    SimulatedStream,
    accelerator,
    simulating,
)
from lightning_roundpipe.devices.simulated import Copies
from lightning_roundpipe.pipeline.batch import Batch
from lightning_roundpipe.state.gradients import _Sum
from lightning_roundpipe.state.parameters import ParameterStore

WIDTH, ROWS, DOUBLE = 16, 6, 8
PARAMETERS = (WIDTH * WIDTH + WIDTH) * DOUBLE  # of a block
WIDER = 5
WIDE_PARAMETERS = (WIDER * WIDTH * WIDTH + WIDER * WIDTH + WIDER * WIDTH * WIDTH + WIDTH) * DOUBLE  # of a wide block
ACTIVATION = ROWS * WIDTH * DOUBLE  # of a microbatch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class WideBlock(nn.Module):
    """Of two linear maps, one after the other: their gradients come one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDER * WIDTH)
        self.down = nn.Linear(WIDER * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Deep(Lit):
    def __init__(self, depth: int, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class WithTarget(Deep):
    """The first block is called once more, without gradients, after everything else."""

    def __init__(self) -> None:
        super().__init__(2)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        with torch.no_grad():
            self.blocks[0](batch["x"])
        return loss


class Counts(L.Callback):
    """What each batch but the first has held at most, and copied."""

    def __init__(self, devices: list[SimulatedDevice]) -> None:
        self.devices = devices
        self.peaks: list[list[int]] = []
        self.copies: list[list[tuple[Copies, Copies, Copies]]] = []
        self.waits: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy._pipeline.wait_backward()
        gc.collect()
        if trainer.global_step > 1:
            self.peaks.append([device.memory.peak for device in self.devices])
            self.copies.append([(device.up, device.down, device.across) for device in self.devices])
            self.waits.append(sum(device.waits for device in self.devices))
        for device in self.devices:
            device.memory.reset_peak()
            device.up, device.down, device.across = Copies(), Copies(), Copies()
            device.waits = 0


@pytest.fixture(autouse=True)
def one_block_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the blocks' time. The last one is fused: it runs forward and backward at once."""

    one_layer_a_stage(monkeypatch)


def data(microbatches: int, count: int = 3) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(microbatches * ROWS, WIDTH).double()} for _ in range(count)]


def make(depth: int, block: type[nn.Module] = Block) -> Deep:
    torch.manual_seed(0)
    return Deep(depth, block).double()


def train(
    depth: int, microbatches: int, devices: int, capacity: int | None = None, block: type[nn.Module] = Block
) -> tuple[L.Trainer, Counts]:
    hardware = [SimulatedDevice(index, capacity=capacity) for index in range(devices)]
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", devices=hardware)
    counts = Counts(hardware)
    return fit(make(depth, block), data(microbatches), strategy, callbacks=[counts]), counts


# --- memory


def activations(block: type[nn.Module], *, adds_up: bool) -> int:
    """What plain autograd holds at most besides the parameters, and gradients of as many bytes, in a block's forward
    and backward: input, output, the gradients of both, and what lies between. Where it adds gradients up, also those
    that one operation has just computed.
    """
    device = SimulatedDevice(0)
    with simulating():
        module = block().double().to(device.torch_device)
        x = torch.ones(ROWS, WIDTH, dtype=torch.double).to(device.torch_device).requires_grad_()
        start = torch.ones_like(x)
        own = list(module.parameters())
        parameters = sum(parameter.nbytes for parameter in own)
        for parameter in own:
            parameter.grad = torch.zeros_like(parameter)  # the forward meets those of the stage before
        device.memory.reset_peak()
        out = module(x)
        forward = device.memory.peak
        if not adds_up:
            for parameter in own:
                parameter.grad = None
        device.memory.reset_peak()
        out.backward(start, inputs=[x, *own])
        return max(forward, device.memory.peak) - 2 * parameters


def wait_for_losses_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it depends on timing for how long what comes down is held."""
    wait_losses = Batch.wait_losses

    def late(batch: Batch) -> None:
        batch.wait_all()
        wait_losses(batch)

    monkeypatch.setattr(Batch, "wait_losses", late)


def most(microbatches: int, block: type[nn.Module] = Block) -> int:
    """The bytes that a device holds at most, in a block's backward, if it has all microbatches."""
    of_block = WIDE_PARAMETERS if block is WideBlock else PARAMETERS
    parameters = 2 * of_block  # of the stage, and of the one before or after it
    gradients = of_block  # of the stage
    call = activations(block, adds_up=microbatches > 1)
    before = ACTIVATION  # the input of the call before
    waiting = (microbatches - 1) * ACTIVATION  # the gradients that the other microbatches are at
    scalars = 3 * microbatches * DOUBLE  # the model's note of each loss, its copy on the way down, and its gradient
    return parameters + gradients + call + before + waiting + scalars


@pytest.mark.parametrize("block", [Block, WideBlock])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_memory_to_the_byte(microbatches: int, block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_losses_late(monkeypatch)
    for depth in (24, 96) if microbatches == 2 and block is Block else (6, 24):
        _, counts = train(depth, microbatches, 1, block=block)
        assert counts.peaks == [[most(microbatches, block)]] * 2


@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_several_devices(devices: int) -> None:
    """Where each microbatch is when another one is in its backward depends on timing, but not on depth."""
    microbatches = devices + 1
    for depth in (12, 48):
        _, counts = train(depth, microbatches, devices)
        # What has gone on to another device may still be held, until the call there is over.
        assert max(map(max, counts.peaks)) <= most(microbatches) + microbatches * ACTIVATION


def test_numbers_and_capacity() -> None:
    """A model of ten times the devices' memory trains; on one device as a whole it does not fit."""
    depth = 60
    capacity = depth * PARAMETERS // 10
    trainer, _ = train(depth, 1, 2, capacity)
    assert_equal(result(trainer), result(fit_microbatches(make(depth), data(1), 1)))
    device = SimulatedDevice(0, capacity=capacity)
    with simulating(), pytest.raises(torch.OutOfMemoryError, match="meta:0 out of memory"):
        make(depth).to(device.torch_device)


# --- copies


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_bytes_of_a_batch(devices: int) -> None:
    """The formula of docs/memory.md."""
    depth, microbatches = 12, devices + 1
    _, counts = train(depth, microbatches, devices)
    stages = (depth - 1) + depth  # forward and backward; the last block's are one
    crossings = 0
    if devices > 1:
        for block in range(1, depth):  # all but the first, whose input has no gradient
            backward, forward_before = stages - 1 - block, block - 1  # stages, and so devices
            crossings += (backward - forward_before) % devices != 0  # the gradient goes where the input came from
            crossings += (backward + 1 - forward_before) % devices != 0  # and on to the next stage
    recomputed = depth - 1  # all but the last block
    entered = 1 if devices == 1 else depth  # blocks whose input is not where they run: the batch, or of another device
    kept = depth - 2 if devices == 1 else depth - 1  # inputs that come down, once: all but the batch itself
    losses = 3 * microbatches * DOUBLE  # noted by the model, returned and merged
    for of_batch in counts.copies:
        up, down, across = (sum(copies.nbytes for copies in kind) for kind in zip(*of_batch, strict=True))
        assert up == stages * PARAMETERS + microbatches * (recomputed + entered + crossings) * ACTIVATION
        assert down == depth * PARAMETERS + microbatches * (kept + crossings) * ACTIVATION + losses
        assert across == 0


# --- what the host waits for


class Scaled(nn.Module):
    """Its weight lies transposed, and the weight's gradient otherwise: it is one number, seen as many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(3, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.weight.sum()


class Labelled(L.LightningModule):
    """Its labels and a buffer are on the host, its activations are not. It notes nothing, but logs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("position", torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Scaled() for _ in range(6))

    def training_step(self, batch: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        x = batch["x"]
        for block in self.blocks:
            x = block(x) + self.position
        loss = nn.functional.cross_entropy(x, batch["y"], label_smoothing=0.1)
        self.log("loss", loss)
        return {"loss": loss, "logits": x.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def labelled(microbatches: int) -> list[dict[str, Tensor]]:
    return [{**batch, "y": torch.arange(len(batch["x"])) % WIDTH} for batch in data(microbatches)]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_host_waits_for_events_alone(devices: int, staleness: int) -> None:
    """Every copy is from or to pinned memory, and no operation is one whose result the host must see."""
    microbatches = devices + 1
    hardware = [SimulatedDevice(index) for index in range(devices)]
    counts = Counts(hardware)
    options = {"devices": hardware, "staleness": staleness}
    strategy = RoundPipeStrategy(microbatches=microbatches, split="step", **options)
    trainer = fit(Labelled().double(), labelled(microbatches), strategy, callbacks=[counts])
    assert counts.waits == [0, 0]
    if not staleness:
        expected = fit_microbatches(Labelled().double(), labelled(microbatches), microbatches)
        assert_equal(result(trainer)["weights"], result(expected)["weights"])


KEPT: list[Tensor] = []


class Keeps(Deep):
    def training_step(self, batch: Any, index: int) -> Tensor:
        KEPT.append(self.loss(batch))
        return KEPT[-1]


class LooksAtKept(L.Callback):
    """On the main thread, while the backward may be under way."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.sums.append(float(torch.stack([loss.detach().cpu() for loss in KEPT]).sum()))
        KEPT.clear()


def test_the_programs_own_work_on_a_device_comes_after_the_pipelines() -> None:
    looks = LooksAtKept()
    strategy = RoundPipeStrategy(microbatches=2, split="step", devices=[SimulatedDevice(0), SimulatedDevice(1)])
    torch.manual_seed(0)
    fit(Keeps(6).double(), data(2), strategy, callbacks=[looks])
    assert len(looks.sums) == 3 and all(looks.sums)


class ChangesWhatItLogged(Deep):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        value = loss.detach() * 3
        self.log("value", value)
        value.zero_()
        return loss


def test_what_comes_down_is_what_it_was_then() -> None:
    """Though it is changed in place at once."""
    found = []
    for devices in ([SimulatedDevice(0)], None):
        torch.manual_seed(0)
        strategy = RoundPipeStrategy(microbatches=2, split="step", devices=devices)
        trainer = fit(ChangesWhatItLogged(3).double(), data(2), strategy)
        found.append(trainer.callback_metrics["value"])
    assert_equal(*found)
    assert found[0] > 0


# --- what must be waited for


def fails(model: nn.Module | None = None, devices: int = 2, **options: Any) -> str:
    """Trains, and returns what is raised."""
    options["devices"] = [SimulatedDevice(index) for index in range(devices)]
    strategy = RoundPipeStrategy(microbatches=2, split="step", **options)
    with pytest.raises(RuntimeError) as caught:
        fit(make(6) if model is None else model, data(2), strategy)
    return str(caught.value)


@pytest.mark.parametrize("of", ["parameters", "inputs"])
def test_an_upload_that_is_not_waited_for(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = AcceleratorDevice._wait_for_upload

    def wait_for_others(self: AcceleratorDevice, event: Any) -> None:
        if (event is self._uploaded) != (of == "parameters"):
            wait(self, event)

    monkeypatch.setattr(AcceleratorDevice, "_wait_for_upload", wait_for_others)
    assert re.search(f"reads, on the default stream .* what the {of}' upload stream .* may not have written", fails())


def test_a_slot_that_is_used_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    free = AcceleratorDevice._free_slot
    monkeypatch.setattr(AcceleratorDevice, "_free_slot", lambda self, done: free(self, SimulatedEvent()))
    assert re.search("the parameters' upload stream .* freed while the default stream .* may still use it", fails())


def test_a_gradient_that_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Sum, "wait_arrival", lambda *_: None)
    assert re.search("reads, on the host, what the download stream .* may not have written", fails())


def test_an_input_that_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept for the recompute goes up again before it has come down."""
    monkeypatch.setattr(accelerator, "arrival", lambda _: None)
    assert re.search("reads, on .* what the download stream .* may not have written", fails())


def test_a_download_before_its_tensor_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    break_for(monkeypatch, SimulatedStream, "wait_event", "the download")
    assert re.search("reads, on the download stream .* what the default stream .* may not have written", fails())


def test_parameters_that_are_written_while_an_upload_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the gradients have come down, so have all uploads for them been made. Not so those for a call without
    gradients, on a device of its own. (Masters themselves go up by a copy.)"""
    monkeypatch.setattr(ParameterStore, "wait_uploads", lambda *_: None)
    found = fails(WithTarget().double(), 8, staleness=1)
    assert re.search("overwrites, on the host, what the parameters' upload stream .* may still read", found)


def test_a_tensor_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    up = AcceleratorDevice.to_device

    def stay_if_on_a_device(self: AcceleratorDevice, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "meta" else up(self, tensor)

    monkeypatch.setattr(AcceleratorDevice, "to_device", stay_if_on_a_device)
    assert re.search("expected all tensors to be on the same device, but found at least two devices, meta", fails())
