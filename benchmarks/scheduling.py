"""How busy the devices are, with layers that sleep, through Lightning's own loop.

    python benchmarks/scheduling.py [--batches 20] [--only 4]

All layers take the same time but the last, which takes as long as four. Stages can then be equally long, about 20 ms:
the last layer, four others backward, or twelve forward. What a device is not busy with is what the schedule leaves
idle (shown by the simulation of the plan in use), and what the runtime costs. "Nominal" counts only the time that the
layers ask for, without recompute; "busy" is what the devices were occupied with, as the pipeline counts it.

The ceiling for one process is as many threads that have nothing to do with one another: each runs a copy of the layers,
all but the last under ``torch.utils.checkpoint``, without pipeline, optimizer or Lightning.
"""

import argparse
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from common import Batches, Row, quiet, show, train
from sleeping import Sleepers
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.pipeline.plan import Plan
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.simulate import batches_of, simulate

STAGE = 0.02
"""Seconds of a stage."""
BLOCK = STAGE / 12
"""Of a layer's forward: with the recompute, four layers' backward then takes as long as a stage."""
BLOCKS = {2: 24, 4: 24, 8: 36, 16: 60}
"""Number of layers before the last, by devices: as many backward stages as devices, at least."""
BEHIND = {2: 0.97, 4: 0.96, 8: 0.95, 16: 0.93}
"""What is aimed at with staleness 1, by devices."""
LANES = {4: 0.95, 8: 0.95}
"""With staleness 0, as many lanes as devices, and four microbatches for each."""
SETTLING = 12
"""Batches after which the plan rests upon measured times."""


@dataclass
class Result:
    """Shares of the devices' time: measured, of what the layers ask for, and by simulation of the plan."""

    busy: float
    nominal: float
    simulated: float
    stages: int
    changes: int
    """How often the plan changed while it was measured."""


def simulated(plan: Plan, seconds: Sequence[float], microbatches: int, devices: int, staleness: int) -> float:
    """The busy share in the steady state."""
    costs = Costs(seconds, [2 * forward for forward in seconds])
    schedules = batches_of(plan.partition, microbatches, devices, 8 + 4 * devices, plan.lanes)
    return float(1 - simulate(schedules, plan.partition, costs, staleness=staleness).steady_bubble)


def layer_seconds(devices: int) -> list[float]:
    return [BLOCK] * BLOCKS[devices] + [4 * BLOCK]


def bare(devices: int, rounds: int) -> float:
    """The nominal share of threads without a pipeline."""
    seconds = layer_seconds(devices)

    def work(module: Sleepers, rounds: int) -> None:
        for _ in range(rounds):
            x = torch.ones(1)
            for layer in module.layers[:-1]:
                x = checkpoint(layer, x, use_reentrant=False)
            module.layers[-1](x).mean().backward()

    def together(rounds: int) -> float:
        threads = [threading.Thread(target=work, args=(Sleepers(seconds), rounds)) for _ in range(devices)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    together(1)
    return 3 * sum(seconds) * rounds / together(rounds)


def run(devices: int, microbatches: int, batches: int, **options: Any) -> Result:
    seconds = layer_seconds(devices)
    strategy = RoundPipeStrategy(microbatches, split="step", **options)

    def note() -> tuple[float, Plan | None]:
        pipeline = strategy._pipeline
        assert pipeline is not None
        return sum(use.busy_seconds for use in pipeline.measured.use), pipeline.plan

    given = Batches(torch.ones(microbatches, 1), SETTLING + batches + 1, note)
    train(Sleepers(seconds), given, strategy, devices)
    times, notes = given.times[SETTLING:], given.notes[SETTLING:]
    (before, _), (after, plan) = notes[0], notes[-1]
    available = devices * (times[-1] - times[0])
    assert plan is not None
    return Result(
        (after - before) / available,
        3 * sum(seconds) * microbatches * (len(notes) - 1) / available,
        simulated(plan, seconds, microbatches, devices, strategy.staleness),
        plan.partition.stage_count(),
        sum(a is not b for (_, a), (_, b) in pairwise(notes)),
    )


def row(what: str, result: Result, target: float) -> Row:
    peer = f"simulated {result.simulated:.3f}, nominal {result.nominal:.3f}; {result.stages} stages"
    if result.changes:
        peer += f"; the plan changed {result.changes} times"
    return Row(what, result.busy, target=target, peer=peer)


def measure(batches: int = 20, only: Sequence[int] = tuple(BEHIND)) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for n in only:
        result = run(n, n + 1, batches, staleness=1)
        rows.append(row(f"busy, {n} devices, {n + 1} microbatches, staleness 1", result, BEHIND[n]))
        ceiling = bare(n, batches)
        peer = f"nominal {result.nominal:.3f} by {ceiling:.3f} of {n} bare threads"
        rows.append(Row(f"of the ceiling, {n} devices, staleness 1", result.nominal / ceiling, peer=peer))
    for n in only:
        result = run(n, n + 1, batches, staleness=0)
        target = result.simulated - 0.02
        rows.append(row(f"busy, {n} devices, {n + 1} microbatches, staleness 0", result, target))
    for n in filter(LANES.__contains__, only):
        result = run(n, 4 * n, batches, staleness=0, lanes=n)
        rows.append(row(f"busy, {n} devices, {n} lanes, {4 * n} microbatches, staleness 0", result, LANES[n]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--only", type=int, nargs="*", default=list(BEHIND), help="numbers of devices")
    options = parser.parse_args()
    quiet()
    show("Sleeping layers", measure(options.batches, options.only), "scheduling.json")


if __name__ == "__main__":
    main()
