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
from lightning_roundpipe.devices.accelerator import STREAMS

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


def test_nothing_stays() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    fit(Net(), data(12), pipeline())
    gc.collect()
    assert torch.accelerator.memory_allocated() == before


def test_out_of_memory_and_again() -> None:
    """The same process goes on with smaller microbatches."""
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


def test_timeline(tmp_path: Path) -> None:
    """Work of all streams, within the time that the fit took, and parameters up before what computes with them."""
    start = time.perf_counter()
    fit(Net(), data(8), RoundPipeStrategy(2, split="step", timeline=Timeline(tmp_path / "t.json", range(4))))
    taken = 1e6 * (time.perf_counter() - start)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event.get("cat") == "stream"]
    assert {tracks[span["tid"]] for span in spans} == {f"stream: {name}" for name in STREAMS}
    assert all(0 <= span["ts"] <= span["ts"] + span["dur"] <= taken for span in spans)
    assert sum(span["dur"] for span in spans) > 0
