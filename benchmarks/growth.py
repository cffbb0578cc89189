"""What a layer call costs the host, and whether that grows with the model or the batch.

    python benchmarks/growth.py [--rounds 3]

Layers that do next to nothing, through Lightning's own loop. Counted is the whole process's processor time, so that
neighbours on the machine matter little: a batch's, by the layer calls in it (forward and backward); and that of the
first batch, in which the pipeline is built. Then the time from `fit` to the first batch with 1,000 layers, and of the
search for stages with 200.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import lightning as L
import torch
from common import Batches, Row, alternate, quiet, show, train
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.planner import plan

SHAPES = ((8, 2), (32, 2), (128, 2), (512, 2), (32, 8), (32, 33))
"""Numbers of layers and microbatches."""
GROWTH = 1.3
"""The cost of a call in the largest of them, by that in the smallest."""
SETTLING = 3
"""Batches that are not counted, besides the first ones: a search for better stages takes time, too."""


class HasBegun(Exception):
    """Ends training with the moment of the first step."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(L.LightningModule):
    """Layers, as many modules beside them as are asked for, and parameters that none of them uses."""

    def __init__(self, layers: int, unused: int = 0, beside: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.beside = nn.ModuleList(nn.Identity() for _ in range(beside))
        self.unused = nn.ParameterList(torch.ones(1) for _ in range(unused))
        self.ends_at_once = False

    def training_step(self, x: Tensor, index: int = 0) -> Tensor:
        if self.ends_at_once and "forward" in vars(self.layers[0]):  # the first step in the pipeline
            raise HasBegun(time.perf_counter())
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def per_call(layers: int, microbatches: int, unused: int = 0, beside: int = 0, batches: int = 5) -> float:
    """Microseconds of processor time, over so many batches, and more of small ones."""
    batches = max(batches, min(20, 2000 // (2 * layers * microbatches)))
    given = Batches(torch.ones(microbatches, 1), SETTLING + batches + 1, time.process_time)
    train(Model(layers, unused, beside), given, RoundPipeStrategy(microbatches, split="step"), 2)
    used = [after - before for before, after in pairwise(given.notes[SETTLING:])]
    return 1e6 * statistics.median(used) / (2 * layers * microbatches)


class TwoBatches:
    """Notes the processor time at which each is asked for."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(2):
            self.seconds.append(time.process_time())
            yield self.batch


def per_call_of_the_first(layers: int, microbatches: int) -> float:
    """Microseconds of processor time from the first batch to the second one."""
    batches = TwoBatches(torch.ones(microbatches, 1))
    train(Model(layers), batches, RoundPipeStrategy(microbatches, split="step"), 2)
    first, second = batches.seconds
    return 1e6 * (second - first) / (2 * layers * microbatches)


def set_up(layers: int) -> float:
    """Seconds from `fit` to the first step."""
    model = Model(layers)
    model.ends_at_once = True
    start = time.perf_counter()
    try:
        train(model, Batches(torch.ones(3, 1), 0), RoundPipeStrategy(3, split="step"), 2)
    except HasBegun as error:
        (began,) = error.args
        return began - start
    raise RuntimeError("Training has ended before it began.")


def search(layers: int) -> float:
    """The most seconds of processor time that a search of stages and lanes takes: of a few kinds of training."""
    costs = Costs(
        [1 + 0.01 * (layer % 7) for layer in range(layers - 1)] + [6.0],
        [2.0] * (layers - 1) + [12.0],
        upload=[3.0] * layers,
        download=[3.0] * layers,
        optimizer=[1.0] * layers,
        hop=0.1,
    )
    seconds = []
    for devices, microbatches, staleness in ((4, 5, 0), (4, 16, 1), (8, 9, 1), (8, 32, 0), (8, 32, 1)):
        start = time.thread_time()
        plan(costs, microbatches, devices, staleness=staleness, lanes=None)
        seconds.append(time.thread_time() - start)
    return max(seconds)


def measure(
    rounds: int = 3,
    batches: int = 5,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    layers: int = 1000,
    searched: int = 200,
) -> list[Row]:
    torch.set_num_threads(1)
    fewest, few, most = min(shapes), shapes[1], max(shapes)
    unused, beside = (*few, 1000), (*most, 0, most[0])
    contestants: dict[Hashable, Callable[[], float]] = {
        shape: partial(per_call, *shape, batches=batches) for shape in (*shapes, unused, beside)
    }
    contestants |= {("first", *shape): partial(per_call_of_the_first, *shape) for shape in (few, most)}
    cost = alternate(contestants, rounds)
    rows = [Row(f"a layer call, {shape[0]} layers, {shape[1]} microbatches", cost[shape], "us") for shape in shapes]
    rows += [Row(f"a layer call of the first batch, {n} layers", cost["first", n, m], "us") for n, m in (few, most)]
    for what, small, large in (
        (f"with {most[0] // fewest[0]} times the layers", fewest, most),
        (f"with {shapes[-1][1] / few[1]:g} times the microbatches", few, shapes[-1]),
        ("with 1,000 unused parameters more", few, unused),
        (f"with as many modules beside {most[0]} layers", most, beside),
        (f"of the first batch with {most[0] // few[0]} times the layers", ("first", *few), ("first", *most)),
    ):
        ratio = cost[large] / cost[small]
        rows.append(Row(f"a layer call {what}, by one without", ratio, "", GROWTH, at_most=True))
    seconds = statistics.median(set_up(layers) for _ in range(rounds))
    rows.append(Row(f"from fit to the first step, {layers:,} layers", seconds, "s", 2.0, at_most=True))
    seconds = statistics.median(search(searched) for _ in range(rounds))
    rows.append(Row(f"the longest search of stages and lanes, {searched} layers", seconds, "s", 1.0, at_most=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    quiet()
    show("Cost growth", measure(options.rounds), "growth.json")


if __name__ == "__main__":
    main()
