"""The optimizer steps in the background; nobody who looks can tell, except with the staleness that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from .common import (
    STALE,
    AtBatchEnd,
    LoggedLosses,
    LogsLoss,
    Net,
    SlowSGD,
    Way,
    X,
    adam,
    col,
    fit,
    half_square,
    in_every_way,
    in_few_ways,
    lin,
    near,
    sgd,
    weights,
)


class Validates(LogsLoss):
    """Keeps the losses that validation sees."""

    def __init__(self, *layers: torch.nn.Module, **options: Any) -> None:
        super().__init__(*layers, **options)
        self.seen: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(self, batch)
        self.log("val_loss", loss)
        self.seen.append(loss.item())


def validate_between_steps(way: Way) -> tuple[list[float], list[float], list[float]]:
    module, losses = Validates(lin(1), loss=half_square, optimizer=sgd(0.5)), LoggedLosses()
    batch = col(1, 1)
    trainer = fit(module, [batch] * 3, way, val=[batch], val_check_interval=1, logger=losses)
    assert trainer.callback_metrics["val_loss"].item() == near(module.seen[-1])
    return module.seen, losses.seen, weights(module)


@in_every_way
def test_validation_between_steps_sees_the_newest_weights(way: Way) -> None:
    """Metrics of weights one step old, or an error about inference tensors."""
    validation, training, final = validate_between_steps(way)
    assert validation == near([0.5, 0.125, 0.03125, 0.0078125])
    assert training == near([0.5, 0.125, 0.03125])
    assert final == near([0.125])


@pytest.mark.parametrize("way", STALE, ids=str)
def test_validation_waits_for_every_step_also_with_staleness(way: Way) -> None:
    """Validation of the weights the next batch would have used, while a step is still pending."""
    validation, training, final = validate_between_steps(way)
    assert training == near([0.5, 0.5, 0.125])
    assert validation == near([0.5, 0.125, 0.0, 0.03125])
    assert final == near([-0.25])


class TwoGroups(Net):
    def __init__(self) -> None:
        super().__init__(lin(0), lin(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net[0](batch).mean() + self.net[1](batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [
                {"params": self.net[0].parameters(), "lr": 1.0, "weight_decay": 0.0},
                {"params": self.net[1].parameters(), "lr": 0.1, "weight_decay": 0.5},
            ],
            lr=1.0,
        )


@in_every_way
def test_each_parameter_group_keeps_its_settings(way: Way) -> None:
    """One group's learning rate and weight decay used for all."""
    module, seen = TwoGroups(), AtBatchEnd(lambda module, _: weights(module))
    fit(module, [X, X], way, callbacks=[seen])
    assert seen.seen == [near([-3.0, 0.65]), near([-6.0, 0.3175])]
    unseen = TwoGroups()
    fit(unseen, [X, X], way)
    assert weights(unseen) == near([-6.0, 0.3175])


class LooksAtOptimizer(Callback):
    """Whether the trainer's optimizer is a torch one that holds the module's own parameters."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def look(self, trainer: Any, module: Any) -> None:
        (optimizer,) = trainer.optimizers
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = list(module.parameters())
        same = len(held) == len(own) and all(a is b for a, b in zip(held, own, strict=True))
        self.seen.append(isinstance(optimizer, torch.optim.Optimizer) and same)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, pl_module)


@in_every_way
def test_adam_steps_once_a_batch_on_the_modules_own_parameters(way: Way) -> None:
    """A step for every microbatch, or an optimizer over copies of the parameters."""
    module, looks = Net(lin(0), optimizer=adam(0.1)), LooksAtOptimizer()
    trainer = fit(module, [X] * 3, way, callbacks=[looks])
    assert weights(module) == near([-0.3])
    assert trainer.optimizers[0].state[module.net[0].weight]["step"] == 3
    assert looks.seen == [True] * 5
    unseen = Net(lin(0), optimizer=adam(0.1))
    trainer = fit(unseen, [X] * 3, way)
    assert weights(unseen) == near([-0.3])
    assert trainer.optimizers[0].state[unseen.net[0].weight]["step"] == 3


def run_steps(
    way: Way, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, watched: bool = False
) -> tuple[list[float], list[float]]:
    module = LogsLoss(lin(1), loss=half_square, optimizer=lambda parameters: optimizer(parameters, lr=0.5))
    losses, watch = LoggedLosses(), AtBatchEnd()
    fit(module, [col(1, 1)] * 3, way, logger=losses, callbacks=[watch] if watched else [])
    assert watch.seen == (near(losses.seen) if watched else [])
    return losses.seen, weights(module)


watched_or_not = pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])


@watched_or_not
@in_every_way
def test_steps_without_staleness_are_those_of_ordinary_training(way: Way, watched: bool) -> None:
    """Staleness that was not asked for, or the last step dropped."""
    losses, final = run_steps(way, watched=watched)
    assert losses == near([0.5, 0.125, 0.03125])
    assert final == near([0.125])


@watched_or_not
@pytest.mark.parametrize("way", STALE, ids=str)
def test_staleness_one_is_exactly_one_step_behind(way: Way, watched: bool) -> None:
    """Zero or one step behind, as it happens; or a step still pending when fit returns."""
    losses, final = run_steps(way, watched=watched)
    assert losses == near([0.5, 0.5, 0.125])
    assert final == near([-0.25])


REPEATED = [Way(2, 2, False), Way(2, 2, True), Way(2, 2, staleness=1)]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, SlowSGD])
@pytest.mark.parametrize("way", REPEATED, ids=str)
def test_twenty_runs_are_alike(way: Way, optimizer: type[torch.optim.Optimizer]) -> None:
    """Results that depend on how the threads happened to run, or a slow step overtaken by the next batch."""
    runs = {(tuple(losses), tuple(final)) for losses, final in (run_steps(way, optimizer) for _ in range(20))}
    assert len(runs) == 1
    ((losses, final),) = runs
    assert losses == near((0.5, 0.5, 0.125) if way.staleness else (0.5, 0.125, 0.03125))
    assert final == near((-0.25,) if way.staleness else (0.125,))


class TwoColumns(Net):
    """Each of two layers has a column of the batch to itself."""

    def __init__(self) -> None:
        super().__init__(lin(0), lin(0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net[0](batch[:, :1]).mean() + self.net[1](batch[:, 1:]).mean()


@in_every_way
def test_clipping_by_the_norm_of_all_gradients(way: Way) -> None:
    """Each layer or stage clipped by its own norm."""
    module = TwoColumns()
    fit(module, [torch.tensor([[1.0, 2.0], [5.0, 6.0]])], way, gradient_clip_val=1.0)
    assert weights(module) == near([-0.6, -0.8])


@in_every_way
def test_clipping_once_for_an_accumulated_step(way: Way) -> None:
    """The parts of an accumulated gradient clipped one by one."""
    module = TwoColumns()
    batches = [torch.tensor([[6.0, 0.0], [6.0, 0.0]]), torch.tensor([[0.0, 8.0], [0.0, 8.0]])]
    fit(module, batches, way, accumulate_grad_batches=2, gradient_clip_val=1.0)
    assert weights(module) == near([-0.6, -0.8])


@in_few_ways
def test_clipping_by_value(way: Way) -> None:
    """The clipping algorithm ignored."""
    module = TwoColumns()
    batch = torch.tensor([[1.0, 2.0], [5.0, 6.0]])
    fit(module, [batch], way, gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert weights(module) == near([-1.0, -1.0])
