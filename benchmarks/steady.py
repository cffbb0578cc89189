"""Does a step cost the same at the end as at the beginning, and do step and computation go on side by side?

    python benchmarks/steady.py [--steps 100] [--width 1024] [--layers 4] [--devices 2] [--rounds 5]

Linear layers with ReLU, Adam, two virtual devices and two microbatches, against plain Lightning on one CPU device. Then
with metrics logged at each step, and with an optimizer step that takes as long as a batch's computation, but hardly a
core.
"""

import argparse
import gc
import statistics
import threading
import time
from typing import Any

import lightning as L
import torch
from common import Batches, Row, paired_ratio, quiet, show, train
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_roundpipe import PipelineMonitor, RoundPipeStrategy


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


class Timed(PipelineMonitor):
    """Takes the time that it itself takes in each step."""

    def __init__(self) -> None:
        super().__init__(metrics=False)
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        start = time.perf_counter()
        super().on_train_batch_end(*args)
        self.seconds.append(time.perf_counter() - start)


def measure(
    steps: int = 100,
    width: int = 1024,
    layers: int = 4,
    devices: int = 2,
    microbatches: int = 2,
    batch: int = 64,
    rounds: int = 5,
) -> list[Row]:
    torch.set_num_threads(1)

    def run(strategy: Any, devices: int, **options: Any) -> Batches:
        torch.manual_seed(0)
        gc.collect()
        batches = Batches(torch.randn(batch, width), steps, threading.active_count)
        train(Layers(layers, width), batches, strategy, devices, **options)
        return batches

    def ours(staleness: int = 0, **options: Any) -> Batches:
        strategy = RoundPipeStrategy(microbatches=microbatches, staleness=staleness, split="step")
        return run(strategy, devices, **options)

    def monitored(metrics: bool) -> float:
        options = {"logger": DummyLogger(), "log_every_n_steps": 1} if metrics else {}
        return statistics.median(ours(callbacks=[PipelineMonitor(metrics)], **options).seconds())

    SlowAdam.seconds = 0.0
    plain, steady = run("auto", 1).seconds(), ours()
    seconds = steady.seconds()
    early = statistics.median(seconds[steps // 10 : 3 * steps // 10])
    late = statistics.median(seconds[4 * steps // 5 :])
    tenth = min(10, steps - 1)
    ratio, logged, silent = paired_ratio(lambda: monitored(True), lambda: monitored(False), rounds)
    ours(callbacks=[timed := Timed()])
    SlowAdam.seconds = statistics.median(seconds)
    behind, at_once = (statistics.median(ours(staleness).seconds()) for staleness in (1, 0))
    by = f"a step {1000 * SlowAdam.seconds:.1f} ms"
    return [
        Row(
            "the last fifth of the steps, by those from a tenth to three tenths",
            late / early,
            target=1.2,
            at_most=True,
            peer=f"{1000 * late:.1f} ms by {1000 * early:.1f} ms",
        ),
        Row(
            "all steps, by plain Lightning's",
            sum(seconds) / sum(plain),
            target=3,
            at_most=True,
            peer=f"plain Lightning {1000 * statistics.median(plain):.1f} ms a step",
        ),
        Row(
            "metrics logged at each step, by none",
            ratio,
            target=1.05,
            at_most=True,
            peer=f"{1000 * logged:.1f} ms by {1000 * silent:.1f} ms",
        ),
        Row(
            "the monitor without metrics, share of a step",
            sum(timed.seconds) / sum(seconds),
            target=0.01,
            at_most=True,
            peer=f"{1e6 * statistics.median(timed.seconds):.0f} us in most steps",
        ),
        Row("new threads after ten steps", max(steady.notes[tenth:]) - steady.notes[tenth], target=0, at_most=True),
        Row(
            "a batch with a step as long as its computation, staleness 1",
            behind / SlowAdam.seconds,
            target=1.3,
            at_most=True,
            peer=by,
        ),
        Row("a batch with a step as long as its computation, staleness 0", at_once / SlowAdam.seconds, peer=by),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 100, "width": 1024, "layers": 4, "devices": 2, "microbatches": 2, "batch": 64, "rounds": 5}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    quiet()
    title = f"{options['steps']} steps of {options['layers']} layers of width {options['width']}"
    show(title, measure(**options), "steady.json")


if __name__ == "__main__":
    main()
