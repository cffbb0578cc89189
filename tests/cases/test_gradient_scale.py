"""Gradients and losses of a batch do not depend on how it is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from .common import (
    PIPELINES,
    AtBatchEnd,
    Net,
    Way,
    X,
    col,
    fit,
    in_every_default_way,
    in_every_way,
    lin,
    near,
    sgd,
    weights,
)


@in_every_way
def test_accumulating_over_batches_while_each_is_split(way: Way) -> None:
    """Divided twice or not at all, or only the last batch counted, when both batches and microbatches accumulate."""
    module = Net(lin(0))
    trainer = fit(module, [col(1, 3), col(5, 7), col(9, 11)], way, accumulate_grad_batches=3)
    assert weights(module) == near([-6.0])
    assert trainer.global_step == 1


@in_every_way
def test_a_short_last_window_of_accumulation(way: Way) -> None:
    """The last window of one batch divided by the wrong count, or never stepped."""
    module = Net(lin(0))
    trainer = fit(module, [col(1), col(2), col(3), col(4), col(5)], way, accumulate_grad_batches=2)
    assert weights(module) == near([-7.5])
    assert trainer.global_step == 3


class Gradients(Net):
    """Three layers that keep their gradients, of every batch."""

    def __init__(self, loss) -> None:
        super().__init__(lin(2), lin(3), lin(5), loss=loss, optimizer=sgd(0.0))
        self.seen: list[list[float]] = []

    def on_after_backward(self) -> None:
        self.seen.append([parameter.grad.item() for parameter in self.parameters()])


def mean_loss(module: Net, batch: torch.Tensor) -> torch.Tensor:
    return module.net(batch).mean()


def sum_loss(module: Net, batch: torch.Tensor) -> torch.Tensor:
    return module.net(batch).sum()


def assert_seen(module: Gradients, losses: AtBatchEnd, gradients: list[float], loss: float) -> None:
    """The same in every batch: in the first one, which runs serially, and in later ones."""
    assert module.seen == [near(gradients)] * 3
    assert losses.seen == near([loss] * 3)


@in_every_way
def test_gradients_at_any_depth_of_a_mean_loss(way: Way) -> None:
    """A factor of the number of microbatches, growing towards the first layer."""
    module, losses = Gradients(mean_loss), AtBatchEnd()
    fit(module, [X] * 3, way, callbacks=[losses])
    assert_seen(module, losses, [45.0, 30.0, 18.0], 90.0)


@in_every_default_way
def test_gradients_at_any_depth_of_a_sum_loss(way: Way) -> None:
    """A loss that is a sum over samples treated as a mean."""
    module, losses = Gradients(sum_loss), AtBatchEnd()
    fit(module, [X] * 3, way, callbacks=[losses])
    assert_seen(module, losses, [180.0, 120.0, 72.0], 360.0)


@pytest.mark.parametrize("split", ["step", "whole"])
@pytest.mark.parametrize("way", PIPELINES, ids=str)
def test_gradients_at_any_depth_of_a_sum_loss_named_as_one(way: Way, split: str) -> None:
    """The same although the user said what it is."""
    module, losses = Gradients(sum_loss), AtBatchEnd()
    fit(module, [X] * 3, way, callbacks=[losses], strategy={"split": split, "loss_weight": "sum"})
    assert_seen(module, losses, [180.0, 120.0, 72.0], 360.0)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("loss", "gradients", "value"), [(mean_loss, [45.0, 30.0, 18.0], 90.0), (sum_loss, [180.0, 120.0, 72.0], 360.0)]
)
def test_gradients_with_each_layer_a_stage_of_its_own(
    loss: Callable[[Net, torch.Tensor], torch.Tensor], gradients: list[float], value: float, m: int
) -> None:
    """The same where three devices have one layer each."""
    module, losses = Gradients(loss), AtBatchEnd()
    trainer = fit(module, [X] * 3, Way(m, 3), callbacks=[losses], strategy={"schedule": "gpipe"})
    assert_seen(module, losses, gradients, value)
    stages = [(row.forward_stage, row.backward_stage) for row in trainer.strategy.report().layers]
    assert len({forward for forward, _ in stages}) == len({backward for _, backward in stages}) == 3
