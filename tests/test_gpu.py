"""On a real GPU: `pytest -m gpu`. What is compared with is plain Lightning on that GPU.

Without one, this file is only collected: nothing here has been run yet.
"""

import gc
import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import Batches, assert_close, assert_equal, differs, result, split, weights
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy, Timeline
from lightning_roundpipe.devices import AcceleratorDevice
from lightning_roundpipe.devices.accelerator import STREAMS, arrived, moved, pinned_copy
from lightning_roundpipe.devices.hardware import TorchHardware
from lightning_roundpipe.devices.pinned import Pinning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator"),
]
MIB = 2**20


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(L.LightningModule):
    def __init__(self, depth: int = 6, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


def data(samples: int, width: int = 64, count: int = 4) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randn(samples, width), "y": torch.randint(8, (samples,))} for _ in range(count)]


def fit(module: L.LightningModule, batches: list[Any], strategy: Any, **options: Any) -> L.Trainer:
    settings = {"accelerator": "gpu", "devices": 1, "max_epochs": 1} | options
    trainer = L.Trainer(
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    L.seed_everything(0, verbose=False)
    trainer.fit(module, Batches(batches))
    return trainer


def pipeline(microbatches: int = 2, **options: Any) -> RoundPipeStrategy:
    return RoundPipeStrategy(microbatches=microbatches, split="step", **options)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_equals_plain_lightning_on_the_gpu(precision: str) -> None:
    """The optimizer's step is the host's, so the last bits of its results may be others."""
    batches = data(12)
    plain = Net()
    parts = [part for batch in batches for part in split(batch, 2)]
    fit(plain, parts, "auto", precision=precision, accumulate_grad_batches=2)
    ours = Net()
    trainer = fit(ours, batches, pipeline(), precision=precision)
    assert trainer.global_step == len(batches)
    assert all(parameter.device.type == "cpu" for parameter in ours.parameters())
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    assert_close(weights(ours), {name: value.cpu() for name, value in weights(plain).items()}, tolerance)


@pytest.mark.parametrize("staleness", [0, 1])
def test_runs_of_one_program_are_the_same(staleness: int) -> None:
    """To the last bit, and other than before training."""
    results = [result(fit(Net(), data(12), pipeline(3, staleness=staleness))) for _ in range(2)]
    assert_equal(*results)
    assert differs(results[0]["weights"], weights(Net()))


def test_tf32_is_left_as_it_is() -> None:
    before = torch.get_float32_matmul_precision()
    fit(Net(), data(4), pipeline())
    assert torch.get_float32_matmul_precision() == before


def peak_of(depth: int, width: int = 1024, samples: int = 16) -> int:
    gc.collect()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    fit(Net(depth, width), data(samples, width, count=3), pipeline())
    return torch.accelerator.max_memory_allocated()


def test_memory_does_not_grow_with_depth() -> None:
    """Two stages' parameters and a stage's gradients: not the model."""
    block = sum(p.nbytes for p in Block(1024).parameters())
    shallow, deep = peak_of(12), peak_of(48)
    assert deep < 12 * block, "48 blocks would take four times that"
    assert deep - shallow < 4 * block  # stages are cut by measured time, and need not have as many blocks


def test_stages_keep_to_device_memory() -> None:
    """Workspaces of libraries, a few MiB for each stream, come on top."""
    block = sum(p.nbytes for p in Block(1024).parameters())
    for limit in (8 * block, 14 * block):
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        fit(Net(24, 1024), data(16, 1024, count=4), pipeline(device_memory=limit))
        assert torch.accelerator.max_memory_allocated() - before < limit + 64 * MIB
    with pytest.raises(ValueError, match="does not fit into the memory that stages may take of a device"):
        fit(Net(4, 1024), data(16, 1024), pipeline(device_memory=block))


def test_nothing_stays() -> None:
    """But for what libraries keep for each stream, from the first time on."""
    fit(Net(), data(12), pipeline())
    gc.collect()
    before = torch.accelerator.memory_allocated()
    for _ in range(3):
        fit(Net(), data(12), pipeline())
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_waits_for_uploads_and_memory_are_measured() -> None:
    report = fit(Net(), data(12), pipeline()).strategy.report()
    for row in report.devices:
        assert row.upload_wait_seconds is not None and 0 <= row.upload_wait_seconds < report.training_seconds
        assert row.peak_memory is not None and row.peak_memory > 0


def test_out_of_memory_and_again() -> None:
    """The same process goes on with smaller microbatches."""
    gc.collect()
    torch.accelerator.empty_cache()  # what other tests have left counts, too
    width, samples = 1024, 4096
    _, total = torch.accelerator.get_memory_info()
    # A fifth of what activations of the whole batch in one block take: norm, up, gelu, down and their gradients.
    limit = samples * width * 4 * 12 // 5 + 512 * MIB
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            fit(Net(4, width), data(64 * samples, width, count=2), pipeline(1))
        notes = "\n".join(raised.value.__notes__)
        assert "device cuda:0; phase" in notes and "What helps, the best first: (1)" in notes
        del raised
        gc.collect()
        torch.accelerator.empty_cache()
        assert fit(Net(4, width), data(samples, width, count=2), pipeline(8)).global_step == 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_uploads_overlap_computation(tmp_path: Any) -> None:
    """By the profiler's times of kernels and of copies to the device."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        fit(Net(24, 2048), data(4096, 2048, count=3), pipeline())
    events = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
    copies = [(start, end) for name, start, end in events if "HtoD" in name and end - start > 100]
    kernels = [(start, end) for name, start, end in events if "Memcpy" not in name and "Memset" not in name]
    beside = sum(any(start < end_k and start_k < end for start_k, end_k in kernels) for start, end in copies)
    assert copies and beside > len(copies) / 2


# --- what the devices are made of


@pytest.fixture
def hardware() -> TorchHardware:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return TorchHardware(torch.device(accelerator.type, 0))


def slow(device: torch.device) -> Tensor:
    """A number, 1, that is there only after a while."""
    x = torch.eye(4096, device=device)
    for _ in range(20):
        x = x @ x
    return x[0, 0]


def test_streams_are_entered_and_left(hardware: TorchHardware) -> None:
    own, side, other = hardware.current_stream, hardware.stream(), hardware.stream()
    with hardware.on(side):
        assert hardware.current_stream == side
        with hardware.on(own), hardware.on(side), hardware.on(other):
            assert hardware.current_stream == other
        assert hardware.current_stream == side
    assert hardware.current_stream == own and len({own, side, other}) == 3


def test_a_thread_begins_with_the_pools_device(hardware: TorchHardware) -> None:
    with hardware.in_thread():
        assert torch.accelerator.current_device_index() == hardware.torch_device.index


@pytest.mark.parametrize("shape", [(7, 5), (1500, 1001)])
def test_host_memory(shape: tuple[int, ...], hardware: TorchHardware) -> None:
    like = torch.randn(shape).t()
    memory = hardware.host_memory(like, torch.float32)
    assert memory.is_pinned() and memory.stride() == like.stride() and memory.shape == like.shape
    memory.copy_(like)
    there = memory.to(hardware.torch_device, non_blocking=True)
    back = hardware.host_memory(like, torch.float32).copy_(there, non_blocking=True)
    hardware.current_stream.record_event().synchronize()
    assert torch.equal(back, like)


def test_copies_keep_values_and_strides(hardware: TorchHardware) -> None:
    whole = torch.randn(6, 8)
    for tensor in (whole, whole.t(), whole[:, ::2], whole[:1].expand(6, 8), whole[2:2], whole.to_sparse()):
        there = moved(tensor, hardware.torch_device, Pinning(), staged=True)
        back = moved(there, torch.device("cpu"), Pinning())
        hardware.current_stream.record_event().synchronize()
        assert torch.equal(back.to_dense(), tensor.to_dense())
        if tensor.layout == torch.strided and tensor.numel():
            assert there.stride() == back.stride() == tensor.stride()
    pinned = pinned_copy(whole)
    assert pinned.is_pinned() and pinned_copy(pinned).data_ptr() != pinned.data_ptr()


def test_what_comes_down_is_waited_for(hardware: TorchHardware) -> None:
    device = AcceleratorDevice(hardware, {})
    with device.running():
        down = device.bring_down(slow(hardware.torch_device))
    assert down.is_pinned() and arrived(down).item() == 1.0
    gradient = slow(hardware.torch_device).expand(3, 2)
    memory = device.host_memory(torch.empty(2, 3).t(), torch.float32)
    device.bring_gradient_down(gradient, memory).synchronize()
    assert memory.tolist() == [[1.0, 1.0]] * 3


def test_stopwatch(hardware: TorchHardware) -> None:
    """Its time is the device's, and the host reads it without waiting."""
    slow(hardware.torch_device)
    times = []
    for waits in (False, True):
        stopwatch = hardware.stopwatch(hardware.current_stream)
        if waits:
            stopwatch.leave_out(lambda: slow(hardware.torch_device).square_())
        else:
            slow(hardware.torch_device)
        stopwatch.stop()
        assert stopwatch.seconds() is None
        hardware.current_stream.record_event().synchronize()
        times.append(stopwatch.seconds())
    assert times[1] < times[0] / 10


class HostMustNotWait(L.Callback):
    """From the third batch on, torch raises where the host would wait within an operation."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index >= 2:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.strategy._pipeline.wait_backward()
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_host_waits_for_events_alone(precision: str) -> None:
    try:
        fit(Net(), data(12), pipeline(), precision=precision, callbacks=[HostMustNotWait()])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_timeline(tmp_path: Path) -> None:
    """Work of all streams, within the time that the fit took, and parameters up before what computes with them."""
    start = time.perf_counter()
    fit(Net(), data(8), RoundPipeStrategy(2, split="step", timeline=Timeline(tmp_path / "t.json", range(4))))
    taken = 1e6 * (time.perf_counter() - start)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event.get("cat") == "stream"]
    own = STREAMS[:4]  # there are no others
    assert {tracks[span["tid"]] for span in spans} == {f"stream: {name}" for name in own}
    assert all(0 <= span["ts"] <= span["ts"] + span["dur"] <= taken for span in spans)
    assert sum(span["dur"] for span in spans) > 0
