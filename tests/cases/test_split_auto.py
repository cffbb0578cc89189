"""Losses and batches that cannot be cut per sample: the default arguments find the right way by themselves."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .common import PIPELINES, AtBatchEnd, Net, Way, X, col, fit, in_every_way, lin, near, sgd, weights

cut_pipelines = pytest.mark.parametrize("way", [way for way in PIPELINES if way.microbatches > 1], ids=str)


class SumLoss(Net):
    """Three layers under a loss that is a sum over samples; keeps the gradients."""

    def __init__(self) -> None:
        super().__init__(lin(2), lin(3), lin(5), loss=lambda module, batch: module.net(batch).sum(), optimizer=sgd(0.0))
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        self.seen = [parameter.grad.item() for parameter in self.parameters()]


@in_every_way
def test_a_sum_loss_is_found_to_be_one(way: Way) -> None:
    """A sum over samples treated as a mean: gradients a quarter of what they should be."""
    module, losses = SumLoss(), AtBatchEnd()
    fit(module, [X], way, callbacks=[losses])
    assert module.seen == near([180.0, 120.0, 72.0])
    assert losses.seen == near([360.0])


@cut_pipelines
def test_a_sum_loss_weighted_by_samples_draws_a_warning(way: Way) -> None:
    """Wrong gradients without a word, when the user fixed splitting and weights."""
    with pytest.warns(UserWarning, match="loss_weight=.sum."):
        fit(SumLoss(), [X], way, strategy={"split": "step", "loss_weight": "samples"})


def variance(module: Net, batch: Tensor) -> Tensor:
    return module.net(batch).var(unbiased=False)


def contrast(module: Net, batch: Tensor) -> Tensor:
    logits = module.net(batch) @ batch.T
    return cross_entropy(logits, torch.arange(len(batch)))


by_default_and_at_the_model_call = pytest.mark.parametrize(
    "strategy", [{}, {"split": "model"}], ids=["default", "model"]
)


@by_default_and_at_the_model_call
@in_every_way
def test_the_variance_over_a_batch(way: Way, strategy: dict) -> None:
    """Microbatches of equal rows have no variance, so no gradient at all."""
    module = Net(lin(1), loss=variance, optimizer=sgd(0.1))
    fit(module, [col(0, 0, 2, 2)], way, strategy=strategy)
    assert weights(module) == near([0.8])


@by_default_and_at_the_model_call
@in_every_way
def test_a_contrastive_loss_over_a_batch(way: Way, strategy: dict) -> None:
    """Each sample contrasted with its own microbatch only."""
    module = Net(lin(1), loss=contrast, optimizer=sgd(0.1))
    fit(module, [col(0, 1, 2, 3)], way, strategy=strategy)
    assert weights(module) == near([0.9243703])


@pytest.mark.parametrize("loss", [variance, contrast], ids=["variance", "contrast"])
@cut_pipelines
def test_a_loss_that_couples_samples_draws_a_warning_when_the_step_is_split(way: Way, loss) -> None:
    """Wrong gradients without a word, when the user fixed splitting to the step."""
    module = Net(lin(1), loss=loss, optimizer=sgd(0.1))
    with pytest.warns(UserWarning, match="couples"):
        fit(module, [col(0, 0, 2, 2) if loss is variance else col(0, 1, 2, 3)], way, strategy={"split": "step"})


@in_every_way
def test_tensors_of_different_length_run_whole(way: Way) -> None:
    """A ragged batch cut into its tensors: a mean of means."""
    module = Net(lin(0), loss=lambda module, batch: module.net(torch.cat(batch)).mean())
    fit(module, [[col(1), col(2, 2), col(3, 3, 3)]], way)
    assert weights(module) == near([-14 / 6])


@in_every_way
def test_a_mean_loss_draws_no_warning(way: Way) -> None:
    """A warning where nothing is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Net(lin(0)), [X], way)
    assert not [w for w in caught if "loss_weight" in str(w.message) or "couples" in str(w.message)]
