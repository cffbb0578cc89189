"""Every schedule, executed by the runtime with layers that sleep, against its simulation.

    python benchmarks/schedules.py [--devices 8] [--layers 16] [--microbatches 16] [--milliseconds 20]

The layers' forward and backward take a given time without holding the interpreter or a core, so many virtual devices
run on few cores. What is left of the difference is what the runtime itself costs. Prints a table and writes JSON.
"""

import argparse
import time
from functools import partial
from typing import Any

import torch
from common import Row, show
from sleeping import Sleepers

from lightning_roundpipe.devices import CpuDevice
from lightning_roundpipe.pipeline.runtime import Pipeline
from lightning_roundpipe.schedules import NAMES, Schedule, Scheduler
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.simulate import simulate

TARGET = 0.05


class Given(Scheduler):
    """Plans by the times that are known, not by those that are measured."""

    can_be_planned = False

    def partition(self, forward_costs: Any, backward_costs: Any, **more: Any) -> Any:
        calls = len(forward_costs)
        return super().partition([1.0] * calls, [3.0] * calls, **more)

    def schedule(self, partition: Any, microbatches: int, **more: Any) -> Schedule:
        self._next_device = 0  # each batch by itself
        return super().schedule(partition, microbatches, **more)


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Busy share of the devices in one batch: measured (the median of some) and simulated."""
    m, seconds = options.microbatches, options.milliseconds / 1000
    model = Sleepers([seconds] * options.layers)
    scheduler = Given(name, options.devices)  # type: ignore[arg-type]
    pipeline = Pipeline(model, [CpuDevice(i, 1) for i in range(options.devices)], scheduler=scheduler)
    steps = [partial(model.training_step, torch.ones(1, 1)) for _ in range(m)]
    pipeline.start_batch(steps[:2], [0.5] * 2, lambda: 1.0)  # runs serially, to show what the layers are like
    pipeline.start_batch(steps, [1 / m] * m, lambda: 1.0)
    pipeline.wait_backward()
    shares, seconds_taken = [], []
    for _ in range(options.batches):
        before = sum(use.busy_seconds for use in pipeline.measured.use)
        start = time.perf_counter()
        pipeline.start_batch(steps, [1 / m] * m, lambda: 1.0)
        pipeline.wait_backward()
        seconds_taken.append(time.perf_counter() - start)
        busy = sum(use.busy_seconds for use in pipeline.measured.use) - before
        shares.append(busy / (seconds_taken[-1] * options.devices))
    assert pipeline.plan is not None
    partition = pipeline.plan.partition
    pipeline.close()
    costs = Costs(
        forward=(seconds,) * options.layers,
        backward=(2 * seconds,) * options.layers,
        weight_gradient=(seconds,) * options.layers,
    )
    simulation = simulate(Given(name, options.devices).schedule(partition, m), partition, costs)  # type: ignore[arg-type]
    return {
        "schedule": name,
        "measured_busy": sorted(shares)[len(shares) // 2],
        "simulated_busy": float(1 - simulation.bubble),
        "measured_seconds": sorted(seconds_taken)[len(shares) // 2],
        "simulated_seconds": float(simulation.makespan),
    }


def measure(devices: int = 8, layers: int = 16, microbatches: int = 16, milliseconds: float = 20) -> list[Row]:
    torch.set_num_threads(1)
    options = argparse.Namespace(
        devices=devices, layers=layers, microbatches=microbatches, milliseconds=milliseconds, batches=1
    )
    found = [run(name, options) for name in NAMES]
    return [
        Row(
            f"busy share by the simulated one, {each['schedule']}",
            100 * abs(each["measured_busy"] - each["simulated_busy"]),
            "points",
            target=100 * TARGET,
            at_most=True,
            peer=f"{100 * each['measured_busy']:.1f} % by {100 * each['simulated_busy']:.1f} %",
        )
        for each in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20, help="forward of a layer; backward: twice that")
    options = vars(parser.parse_args())
    title = f"{options['devices']} devices, {options['layers']} layers, {options['microbatches']} microbatches"
    show(title, measure(**options), "schedules.json")


if __name__ == "__main__":
    main()
