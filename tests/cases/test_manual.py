"""Manual optimization, gradients taken inside the step, and optimizers that call the closure again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from .common import STALE, Net, Way, X, col, fit, in_every_way, lin, near, sgd, weights


class Manual(Net):
    """Steps after every second batch."""

    def __init__(self) -> None:
        super().__init__(lin(0))
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.net(batch).mean() / 2)
        if batch_idx % 2 == 1:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


@in_every_way
def test_manual_optimization_that_accumulates_by_itself(way: Way) -> None:
    """The step run once per microbatch, or gradients divided once more."""
    module = Manual()
    trainer = fit(module, [col(1, 3), col(5, 7), col(2, 2), col(4, 4)], way)
    assert weights(module) == near([-7.0])
    assert trainer.global_step == 2


def gradient_penalty(module: Net, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module.net(x).sum(), x, create_graph=True)
    return gradient.pow(2).mean()


@in_every_way
def test_a_gradient_taken_inside_the_step(way: Way) -> None:
    """The second derivative silently left out: the graph of the gradient cut at the layers."""
    module = Net(lin(3), loss=gradient_penalty, optimizer=sgd(0.1))
    try:
        fit(module, [X], way)
    except RuntimeError as error:
        assert not way.plain
        assert any(words in str(error).lower() for words in ("second derivative", "double backward", "create_graph"))
        assert weights(module) == [3.0]
    else:
        assert weights(module) == near([2.4])


def distance_to_one(module: Net, batch: Tensor) -> Tensor:
    return (module.net(batch) - 1).pow(2).mean()


class Quadratic(Net):
    """A parabola, and an optimizer that looks at several points of it in one step."""

    def __init__(self) -> None:
        super().__init__(lin(0), loss=distance_to_one)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=5)


@in_every_way
def test_an_optimizer_that_calls_the_closure_again(way: Way) -> None:
    """The closure run once, or with weights of before the step."""
    module = Quadratic()
    fit(module, [X, X], way)
    assert weights(module) == near([0.24])


@pytest.mark.parametrize("way", STALE, ids=str)
def test_an_optimizer_with_a_closure_is_refused_with_staleness(way: Way) -> None:
    """A closure evaluated with stale weights, without a word."""
    module = Quadratic()
    with pytest.raises(Exception, match="staleness"):
        fit(module, [X, X], way)
    assert weights(module) == [0.0]
