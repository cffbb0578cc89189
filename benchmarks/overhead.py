"""What the pipeline itself costs: one virtual device against a loop written by hand, with the same microbatches.

    python benchmarks/overhead.py [--rounds 3] [--steps 6]

The loop adds up the gradients of the microbatches and steps. Both have one thread for their computation; ours goes
through Lightning's own loop. They are compared with everything recomputed (the loop's blocks under
``torch.utils.checkpoint``, which stops a block's recompute with the last tensor that the backward needs, or does not),
with nothing recomputed, and each as it is by default.
"""

import argparse
import statistics
import time
from functools import partial

import torch
from common import GPT, Batches, Row, all_recomputed, quiet, show, some_tokens, train
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_roundpipe import RoundPipeStrategy

MODELS = (
    (12, 512, 256, 0.97),
    (8, 256, 128, 0.90),
)
"""Layers, width, tokens and the share of the loop's speed that is aimed at."""


def by_hand(module: GPT, batch: torch.Tensor, microbatches: int, steps: int, early_stop: bool = True) -> float:
    """Seconds per batch."""
    with set_checkpoint_early_stop(early_stop):
        return _by_hand(module, batch, microbatches, steps)


def _by_hand(module: GPT, batch: torch.Tensor, microbatches: int, steps: int) -> float:
    optimizer = module.configure_optimizers()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        for part in batch.tensor_split(microbatches):
            loss = module.training_step(part) * (len(part) / len(batch))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def ours(module: GPT, batch: torch.Tensor, microbatches: int, steps: int, recompute: bool = False) -> float:
    """Seconds per batch."""
    schedule = all_recomputed(microbatches, 1) if recompute else "roundpipe"
    batches = Batches(batch, steps)
    train(module, batches, RoundPipeStrategy(microbatches, split="step", schedule=schedule))
    return statistics.median(batches.seconds())


def measure(rounds: int = 3, steps: int = 6, microbatches: int = 2, samples: int = 4) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for layers, width, tokens, target in MODELS:
        batch = some_tokens(samples, tokens)
        hand = partial(by_hand, batch=batch, microbatches=microbatches, steps=steps)
        own = partial(ours, batch=batch, microbatches=microbatches, steps=steps)
        checkpointed, plain = (GPT(layers, width, tokens, checkpoint=checkpoint) for checkpoint in (True, False))
        contestants = {
            "recomputed": partial(own, plain, recompute=True),
            "kept": partial(own, plain),
            "loop": partial(hand, checkpointed),
            "loop, whole blocks": partial(hand, checkpointed, early_stop=False),
            "loop, kept": partial(hand, plain),
        }
        laps = [{name: run() for name, run in contestants.items()} for _ in range(rounds)]
        for what, first, second, bar in (
            ("whole blocks recomputed", "recomputed", "loop, whole blocks", target),
            ("nothing recomputed", "kept", "loop, kept", target),
            ("recomputed; the loop stops early", "recomputed", "loop", target),
            ("by default; the loop recomputes", "kept", "loop", None),
        ):
            ratio = statistics.median(lap[second] / lap[first] for lap in laps)
            speeds = [samples * tokens / statistics.median(lap[name] for lap in laps) for name in (first, second)]
            rows.append(
                Row(
                    f"speed by a hand-written loop's, {layers} blocks of width {width}, {tokens} tokens: {what}",
                    ratio,
                    target=bar,
                    peer="{:.0f} tokens/s; the loop {:.0f}".format(*speeds),
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    quiet()
    show("Overhead on one virtual device", measure(options.rounds, options.steps), "overhead.json")


if __name__ == "__main__":
    main()
