"""Nothing is made anew, and nothing piles up, from step to step. (How long a step takes: benchmarks/steady.py.)"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from .common import Way, adam

STEPS, EARLY = 24, 10


class Watching:
    """Between batches, when all that goes on has come to rest, notes what there is."""

    def __init__(self, batch: Tensor) -> None:
        self.batch = batch
        self.trainer: Any = None
        self.tensors: list[int] = []
        self.bytes: list[int] = []
        self.threads: list[int] = []
        self.replicas: list[int] = []
        self.gradients_made: list[int] = []

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(STEPS):
            if step >= EARLY:
                self.note()
            yield self.batch

    def note(self) -> None:
        strategy = self.trainer.strategy
        strategy.settle()
        pipeline = strategy._pipeline
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        self.tensors.append(len(tensors))
        memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.bytes.append(sum(memory.values()))
        self.threads.append(threading.active_count())
        self.replicas.append(sum(len(layer._free) for layer in pipeline.layers))
        self.gradients_made.append(pipeline.gradients.memory.made)


@pytest.fixture
def known() -> None:
    """What there is before the training does not count, and takes no time to look through."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("way", [Way(2, 2), Way(3, 1), Way(2, 2, False), Way(2, 2, staleness=1)], ids=str)
def test_a_late_step_makes_nothing_that_an_early_one_did_not(way: Way, known: None) -> None:
    """Re-wrapping, new buffers or threads on every step; records that stay."""

    class Layers(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.net(batch).square().mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return adam(0.001)(self.parameters())

    torch.manual_seed(0)
    watching = Watching(torch.randn(12, 16))
    trainer = watching.trainer = way.trainer(max_epochs=1)
    trainer.fit(Layers(), watching)
    assert len(watching.tensors) == STEPS - EARLY
    for counts in (watching.tensors, watching.bytes, watching.threads):
        assert set(counts) == {counts[0]}, counts
    assert max(watching.replicas) <= 2 * way.microbatches * 4  # as many as calls can run at once
    if way.background_step:  # with staleness 1, some are added up beside those that the step before is still to read
        (made,) = set(watching.gradients_made)
        assert made == 8 or (way.staleness and 8 < made <= 16)
