"""The optimizer step in the background: how fast it is, and how much of it is hidden behind the computation.

    python benchmarks/optimizer.py [--rounds 9] [--layers 12] [--width 1024]

Speed is that of the worker by itself against ``torch.optim.AdamW(fused=True)`` by itself, on the same parameters and
with one thread. Hidden is measured through Lightning with layers that sleep, so that the step has a core of its own:
what a batch takes longer with the step than without, by the time of the step.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from common import Batches, Row, in_turns, paired_ratio, quiet, show, train
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.pipeline.replica import Layer
from lightning_roundpipe.pipeline.turnstile import Cancelled, Monitor
from lightning_roundpipe.state.gradients import Gradients
from lightning_roundpipe.state.optimizer import OptimizerWorker, StepJob
from lightning_roundpipe.state.parameters import ParameterStore


class Sleeps(torch.autograd.Function):
    """Takes its time, and has a gradient ready."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, ctx.gradient, None, None


class Sleeping(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * width, width))
        self.gradient = [torch.randn(4 * width, width)]  # in a list, so it is no state that would have to be watched
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x, self.weight, self.gradient[0], self.seconds)


class Model(L.LightningModule):
    def __init__(self, layers: int, width: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeping(width) for _ in range(layers))
        self._optimizer = optimizer

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters())


class Nothing(torch.optim.SGD):
    """No step."""

    def step(self, closure: Any = None) -> None:
        return None


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def alone(model: nn.Module, steps: int) -> float:
    """Seconds of a step of torch's own."""
    optimizer = fused(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def worker(model: nn.Module, steps: int, half: torch.dtype | None = None) -> float:
    """Seconds of a step of the worker, from the last gradient to the last parameter that is ready to be used."""
    monitor = Monitor()
    layers = [Layer(i, str(i), layer) for i, layer in enumerate(model.children())]
    store = ParameterStore(model, layers, monitor, staleness=0)
    if half is not None:
        store.travel_in_half({parameter: half for parameter in model.parameters()})
    sums = Gradients(store, monitor)
    stepper = OptimizerWorker(store, sums, monitor, store.units, threads=1)
    optimizer = fused(model.parameters())
    gradients = [(parameter, torch.randn_like(parameter)) for parameter in model.parameters()]
    seconds = []
    for _ in range(steps + 1):
        batch = sums.begin_batch(1, rounds=half is not None)
        for parameter, gradient in gradients:
            batch.add(0, parameter, gradient)
        for unit in store.units:
            batch.finish(0, unit)
        start = time.perf_counter()
        stepper.submit(StepJob(optimizer, batch, None, None))
        stepper.wait_idle()
        seconds.append(time.perf_counter() - start)
    monitor.fail(Cancelled())
    stepper.close()
    return statistics.median(seconds[1:])


def batch_seconds(layers: int, width: int, optimizer: Any, compute: float, steps: int) -> float:
    """Of a batch in one microbatch on one device, with layers that sleep so long in all."""
    model = Model(layers, width, optimizer)
    for block in model.blocks:
        block.seconds = compute / (4 * layers)  # forward, recompute, and twice that for the backward
    batches = Batches(torch.randn(1, 8), steps)
    train(model, batches, RoundPipeStrategy(microbatches=1, staleness=1, split="whole"))
    return statistics.median(batches.seconds())


def measure(rounds: int = 9, layers: int = 12, width: int = 1024, steps: int = 10) -> list[Row]:
    torch.set_num_threads(1)
    linear = nn.Sequential(*(nn.Linear(width, 4 * width) for _ in range(layers)))
    rows = []
    for name, half, target in (("fp32", None, 0.9), ("bf16-mixed", torch.bfloat16, None)):
        ratio, peer, own = paired_ratio(
            lambda: alone(linear, steps),
            lambda half=half: worker(linear, steps, half),
            rounds,
        )
        rows.append(
            Row(
                f"speed of the background step by fused AdamW alone, {name}",
                ratio,
                target=target,
                peer=f"{1000 * own:.1f} ms; alone {1000 * peer:.1f} ms",
            )
        )
    step = worker(linear, steps)
    batches = in_turns(
        lambda: batch_seconds(layers, width, fused, 1.5 * step, steps),
        lambda: batch_seconds(layers, width, lambda p: Nothing(p, lr=0.0), 1.5 * step, steps),
        rounds,
    )
    between = statistics.median(with_step - without for with_step, without in batches)
    rows.append(
        Row(
            "hidden share of a step, where the computation takes 1.5 times as long",
            1 - between / step,
            target=0.95,
            peer=f"a step {1000 * step:.1f} ms; a batch {1000 * between:+.1f} ms with it",
        )
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    quiet()
    show("The optimizer step", measure(options.rounds, options.layers, options.width), "optimizer.json")


if __name__ == "__main__":
    main()
