"""What is logged, returned and seen by hooks and callbacks is that of the batch, once."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader

from .common import (
    AtBatchEnd,
    Net,
    Way,
    X,
    adam,
    col,
    fit,
    in_every_default_way,
    in_every_way,
    in_few_ways,
    lin,
    loader,
    near,
    sgd,
    weights,
)


class Logs(Net):
    """Logs the loss of each batch, which may be a tensor or a dict; counts its steps and the hooks that run."""

    def __init__(self) -> None:
        super().__init__(lin(1), optimizer=sgd(0.0))
        self.steps = self.starts = self.ends = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.net(batch["x"] if isinstance(batch, dict) else batch).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Points(DummyLogger):
    """Keeps every value of the loss that is sent to a logger, with its step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, float]] = []
        self.epochs: list[float] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss_step" in metrics:
            self.steps.append((step, metrics["loss_step"]))
        if "loss_epoch" in metrics:
            self.epochs.append(metrics["loss_epoch"])


class Counts(Callback):
    """How often the batch hooks ran, and what the progress bar would have shown."""

    def __init__(self) -> None:
        self.starts = 0
        self.ends = 0
        self.bar: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts += 1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.ends += 1
        self.bar.append(float(trainer.progress_bar_metrics["loss_step"]))


TENSORS = [col(1, 3), col(5, 7), col(9)]
DICTS = [{"tag": "text", "x": batch} for batch in TENSORS]


