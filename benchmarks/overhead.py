"""What the pipeline itself costs: one virtual device against a loop written by hand, with the same microbatches.

    python benchmarks/overhead.py [--rounds 5] [--steps 8]

The loop runs each block under ``torch.utils.checkpoint``, adds up the gradients of the microbatches and steps. Both
have one thread for their computation; ours goes through Lightning's own loop.
"""

import argparse
import statistics
import time

import torch
from common import GPT, Batches, Row, paired_ratio, quiet, show, some_tokens, train

from lightning_roundpipe import RoundPipeStrategy

MODELS = (
    (12, 512, 256, 0.97),
    (8, 256, 128, 0.90),
)
"""Layers, width, tokens and the share of the loop's speed that is aimed at."""


def by_hand(module: GPT, batch: torch.Tensor, microbatches: int, steps: int) -> float:
    """Seconds per batch."""
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


def ours(module: GPT, batch: torch.Tensor, microbatches: int, steps: int) -> float:
    batches = Batches(batch, steps)
    train(module, batches, RoundPipeStrategy(microbatches=microbatches, split="step"))
    return statistics.median(batches.seconds())


def measure(rounds: int = 5, steps: int = 8, microbatches: int = 2, samples: int = 4) -> list[Row]:
    torch.set_num_threads(1)
    rows = []
    for layers, width, tokens, target in MODELS:
        batch = some_tokens(samples, tokens)
        hand = GPT(layers, width, tokens, checkpoint=True)
        pipeline = GPT(layers, width, tokens)
        ratio, loop, own = paired_ratio(
            lambda hand=hand, batch=batch: by_hand(hand, batch, microbatches, steps),
            lambda pipeline=pipeline, batch=batch: ours(pipeline, batch, microbatches, steps),
            rounds,
        )
        speed = samples * tokens / own
        rows.append(
            Row(
                f"speed by a hand-written loop's, {layers} blocks of width {width}, {tokens} tokens",
                ratio,
                target=target,
                peer=f"{speed:.0f} tokens/s; the loop {samples * tokens / loop:.0f}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    quiet()
    show("Overhead on one virtual device", measure(options.rounds, options.steps), "overhead.json")


if __name__ == "__main__":
    main()
