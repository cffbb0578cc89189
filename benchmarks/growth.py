"""What a layer call costs the host, and whether that grows with the model or the batch.

    python benchmarks/growth.py [--rounds 3]

Layers that do next to nothing, through Lightning's own loop. Counted is the whole process's processor time, so that
neighbours on the machine matter little: a batch's, by the layer calls in it (forward and backward). Then the time from
`fit` to the first batch with 1,000 layers.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import lightning as L
import torch
from common import Batches, Row, alternate, quiet, show, train
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy

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
    """Layers, and parameters that none of them uses."""

    def __init__(self, layers: int, unused: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
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


def per_call(layers: int, microbatches: int, unused: int = 0, batches: int = 5) -> float:
    """Microseconds of processor time, over so many batches, and more of small ones."""
    batches = max(batches, min(20, 2000 // (2 * layers * microbatches)))
    given = Batches(torch.ones(microbatches, 1), SETTLING + batches + 1, time.process_time)
    train(Model(layers, unused), given, RoundPipeStrategy(microbatches, split="step"), 2)
    used = [after - before for before, after in pairwise(given.notes[SETTLING:])]
    return 1e6 * statistics.median(used) / (2 * layers * microbatches)


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


def measure(
    rounds: int = 3, batches: int = 5, shapes: Sequence[tuple[int, int]] = SHAPES, layers: int = 1000
) -> list[Row]:
    torch.set_num_threads(1)
    unused = (*shapes[1], 1000)
    contestants = {shape: partial(per_call, *shape, batches=batches) for shape in (*shapes, unused)}
    cost = alternate(contestants, rounds)
    rows = [Row(f"a layer call, {shape[0]} layers, {shape[1]} microbatches", cost[shape], "us") for shape in shapes]
    fewest, most = min(shapes), max(shapes)
    for what, small, large in (
        (f"{most[0] // fewest[0]} times the layers", fewest, most),
        (f"{shapes[-1][1] / shapes[1][1]:g} times the microbatches", shapes[1], shapes[-1]),
        ("1,000 unused parameters more", shapes[1], unused),
    ):
        rows.append(
            Row(f"a layer call with {what}, by one without", cost[large] / cost[small], "", GROWTH, at_most=True)
        )
    seconds = statistics.median(set_up(layers) for _ in range(rounds))
    rows.append(Row(f"from fit to the first step, {layers:,} layers", seconds, "s", 2.0, at_most=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    quiet()
    show("Cost growth", measure(options.rounds), "growth.json")


if __name__ == "__main__":
    main()
