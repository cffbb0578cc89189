"""What was there before training is not looked through in every garbage collection while it goes on."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import fit_pipeline
from models import MLP, Lit, batches_of, vectors

from lightning_roundpipe.garbage import SparedObjects
from lightning_roundpipe.pipeline.batch import Batch, Microbatch


@pytest.fixture
def nothing_spared() -> Iterator[None]:
    """By the tests themselves, which go on to spare what they have imported afterwards."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


class Counts(MLP):
    """How many objects are spared, in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.spared: list[int] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.spared.append(gc.get_freeze_count())


def trained(batches: int) -> Lit:
    torch.manual_seed(0)
    model = Counts().double()
    fit_pipeline(model, batches_of(vectors, batches, 4), 2, 2)
    return model


def test_objects_are_spared_during_a_training(nothing_spared: None) -> None:
    model = trained(13)
    assert model.spared[:10] == [0] * 10 and all(model.spared[11:])
    assert gc.get_freeze_count() == 0


def test_what_the_program_spares_stays_spared(nothing_spared: None) -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    spared = SparedObjects()
    assert gc.get_freeze_count() <= before
    spared.release()
    assert gc.get_freeze_count() > 0.9 * before


class Living(MLP):
    """Which batches and microbatches there are when each batch begins."""

    def __init__(self) -> None:
        super().__init__()
        self.living: list[int] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.trainer.strategy.settle()
        self.living.append(batches_that_live())


def batches_that_live() -> int:
    return sum(issubclass(type(each), (Batch, Microbatch)) for each in gc.get_objects())


@pytest.mark.parametrize("options", [{}, {"split": "model"}, {"staleness": 1}, {"schedule": "zb1p"}], ids=str)
def test_batches_are_freed_without_a_collection(options: dict[str, Any], nothing_spared: None) -> None:
    """They hold a microbatch's loss, in pinned memory, and generators' states."""
    torch.manual_seed(0)
    model = Living().double()
    gc.collect()
    before = batches_that_live()  # that other tests have left
    gc.disable()
    try:
        fit_pipeline(model, batches_of(vectors, 9, 4), 2, 2, **options)
    finally:
        gc.enable()
    assert len(set(model.living[2:])) == 1 and model.living[2] <= before + 4
