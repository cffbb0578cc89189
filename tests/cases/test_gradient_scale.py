"""Gradients and losses of a batch do not depend on how it is cut."""

from __future__ import annotations

import pytest
import torch

from .common import (
    AtBatchEnd,
    Net,
    Way,
    X,
    col,
    fit,
    in_every_pipeline,
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
    """Three layers that keep their gradients."""

    def __init__(self, loss) -> None:
        super().__init__(lin(2), lin(3), lin(5), loss=loss, optimizer=sgd(0.0))
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        self.seen = [parameter.grad.item() for parameter in self.parameters()]


def mean_loss(module: Net, batch: torch.Tensor) -> torch.Tensor:
    return module.net(batch).mean()


def sum_loss(module: Net, batch: torch.Tensor) -> torch.Tensor:
    return module.net(batch).sum()


@in_every_way
def test_gradients_at_any_depth_of_a_mean_loss(way: Way) -> None:
    """A factor of the number of microbatches, growing towards the first layer."""
    module, losses = Gradients(mean_loss), AtBatchEnd()
    fit(module, [X], way, callbacks=[losses])
    assert module.seen == near([45.0, 30.0, 18.0])
    assert losses.seen == near([90.0])


@pytest.mark.parametrize("split", ["step", "whole"])
@in_every_pipeline
def test_gradients_at_any_depth_of_a_sum_loss_named_as_one(way: Way, split: str) -> None:
    """A loss that is a sum over samples treated as a mean although the user said what it is."""
    module, losses = Gradients(sum_loss), AtBatchEnd()
    fit(module, [X], way, callbacks=[losses], strategy={"split": split, "loss_weight": "sum"})
    assert module.seen == near([180.0, 120.0, 72.0])
    assert losses.seen == near([360.0])
