"""Host memory: bytes per parameter while training in bf16-mixed with AdamW, and whether anything grows.

    python benchmarks/memory.py [--layers 24] [--width 1024] [--batches 500]

The resident set of a process that trains, less that of the same process with a model of hardly any parameters: the
interpreter, the libraries and the activations are not the parameters'. The memory of virtual devices is host memory,
too: what they add up, one stage's gradients each in full precision, is allowed for.
"""

import argparse
import gc
import json
import subprocess
import sys
from typing import Any

import lightning as L
import psutil
import torch
from common import Batches, Row, quiet, show, train
from torch import Tensor, nn

from lightning_roundpipe import RoundPipeStrategy

DEVICES = 2


class Feed(L.LightningModule):
    """Blocks of two linear layers; the batch is small, so the parameters are what takes memory."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def run(layers: int, width: int, batches: int) -> dict[str, Any]:
    """Trains, in this process. Returns what was resident at each batch, and how many objects there were at the end of
    the first fifth of the batches and of all."""
    quiet()
    torch.set_num_threads(1)
    module = Feed(layers, width)
    strategy = RoundPipeStrategy(split="step")
    objects, stages = [], [0]

    def note() -> int:
        plans = strategy._pipeline.plans() if strategy._pipeline is not None else []
        stages.extend(len(stage) for plan in plans for stage in plan.partition.backward)
        if len(source.notes) in (batches // 5, batches - 1):
            strategy.settle()  # what other threads make meanwhile is not to be counted, nor disturbed
            gc.collect()
            objects.append(len(gc.get_objects()))
        return psutil.Process().memory_info().rss

    source = Batches(torch.randn(8, width), batches, note)
    train(module, source, strategy, devices=DEVICES, precision="bf16-mixed")
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "layer": sum(parameter.numel() for parameter in module.blocks[0].parameters()),
        "resident": source.notes,
        "objects": objects,
        "stage": max(stages),
    }


def in_a_process(layers: int, width: int, batches: int) -> dict[str, Any]:
    arguments = [sys.executable, __file__, "--child", f"--layers={layers}", f"--width={width}", f"--batches={batches}"]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def measure(layers: int = 24, width: int = 1024, batches: int = 500) -> list[Row]:
    model, little = in_a_process(layers, width, 12), in_a_process(layers, 16, 12)
    taken = max(model["resident"]) - max(little["resident"])
    per_parameter = taken / (model["parameters"] - little["parameters"])
    summed = DEVICES * 4 * model["stage"] * model["layer"] / model["parameters"]
    bar = 16 * (1 + model["layer"] / model["parameters"]) + summed
    long = in_a_process(8, 64, batches)
    bytes_ = long["resident"]
    return [
        Row(
            f"host bytes per parameter, bf16-mixed, AdamW, {model['parameters'] / 1e6:.0f} million parameters",
            per_parameter,
            "bytes",
            target=round(bar, 2),
            at_most=True,
            peer=f"16, one layer's worth, and {summed:.1f} for the sums on {DEVICES} virtual devices; plain: 16",
        ),
        Row(
            f"growth of the resident set from batch {batches // 5} to {batches}",
            (bytes_[-1] - bytes_[batches // 5]) / 2**20,
            "MiB",
            target=1.0,
            at_most=True,
        ),
        Row(
            f"growth in Python objects from batch {batches // 5} to {batches}",
            long["objects"][1] - long["objects"][0],
            target=20,
            at_most=True,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.layers, options.width, options.batches)))
        return
    show("Host memory", measure(options.layers, options.width, options.batches), "memory.json")


if __name__ == "__main__":
    main()
