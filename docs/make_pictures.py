"""Makes what the docs show: the timelines, and what the commands print. Run by `make pictures`."""

import os
import shutil
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.sleeping import Sleepers
from lightning_roundpipe import RoundPipeStrategy, Timeline
from lightning_roundpipe.cli import main
from lightning_roundpipe.schedules import Partition, dualpipe, gpipe, interleaved, one_f_one_b, roundpipe, zb1p
from lightning_roundpipe.schedules.costs import Costs
from lightning_roundpipe.schedules.draw import draw
from lightning_roundpipe.schedules.partition import bound
from lightning_roundpipe.schedules.simulate import Simulation, batches_of, simulate

PICTURES = Path(__file__).parent / "pictures"
LARGE = "--batch examples.model_configs:tokens --host-memory 1024"


def cut(forward: list[int], backward: list[int]) -> Partition:
    """Stages with these numbers of layers, the first backward one fused."""
    starts = [sum(forward[:i]) for i in range(len(forward))]
    stops = [sum(backward) - sum(backward[:i]) for i in range(len(backward))]
    return Partition(
        tuple(range(start, start + size) for start, size in zip(starts, forward, strict=True)),
        tuple(range(stop - size, stop) for stop, size in zip(stops, backward, strict=True)),
        fused=True,
    )


def shares(simulation: Simulation) -> str:
    return f"{100 * float(simulation.bubble):.1f} % bubble"


def two_batches() -> None:
    """RoundPipe in small, as docs/how_it_works.md explains it."""
    costs = Costs([1] * 7, [2] * 7)
    split = cut([3, 3], [1] * 7)
    found = simulate(batches_of(split, 3, 2, 3), split, costs, staleness=1)
    draw({"two devices, three microbatches, nine stages": found}, PICTURES / "two_batches.png", until=84)


def rivals() -> None:
    """The schedules that bind stages, on eight layers without recompute, so that each is as in its paper."""
    costs = Costs([1] * 8, [2] * 8, [0] * 8, weight_gradient=[1] * 8)
    shown = {}
    for title, schedule, stages in (
        ("GPipe", gpipe(4, 8), 4),
        ("1F1B", one_f_one_b(4, 8), 4),
        ("interleaved 1F1B, two stages a device", interleaved(4, 8), 8),
        ("ZB1P", zb1p(4, 8), 4),
        ("DualPipe, nothing overlapped", dualpipe(4, 8), 4),
    ):
        found = simulate(schedule, bound(costs.forward, costs.backward, stages), costs)
        shown[f"{title}: {shares(found)}, at most {max(found.peak_live)} microbatches live"] = found
    draw(shown, PICTURES / "rivals.png")


def steady() -> None:
    """RoundPipe with staleness 0 and 1, and the same equal stages with an unequal one among them."""
    costs = Costs([1] * 12, [2] * 12)
    split = cut([3, 3, 3], [1] * 12)
    shown = {}
    for staleness in (0, 1):
        found = simulate(batches_of(split, 5, 4, 12), split, costs, staleness=staleness)
        shown[f"staleness {staleness}: {100 * float(found.steady_bubble):.1f} % bubble in steady state"] = found
    draw(shown, PICTURES / "staleness.png", until=220)


def splits() -> None:
    """One batch alone: what the split of 32 layers does."""
    costs = Costs([1] * 32, [2] * 32)
    shown = {}
    for title, split in (
        ("11 + 32 stages of nearly the same time", cut([1] + [3] * 10, [1] * 32)),
        ("one layer per stage", cut([1] * 31, [1] * 32)),
    ):
        found = simulate(roundpipe(split, 9, 8), split, costs)
        shown[f"{title}: {shares(found)}"] = found
    draw(shown, PICTURES / "splits.png")


def lanes() -> None:
    """One batch alone, on lanes."""
    costs = Costs([1] * 12, [2] * 12)
    split = cut([2, 3, 3, 3], [1] * 12)
    shown = {}
    for number in (1, 2, 4):
        found = simulate(roundpipe(split, 8, 4, lanes=number), split, costs)
        shown[f"{number} lane{'s' * (number > 1)}: {shares(found)}, {len(found.uploads)} uploads"] = found
    draw(shown, PICTURES / "lanes.png")


class Slow(torch.optim.SGD):
    """Takes some milliseconds for each layer."""

    def _init_group(self, *args: Any) -> Any:
        time.sleep(0.008)
        return super()._init_group(*args)  # type: ignore[misc]


class Model(Sleepers):
    """Layers that sleep, so that four devices need no four cores."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Slow(self.parameters(), lr=1e-3)


def timeline() -> None:
    """Batches that were really trained: the picture that RoundPipeStrategy(timeline=...) makes."""
    with TemporaryDirectory() as folder:
        chosen = Timeline(Path(folder) / "timeline.json", batches=range(6, 9))
        trainer = L.Trainer(
            strategy=RoundPipeStrategy(split="step", timeline=chosen),
            accelerator="cpu",
            devices=4,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Model([0.03] * 8), DataLoader(torch.ones(60, 1), batch_size=5))
        shutil.copy(chosen.picture, PICTURES)


def commands() -> None:
    """What the commands print."""
    os.environ["COLUMNS"] = "80"
    for name, command in {
        "simulate": "simulate --layers 32 --devices 8 --microbatches 16",
        "plan_llama_8b": f"plan --model examples.model_configs:llama_8b {LARGE}",
        "plan_qwen3_32b": f"plan --model examples.model_configs:qwen3_32b {LARGE}",
        "plan_qwen3_235b": f"plan --model examples.model_configs:qwen3_235b --samples 2 {LARGE}",
    }.items():
        picture = PICTURES / f"{name}.png"
        with (PICTURES / f"{name}.txt").open("w") as file, redirect_stdout(file):
            print(f"$ python -m lightning_roundpipe {command} --picture {picture.name}\n")
            status = main([*command.split(), "--picture", str(picture)])
        if status:
            raise SystemExit(status)
        text = (PICTURES / f"{name}.txt").read_text()
        lines = [line.rstrip() for line in text.replace(str(picture), picture.name).splitlines()]
        (PICTURES / f"{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for make in (two_batches, rivals, steady, splits, lanes, timeline, commands):
        make()
