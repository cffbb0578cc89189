"""Does a step cost the same at the end as at the beginning? Prints what is aimed at and what was measured.

    python benchmarks/steady.py [--steps 100] [--width 1024] [--layers 4] [--devices 2]

Linear layers with ReLU, Adam, two virtual devices and two microbatches, against plain Lightning on one CPU device. Then
with an optimizer step that takes as long as a batch's computation, but hardly a core.
"""

import argparse
import gc
import logging
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy

FIRST = 3
"""Batches that are not counted: whatever happens for the first time is slow."""


class Layers(L.LightningModule):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowAdam(self.parameters(), lr=1e-3)


class SlowAdam(torch.optim.Adam):
    """Each step takes at least so many seconds."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        end = time.perf_counter() + self.seconds
        result = super().step(closure)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result


class Batches:
    """Notes when each batch is asked for, and how many threads there are then. (A hook of the module's that did would
    keep the optimizer from stepping in the background.)
    """

    def __init__(self, batch: Tensor, count: int) -> None:
        self.batch, self.count = batch, count
        self.times: list[float] = []
        self.threads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            if number >= FIRST:
                self.times.append(time.perf_counter())
                self.threads.append(threading.active_count())
            yield self.batch

    def seconds(self) -> list[float]:
        """From step to step."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def train(options: argparse.Namespace, strategy: Any, devices: int = 1) -> Batches:
    torch.manual_seed(0)
    gc.collect()
    batches = Batches(torch.randn(options.batch, options.width), options.steps + FIRST)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Layers(options.layers, options.width), batches)
    return batches


def measure(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Rows of what, target, measured."""

    def ours(staleness: int = 0) -> Batches:
        strategy = RoundPipeStrategy(microbatches=options.microbatches, staleness=staleness, split="step")
        return train(options, strategy, options.devices)

    SlowAdam.seconds = 0.0
    plain, steady = train(options, "auto").seconds(), ours()
    seconds, count = steady.seconds(), options.steps
    early = statistics.median(seconds[count // 10 : 3 * count // 10])
    late = statistics.median(seconds[4 * count // 5 :])
    tenth = min(10, count - 1)
    SlowAdam.seconds = statistics.median(seconds)
    behind, at_once = (statistics.median(ours(staleness).seconds()) for staleness in (1, 0))
    return [
        ("a step, plain Lightning", "", f"{1000 * statistics.median(plain):.1f} ms"),
        ("a step", "", f"{1000 * SlowAdam.seconds:.1f} ms"),
        ("the last fifth of the steps, by those from a tenth to three tenths", "at most 1.2", f"{late / early:.2f}"),
        ("all steps, by plain Lightning's", "at most 3", f"{sum(seconds) / sum(plain):.2f}"),
        ("new threads after ten steps", "0", str(max(steady.threads[tenth:]) - steady.threads[tenth])),
        ("a step with an optimizer step as long, staleness 1", "below 1.3", f"{behind / SlowAdam.seconds:.2f}"),
        ("a step with an optimizer step as long, staleness 0", "", f"{at_once / SlowAdam.seconds:.2f}"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 100, "width": 1024, "layers": 4, "devices": 2, "microbatches": 2, "batch": 64}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    title = f"{options.steps} steps of {options.layers} layers of width {options.width}, batches of {options.batch}"
    table = Table(title=title)
    for column in ("what", "target", "measured"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in measure(options):
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    main()