@pytest.mark.parametrize(("accumulate", "global_step"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("batches", [TENSORS, DICTS], ids=["tensors", "dicts"])
@pytest.mark.parametrize("split", ["step", "model", "auto"])
@in_every_default_way
def test_logged_values_are_those_of_the_batch(
    way: Way, split: str, batches: list, accumulate: int, global_step: int
) -> None:
    """Logged once per microbatch, halved, or averaged over batches without their sizes."""
    module, points, counts = Logs(), Points(), Counts()
    trainer = fit(
        module,
        batches,
        way,
        strategy={"split": split},
        logger=points,
        callbacks=[counts],
        accumulate_grad_batches=accumulate,
    )
    assert trainer.global_step == global_step
    assert counts.bar == near([2.0, 6.0, 9.0])
    assert (counts.starts, counts.ends) == (module.starts, module.ends) == (3, 3)
    splits_step = not way.plain and split != "model"
    assert module.steps == (2 * min(way.microbatches, 2) + 1 if splits_step else 3)
    assert trainer.callback_metrics["loss_epoch"].item() == near(5.0)
    assert points.epochs == near([5.0])
    if accumulate == 1:
        assert [value for _, value in points.steps] == near([2.0, 6.0, 9.0])
        assert [step for step, _ in points.steps] == [0, 1, 2]
    else:
        assert [value for _, value in points.steps] == near([6.0, 9.0])


class SeesGradients(Net):
    """Keeps the gradient that each hook finds, and what a hook on the weight itself adds up to."""

    def __init__(self) -> None:
        super().__init__(lin(0))
        self.after_backward: list[float] = []
        self.before_step: list[float] = []
        self.by_tensor_hook: list[float] = []
        self.sums: list[float] = []
        self.net[0].weight.register_hook(lambda gradient: self.by_tensor_hook.append(gradient.item()))

    def gradient(self) -> float:
        gradient = self.net[0].weight.grad
        assert type(gradient) is Tensor
        assert (gradient.device.type, gradient.dtype, gradient.shape) == ("cpu", torch.float32, (1, 1))
        return gradient.item()

    def on_after_backward(self) -> None:
        self.after_backward.append(self.gradient())
        self.sums.append(sum(self.by_tensor_hook))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before_step.append(self.gradient())


@in_every_way
def test_hooks_see_the_whole_batchs_gradient(way: Way) -> None:
    """Hooks find no gradient, that of one microbatch, or one that was clipped already."""
    module = SeesGradients()
    fit(module, [X, col(4, 4)], way, gradient_clip_val=1.0)
    assert module.after_backward == near([3.0, 4.0])
    assert module.before_step == near([3.0, 4.0])
    assert module.sums == near([3.0, 7.0])
    assert sum(module.by_tensor_hook) == near(7.0)
    assert weights(module) == near([-2.0])


class WatchesGradients(Callback):
    """A monitor that is no part of the module."""

    def __init__(self) -> None:
        self.after_backward: list[float] = []
        self.before_step: list[float] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.after_backward.append(pl_module.net[0].weight.grad.item())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.before_step.append(pl_module.net[0].weight.grad.item())


@in_every_way
def test_callbacks_see_the_whole_batchs_gradient(way: Way) -> None:
    """Gradients filled in for the module's own hooks only."""
    module, watches = Net(lin(0)), WatchesGradients()
    fit(module, [X, col(4, 4)], way, gradient_clip_val=1.0, callbacks=[watches])
    assert watches.after_backward == near([3.0, 4.0])
    assert watches.before_step == near([3.0, 4.0])
    assert weights(module) == near([-2.0])


@in_every_way
def test_a_tensor_hook_alone_sees_each_gradient_once(way: Way) -> None:
    """The hook left out, or called again for the recompute, where no hook of the module looks at gradients."""
    seen: list[float] = []
    module = Net(lin(0))
    module.net[0].weight.register_hook(lambda gradient: seen.append(gradient.item()))
    fit(module, [X, col(4, 4)], way, gradient_clip_val=1.0)
    assert sum(seen) == near(7.0)
    assert weights(module) == near([-2.0])


class Validates(Net):
    """Keeps what validation computes for a batch of ones."""

    def __init__(self) -> None:
        super().__init__(lin(0))
        self.seen: list[float] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(self.net(batch).mean().item())


@in_every_way
def test_averaged_weights_follow_each_step(way: Way) -> None:
    """The average fed with weights one step old."""
    module, averaging = Validates(), WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    fit(module, [col(1, 1)] * 3, way, val=[col(1, 1)], val_check_interval=1, callbacks=[averaging])
    assert module.seen == near([0.0, -1.0, -1.5, -2.25])
    assert weights(module) == near([-2.25])


@in_few_ways
def test_stochastic_weight_averaging(way: Way) -> None:
    """Weights of an earlier step averaged at the end of an epoch."""
    module = Net(lin(0))
    averaging = StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=2, annealing_epochs=1)
    fit(module, [col(1, 1)] * 2, way, max_epochs=4, callbacks=[averaging])
    assert weights(module) == near([-4.0])


class Copies(Net):
    """Copies its layers after each batch, in two manners."""

    def __init__(self) -> None:
        super().__init__(lin(0))
        self.copies: list[list[nn.Module]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.copies.append([copy.deepcopy(self.net), pickle.loads(pickle.dumps(self.net))])


@in_every_way
def test_copies_made_between_steps_are_ordinary_modules(way: Way) -> None:
    """Locks and threads on the layers, copies of old weights, or copies that still go through the pipeline."""
    module = Copies()
    copy.deepcopy(module)
    fit(module, [col(1, 1)] * 3, way)
    for step, copies in enumerate(module.copies, start=1):
        for layers in copies:
            assert type(layers) is nn.Sequential
            assert weights(layers) == near([-step])
            layers.zero_grad()
            layers(col(1, 3)).mean().backward()
            assert layers[0].weight.grad.item() == near(2.0)
    assert weights(copy.deepcopy(module)) == near([-3.0])


class SkipsOne(Net):
    """Runs its layers and then returns nothing for the second batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@in_every_way
def test_a_batch_skipped_by_returning_none(way: Way) -> None:
    """A hang, or the skipped batch's work carried into the next."""
    module = SkipsOne(lin(0))
    trainer = fit(module, [col(1), col(2), col(4)], way)
    assert weights(module) == near([-5.0])
    assert trainer.global_step == 3


@in_every_way
def test_a_batch_of_several_rows_skipped_by_returning_none(way: Way) -> None:
    """Only some of the skipped batch's microbatches left out."""
    module = SkipsOne(lin(0))
    trainer = fit(module, [X, col(2, 2, 2, 2), X], way)
    assert weights(module) == near([-6.0])
    assert trainer.global_step == 3


@in_every_way
def test_a_skipped_batch_is_no_step_of_adam(way: Way) -> None:
    """A step of Adam with gradients of zero, which still moves the weights and its counters."""
    module = SkipsOne(lin(0), optimizer=adam(0.1))
    trainer = fit(module, [col(1), col(2), col(4)], way)
    assert weights(module) == near([-0.1884376])
    assert trainer.optimizers[0].state[module.net[0].weight]["step"] == 2


def loss_and_more(module: Net, batch: Tensor) -> dict[str, Any]:
    output = module.net(batch)
    return {"loss": output.mean(), "n": len(batch), "y": output.detach()}


@in_every_way
def test_a_dict_of_outputs_is_that_of_the_batch(way: Way) -> None:
    """Outputs and counts of one microbatch handed to the hooks as if they were the batch's."""
    seen = AtBatchEnd(lambda module, outputs: outputs)
    fit(Net(lin(0), loss=loss_and_more), [X, col(1, 2, 6)], way, callbacks=[seen])
    assert [outputs["y"].shape for outputs in seen.seen] == [(4, 1), (3, 1)]
    assert torch.equal(seen.seen[1]["y"], col(-3, -6, -18))
    assert [outputs["n"] for outputs in seen.seen] == [4, 3]


class Predicts(Net):
    """Predicts, validates and trains; counts the optimizers it was asked for."""

    def __init__(self) -> None:
        super().__init__(lin(2))
        self.optimizers_made = 0

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        self.optimizers_made += 1
        return super().configure_optimizers()


@in_every_way
def test_predictions_are_complete_and_in_order(way: Way) -> None:
    """Rows in the order of completion, the last batch padded or dropped, or a trainer of no further use."""
    module, trainer = Predicts(), way.trainer()
    rows = DataLoader(col(*range(7)), batch_size=3)
    predictions = trainer.predict(module, rows)
    assert [batch.flatten().tolist() for batch in predictions] == [[0, 2, 4], [6, 8, 10], [12]]
    for batch in predictions:
        assert (batch.ndim, batch.device.type, batch.requires_grad) == (2, "cpu", False)
    assert module.optimizers_made == 0
    (metrics,) = trainer.validate(module, rows, verbose=False)
    assert metrics == {"val_loss": near(6.0)}
    trainer.fit(module, loader([X]))
    assert weights(module) == near([-1.0])
    assert module.optimizers_made == 1
