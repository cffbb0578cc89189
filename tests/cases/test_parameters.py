"""Weights that are shared, and weights that the user's own code changes between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from .common import STALE, AtBatchEnd, Net, Way, col, fit, in_every_way, lin, near, sgd, weights


class SharedWeight(Net):
    """The first and the last layer hold one weight."""

    def __init__(self) -> None:
        first, last = lin(3), lin(9)
        last.weight = first.weight
        super().__init__(first, nn.Identity(), last, optimizer=sgd(0.1))


class WatchedSharedWeight(SharedWeight):
    """Notes whether the layers still hold one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[bool] = []

    def look(self) -> None:
        self.shared.append(self.net[0].weight is self.net[2].weight)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.look()
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.look()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look()


@in_every_way
def test_two_layers_that_share_a_weight(way: Way) -> None:
    """One of the two uses missing from the gradient, or the weight torn in two by the step."""
    watched = WatchedSharedWeight()
    fit(watched, [col(1, 1)], way)
    assert weights(watched) == near([2.4])
    assert all(watched.shared)

    module = SharedWeight()
    trainer = fit(module, [col(1, 1)], way)
    assert weights(module) == near([2.4])
    assert module.net[0].weight is module.net[2].weight
    state = module.state_dict()
    assert set(state) == {"net.0.weight", "net.2.weight"}
    assert state["net.0.weight"].item() == state["net.2.weight"].item() == near(2.4)
    assert [len(group["params"]) for group in trainer.optimizers[0].param_groups] == [1]


class Clamps(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.5, 0.5)


class ClampsData(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[0].weight.data.clamp_(-0.5, 0.5)


@pytest.mark.parametrize("clamps", [Clamps, ClampsData])
@in_every_way
def test_weights_clamped_after_each_step(way: Way, clamps: type[Net]) -> None:
    """The change lost, since the pipeline computes with a copy made before it; or made under a step still running."""
    module, losses = clamps(lin(0)), AtBatchEnd()
    fit(module, [col(1, 1)] * 3, way, callbacks=[losses])
    assert losses.seen == near([0.0, -0.5, -0.5])
    assert weights(module) == near([-0.5])


class Assigns(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net[0].weight.data = torch.full((1, 1), 7.0)


@in_every_way
def test_a_weight_given_new_data_between_steps(way: Way) -> None:
    """The pipeline goes on with the weight's former storage."""
    module, losses = Assigns(lin(0)), AtBatchEnd()
    fit(module, [col(1, 1)] * 3, way, callbacks=[losses])
    assert losses.seen == near([0.0, 7.0, 6.0])
    assert weights(module) == near([5.0])


@pytest.mark.parametrize("way", STALE, ids=str)
def test_a_change_with_staleness_is_applied_after_the_pending_step(way: Way) -> None:
    """The user's change made under the step that is still running, and overwritten by it."""
    module = Clamps(lin(0))
    fit(module, [col(1, 1)] * 3, way)
    assert weights(module) == near([-0.5])
